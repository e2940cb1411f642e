"""One token of the gated delta rule for each row of a step, as decoding needs it.

    S  <-  exp(gate) S
    S  <-  S + k (beta (v - k S))
    out =  q S

S is a head's matrix `[Dk, Dv]`, in the pool of its layer: a row reads it from its slot before the
step, and writes it to its slot after the step. All arithmetic is float32; operations and their
order are those of transformers' `torch_recurrent_gated_delta_rule`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .slots import check_tensors, read_slots, write_slots

EPSILON = 1e-6  # added under the root when keys and queries are normalized


def delta_rule_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    beta: Tensor,
    states: Tensor,
    source: Tensor,
    target: Tensor,
    *,
    normalize: bool = True,
    into: Tensor | None = None,
) -> Tensor:
    """Advances the states of all rows by a token.

    Args:
        q, k: `[B, Hk, Dk]`; value heads are in Hk groups, each of which shares a key head.
        v: `[B, Hv, Dv]`.
        gate: `[B, Hv]`, logarithm of the state's decay; or `[B, Hv, Dk]`, for each row of it.
        beta: `[B, Hv]`, the share of v that is written.
        states: `[slots, Hv, Dk, Dv]` float32.
        source: `[B]` int64, slots to read; -1: the state is zero.
        target: `[B]` int64, slots to write, distinct and no source of another row; -1: the state is
            not kept.
        normalize: scale q and k to length 1 first, as all supported models do.
        into: the pool to write, if it is not `states`.

    Returns:
        `[B, Hv, Dv]` in the dtype of v.

    Raises:
        ValueError, TypeError: tensors that do not fit together.
    """
    into = states if into is None else into
    check_call(q, k, v, gate, beta, states, source, target, into)
    dtype, share = v.dtype, v.shape[1] // k.shape[1]
    q, k, v, gate, beta = (x.float().contiguous() for x in (q, k, v, gate, beta))
    if normalize:
        q, k = _normalized(q), _normalized(k)
    q = q / q.shape[-1] ** 0.5
    q, k = (x.repeat_interleave(share, 1) for x in (q, k))
    decay = gate.exp().view(*gate.shape[:2], gate.shape[2:].numel(), 1)
    state = read_slots(states, source) * decay
    delta = (v - (state * k.unsqueeze(-1)).sum(-2)) * beta.unsqueeze(-1)
    state = state + k.unsqueeze(-1) * delta.unsqueeze(-2)
    write_slots(into, target, state)
    return (state * q.unsqueeze(-1)).sum(-2).to(dtype)


def _normalized(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + EPSILON)


def check_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    beta: Tensor,
    states: Tensor,
    source: Tensor,
    target: Tensor,
    into: Tensor,
) -> None:
    """Raises ValueError or TypeError for tensors that do not fit together."""
    for name, tensor, what in (("k", k, "B, Hk, Dk"), ("v", v, "B, Hv, Dv")):
        if tensor.ndim != 3:
            raise ValueError(f"{name}: expected [{what}], got {list(tensor.shape)}")
    rows, key_heads, key_dim = k.shape
    heads, dim = v.shape[1:]
    if not key_heads or heads % key_heads:
        raise ValueError(f"v: expected a multiple of {key_heads} heads, got {heads}")
    check_tensors(
        "v",
        v,
        {
            "q": (q, (rows, key_heads, key_dim), None),
            "v": (v, (rows, heads, dim), None),
            "gate": (gate, (rows, heads, key_dim)[: max(2, gate.ndim)], None),
            "beta": (beta, (rows, heads), None),
            "states": (states, (len(states), heads, key_dim, dim), torch.float32),
            "into": (into, (len(into), heads, key_dim, dim), torch.float32),
            "source": (source, (rows,), torch.int64),
            "target": (target, (rows,), torch.int64),
        },
    )
