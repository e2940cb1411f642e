"""Writes new K and V into pages, by slot.

One program takes some rows (token, KV head) of both K and V. Bytes moved: 4 x T x G x D x itemsize
(each of K and V read and written), plus 8 a token for its slot.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from .launch import Launcher, Target, check_aligned, in_units, target_of

BLOCK_ROWS = 16
NUM_WARPS = 4


@triton.jit(
    do_not_specialize=["num_tokens", "k_stride_t", "k_stride_g", "v_stride_t", "v_stride_g"]
)
def _write_kv(
    k_ptr,
    v_ptr,
    k_pages_ptr,
    v_pages_ptr,
    slots_ptr,
    num_tokens,
    k_stride_t,
    k_stride_g,
    v_stride_t,
    v_stride_g,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    STRIDE_N: tl.constexpr,
    STRIDE_G: tl.constexpr,
    STRIDE_P: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Moves rows of one head; a token whose slot is -1 is left out."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    token = row // NUM_KV_HEADS
    head = row % NUM_KV_HEADS
    offs_d = tl.arange(0, BLOCK_D)
    slot = tl.load(slots_ptr + token, mask=token < num_tokens, other=-1).to(tl.int64)
    mask = (slot >= 0)[:, None] & (offs_d < HEAD_DIM)[None, :]
    to = slot // PAGE * STRIDE_N + head * STRIDE_G + slot % PAGE * STRIDE_P
    to = to[:, None] + offs_d[None, :]
    k_from = token * (k_stride_t * 16) + head * (k_stride_g * 16)
    v_from = token * (v_stride_t * 16) + head * (v_stride_g * 16)
    k = tl.load(k_ptr + k_from[:, None] + offs_d[None, :], mask=mask, other=0.0)
    v = tl.load(v_ptr + v_from[:, None] + offs_d[None, :], mask=mask, other=0.0)
    tl.store(k_pages_ptr + to, k, mask=mask)
    tl.store(v_pages_ptr + to, v, mask=mask)


def write_kv(k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, slots: Tensor) -> None:
    """Twin of `reference.write_kv`; K and V may be slices of a wider tensor."""
    check_aligned(k=k, v=v, k_pages=k_pages, v_pages=v_pages, slots=slots)
    if not k.dtype == v.dtype == k_pages.dtype == v_pages.dtype:
        raise TypeError(
            f"k, v: expected the dtype of the pages, {k_pages.dtype}, got {k.dtype} and {v.dtype}"
        )
    tokens, kv_heads, _ = k.shape
    strides = *in_units("k", k), *in_units("v", v)
    if not tokens:
        return
    dtypes = k.dtype, slots.dtype
    launcher = _launcher(k_pages.shape[1:], k_pages.stride()[:3], dtypes, target_of(k.device))
    launcher(
        (triton.cdiv(tokens * kv_heads, BLOCK_ROWS), 1, 1),
        *(k, v, k_pages, v_pages, slots, tokens),
        *strides,
    )


@functools.cache
def _launcher(
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    dtypes: tuple[torch.dtype, ...],
    target: Target,
) -> Launcher:
    kv_heads, page, dim = shape
    static = {
        "NUM_KV_HEADS": kv_heads,
        "HEAD_DIM": dim,
        "PAGE": page,
        **dict(zip(("STRIDE_N", "STRIDE_G", "STRIDE_P"), strides)),
        "BLOCK_ROWS": BLOCK_ROWS,
        "BLOCK_D": triton.next_power_of_2(dim),
    }
    return Launcher(_write_kv, target, static, NUM_WARPS, 1)
