"""One token of a short causal convolution for each row of a step.

Bytes moved: 2 x B x C x F x itemsize of states, and the filters, which all rows share.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagedkv.kernels.torch.short_convolution import check_call

from .geometry import Target
from .launch import Launcher, target_of
from .slots import check_dtypes, check_pools, readable

BLOCK = 1024  # numbers of a state for each program
NUM_WARPS = 4


@triton.jit(
    do_not_specialize=["x_row"],
    do_not_specialize_on_alignment=[
        *("x_ptr", "weight_ptr", "bias_ptr", "source_ptr", "target_ptr")
    ],
)
def _convolve(
    x_ptr,
    states_ptr,
    into_ptr,
    weight_ptr,
    bias_ptr,
    source_ptr,
    target_ptr,
    out_ptr,
    x_row,
    SLOT: tl.constexpr,  # from a slot to the next, in elements
    INTO_SLOT: tl.constexpr,
    CHANNELS: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_F: tl.constexpr,
    SILU: tl.constexpr,
):
    """One program advances the state of some channels of a row."""
    PIECES: tl.constexpr = (CHANNELS + BLOCK_C - 1) // BLOCK_C
    row = (tl.program_id(0) // PIECES).to(tl.int64)
    channel = tl.program_id(0) % PIECES * BLOCK_C + tl.arange(0, BLOCK_C)
    place = tl.arange(0, BLOCK_F)
    is_c = channel < CHANNELS
    at = channel[:, None] * WIDTH + place[None, :]
    source, target = tl.load(source_ptr + row), tl.load(target_ptr + row)
    x = tl.load(x_ptr + row * x_row + channel, mask=is_c, other=0.0)
    older = is_c[:, None] & (place < WIDTH - 1)[None, :] & (source >= 0)
    inputs = tl.load(states_ptr + source * SLOT + at + 1, mask=older, other=0.0)
    inputs = tl.where((place == WIDTH - 1)[None, :], x[:, None], inputs)
    # A number is read where its left neighbour writes: all are read before one is written.
    tl.debug_barrier()
    inside = is_c[:, None] & (place < WIDTH)[None, :]
    tl.store(into_ptr + target * INTO_SLOT + at, inputs, mask=inside & (target >= 0))
    weight = tl.load(weight_ptr + at, mask=inside, other=0.0)
    out = tl.sum(inputs.to(tl.float32) * weight.to(tl.float32), 1)
    if bias_ptr is not None:
        out += tl.load(bias_ptr + channel, mask=is_c, other=0.0).to(tl.float32)
    if SILU:
        out = out / (1 + tl.exp(-out))
    tl.store(out_ptr + row * CHANNELS + channel, out.to(out_ptr.dtype.element_ty), mask=is_c)


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
    """Twin of `torch/short_convolution.py`.

    Raises:
        NotImplementedError: a dtype without a kernel.
        ValueError, TypeError: tensors that do not fit together, or do not lie as the kernel reads
            them.
    """
    into = states if into is None else into
    check_call(x, states, weight, bias, source, target, into)
    check_dtypes(x=x, weight=weight, bias=bias)
    check_pools(states, into)
    weight, source, target = (t.contiguous() for t in (weight, source, target))
    x, bias = readable(x), None if bias is None else bias.contiguous()
    channels, width = weight.shape
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not out.numel():
        return out
    dtypes = x.dtype, weight.dtype, None if bias is None else bias.dtype
    strides = states.stride(0), into.stride(0)
    launcher = _launcher(*strides, channels, width, silu, dtypes, target_of(x.device))
    grid = len(x) * triton.cdiv(channels, launcher.static["BLOCK_C"])
    launcher((grid, 1, 1), x, states, into, weight, bias, source, target, out, x.stride(0))
    return out


@functools.cache
def _launcher(
    slot: int,
    into_slot: int,
    channels: int,
    width: int,
    silu: bool,
    dtypes: tuple[torch.dtype | None, ...],
    target: Target,
) -> Launcher:
    block_f = triton.next_power_of_2(width)
    static = {
        "SLOT": slot,
        "INTO_SLOT": into_slot,
        "CHANNELS": channels,
        "WIDTH": width,
        "BLOCK_C": max(1, BLOCK // block_f),
        "BLOCK_F": block_f,
        "SILU": silu,
    }
    return Launcher(_convolve, target, static, NUM_WARPS, num_stages=1)
