"""One token of the gated delta rule for each row of a step: states are read and written once.

Bytes moved: 2 x B x Hv x Dk x Dv x 4, and next to nothing beside.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagedkv.kernels.torch.delta_rule import EPSILON, check_call

from .geometry import Target
from .launch import Launcher, target_of
from .slots import check_dtypes, check_pools, readable

BLOCK_V = 32  # columns of a state for each program: 128 bytes of each of its rows
MOST = 256  # rows of a state, which a program holds in registers
NUMBERS = 64  # numbers of a state that a thread holds


@triton.jit(
    do_not_specialize=["q_row", "q_head", "k_row", "k_head", "v_row", "v_head"],
    # They may be parts of one tensor, which begin anywhere; they are small beside the states.
    do_not_specialize_on_alignment=[
        *("q_ptr", "k_ptr", "v_ptr", "gate_ptr", "beta_ptr", "source_ptr", "target_ptr")
    ],
)
def _delta_rule(
    q_ptr,
    k_ptr,
    v_ptr,
    gate_ptr,
    beta_ptr,
    states_ptr,
    into_ptr,
    source_ptr,
    target_ptr,
    out_ptr,
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    SLOT: tl.constexpr,  # from a slot to the next, in elements
    INTO_SLOT: tl.constexpr,
    HEADS: tl.constexpr,
    SHARE: tl.constexpr,  # value heads with one key head
    DK: tl.constexpr,
    DV: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_V: tl.constexpr,
    CHANNELS: tl.constexpr,  # each row of a state has a gate of its own
    NORMALIZE: tl.constexpr,
    EPSILON: tl.constexpr,
):
    """One program advances some columns of a head's state: columns do not depend on each other."""
    PIECES: tl.constexpr = (DV + BLOCK_V - 1) // BLOCK_V  # of a state
    piece = tl.program_id(0) % PIECES
    of_head = tl.program_id(0) // PIECES
    row, head = (of_head // HEADS).to(tl.int64), of_head % HEADS
    of_head = of_head.to(tl.int64)
    offs_k = tl.arange(0, BLOCK_K)
    offs_v = piece * BLOCK_V + tl.arange(0, BLOCK_V)
    is_k, is_v = offs_k < DK, offs_v < DV
    inside = is_k[:, None] & is_v[None, :]
    at = head * (DK * DV) + offs_k[:, None] * DV + offs_v[None, :]
    source, target = tl.load(source_ptr + row), tl.load(target_ptr + row)
    state = tl.load(states_ptr + source * SLOT + at, mask=inside & (source >= 0), other=0.0)

    q_at = row * q_row + (head // SHARE) * q_head
    k_at = row * k_row + (head // SHARE) * k_head
    q = tl.load(q_ptr + q_at + offs_k, mask=is_k, other=0.0).to(tl.float32)
    k = tl.load(k_ptr + k_at + offs_k, mask=is_k, other=0.0).to(tl.float32)
    v = tl.load(v_ptr + row * v_row + head * v_head + offs_v, mask=is_v, other=0.0).to(tl.float32)
    beta = tl.load(beta_ptr + of_head).to(tl.float32)
    if CHANNELS:
        gate = tl.load(gate_ptr + of_head * DK + offs_k, mask=is_k, other=0.0).to(tl.float32)
        decay = tl.exp(gate)[:, None]
    else:
        decay = tl.exp(tl.load(gate_ptr + of_head).to(tl.float32))
    if NORMALIZE:
        q *= tl.rsqrt(tl.sum(q * q, 0) + EPSILON)
        k *= tl.rsqrt(tl.sum(k * k, 0) + EPSILON)
    q *= DK**-0.5

    state *= decay
    delta = (v - tl.sum(state * k[:, None], 0)) * beta
    state += k[:, None] * delta[None, :]
    tl.store(into_ptr + target * INTO_SLOT + at, state, mask=inside & (target >= 0))
    out = tl.sum(state * q[:, None], 0)
    tl.store(out_ptr + of_head * DV + offs_v, out.to(out_ptr.dtype.element_ty), mask=is_v)


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
    """Twin of `torch/delta_rule.py`.

    Raises:
        NotImplementedError: a dtype, or keys of a length, without a kernel.
        ValueError, TypeError: tensors that do not fit together, or do not lie as the kernel reads
            them.
    """
    into = states if into is None else into
    check_call(q, k, v, gate, beta, states, source, target, into)
    (rows, heads, dim), key_dim = v.shape, k.shape[2]
    if key_dim > MOST:
        raise NotImplementedError(f"k: expected at most {MOST} numbers a head, got {key_dim}")
    check_dtypes(q=q, k=k, v=v, gate=gate, beta=beta)
    check_pools(states, into)
    q, k, v = (readable(x) for x in (q, k, v))
    gate, beta, source, target = (x.contiguous() for x in (gate, beta, source, target))
    out = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    if not out.numel():
        return out
    launcher = _launcher(
        *(states.stride(0), into.stride(0), heads, heads // k.shape[1], key_dim, dim),
        *(gate.ndim == 3, normalize, tuple(x.dtype for x in (q, k, v, gate, beta))),
        target_of(v.device),
    )
    launcher(
        (rows * heads * triton.cdiv(dim, BLOCK_V), 1, 1),
        *(q, k, v, gate, beta, states, into, source, target, out),
        *(stride for x in (q, k, v) for stride in x.stride()[:2]),
    )
    return out


@functools.cache
def _launcher(
    slot: int,
    into_slot: int,
    heads: int,
    share: int,
    key_dim: int,
    dim: int,
    channels: bool,
    normalize: bool,
    dtypes: tuple[torch.dtype, ...],
    target: Target,
) -> Launcher:
    block_k = triton.next_power_of_2(key_dim)
    static = {
        "SLOT": slot,
        "INTO_SLOT": into_slot,
        "HEADS": heads,
        "SHARE": share,
        "DK": key_dim,
        "DV": dim,
        "BLOCK_K": block_k,
        "BLOCK_V": BLOCK_V,
        "CHANNELS": channels,
        "NORMALIZE": normalize,
        "EPSILON": EPSILON,
    }
    warps = max(1, block_k * BLOCK_V // (32 * NUMBERS))
    return Launcher(_delta_rule, target, static, warps, num_stages=1)
