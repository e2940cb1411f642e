"""One token of a short causal convolution for each row of a step.

Each channel has its own filter over its last F inputs, which are its state:

    inputs  <-  inputs[1:], x
    out      =  silu(weight inputs + bias)

The inputs are in the pool of their layer, in slots that are read and written as in `delta_rule.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from .slots import Expected, check_tensors, read_slots, write_slots


def convolution_step(
    x: Tensor,
    states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    source: Tensor,
    target: Tensor,
    *,
    silu: bool = True,
    into: Tensor | None = None,
) -> Tensor:
    """Advances the states of all rows by a token.

    Args:
        x: `[B, C]`.
        states: `[slots, C, F]` in the dtype of x.
        weight, bias: `[C, F]` and `[C]`.
        source: `[B]` int64, slots to read; -1: the state is zero.
        target: `[B]` int64, slots to write, distinct and no source of another row; -1: the state is
            not kept.
        silu: whether SiLU is applied to the sum.
        into: the pool to write, if it is not `states`.

    Returns:
        `[B, C]` in the dtype of x; sums are float32.

    Raises:
        ValueError, TypeError: tensors that do not fit together.
    """
    into = states if into is None else into
    check_call(x, states, weight, bias, source, target, into)
    inputs = torch.cat([read_slots(states, source)[..., 1:], x.unsqueeze(-1)], -1)
    write_slots(into, target, inputs)
    out = (inputs.float() * weight.float()).sum(-1)
    if bias is not None:
        out = out + bias.float()
    return (functional.silu(out) if silu else out).to(x.dtype)


def check_call(
    x: Tensor,
    states: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    source: Tensor,
    target: Tensor,
    into: Tensor,
) -> None:
    """Raises ValueError or TypeError for tensors that do not fit together."""
    if x.ndim != 2:
        raise ValueError(f"x: expected [B, C], got {list(x.shape)}")
    if weight.ndim != 2:
        raise ValueError(f"weight: expected [C, F], got {list(weight.shape)}")
    (rows, channels), width = x.shape, weight.shape[1]
    pool, slots = (channels, width), ((rows,), torch.int64)
    expected: dict[str, Expected] = {
        "states": (states, (len(states), *pool), x.dtype),
        "into": (into, (len(into), *pool), x.dtype),
        "weight": (weight, pool, None),
        "source": (source, *slots),
        "target": (target, *slots),
    }
    if bias is not None:
        expected["bias"] = bias, (channels,), None
    check_tensors("x", x, expected)
