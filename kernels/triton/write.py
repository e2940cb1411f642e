"""Writes new K and V into pages, by slot; codes them on the way, unless codes need a whole page.

One program takes some rows (token, KV head) of both K and V. Bytes moved: 2 x T x G x D x itemsize
read, what the format takes of it written, plus 8 a token for its slot.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagedkv.kernels.formats import Pages

from .codes import encode_tokens
from .geometry import Half, Target
from .launch import Launcher, check_aligned, in_units, target_of
from .tile import load_tile, store_tile

BLOCK_ROWS = 16
NUM_WARPS = 4


@triton.jit
def store_scales(ptr, at, scale, least, mask, FORMAT: tl.constexpr):
    """Scales of tokens, or of channels, beginning with the `at`-th."""
    if FORMAT.pairs:
        tl.store(ptr + at * 2, scale, mask=mask)
        tl.store(ptr + at * 2 + 1, least, mask=mask)
    elif not FORMAT.static:
        tl.store(ptr + at, scale, mask=mask)


@triton.jit
def _put(
    rows,  # parts of rows
    page,
    head,
    in_page,
    mask,
    data_ptr,
    scales_ptr,
    NUM_KV_HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    HALF: tl.constexpr,
):
    """Puts rows into their slots."""
    FORMAT: tl.constexpr = HALF.format
    WIDTH: tl.constexpr = HALF.width
    to = page * HALF.stride_n + head * HALF.stride_g + in_page * HALF.stride_p
    if FORMAT.dense:
        store_tile(data_ptr, to, mask, rows, WIDTH, HALF.rest)
    else:
        scale = 1.0
        if FORMAT.static:
            scale = tl.load(scales_ptr + head)[:, None]
            scale = tl.broadcast_to(scale, rows[0].shape)
        words, scale, least = encode_tokens(rows, WIDTH, FORMAT, scale)
        store_tile(data_ptr, to, mask, (words,), WIDTH)
        at = (page * NUM_KV_HEADS + head) * PAGE + in_page
        store_scales(scales_ptr, at, scale, least, mask, FORMAT)


@triton.jit(
    do_not_specialize=[
        *("num_tokens", "first_page", "k_stride_t", "k_stride_g", "v_stride_t", "v_stride_g")
    ]
)
def _write_kv(
    k_ptr,
    v_ptr,
    k_pages_ptr,
    v_pages_ptr,
    k_scales_ptr,
    v_scales_ptr,
    slots_ptr,
    num_tokens,
    first_page,
    k_stride_t,
    k_stride_g,
    v_stride_t,
    v_stride_g,
    NUM_KV_HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    """Moves rows of one head; tokens whose slot is -1, or before `first_page`, are left out."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    token = row // NUM_KV_HEADS
    head = row % NUM_KV_HEADS
    slot = tl.load(slots_ptr + token, mask=token < num_tokens, other=-1).to(tl.int64)
    page = slot // PAGE - first_page
    mask = (slot >= 0) & (page >= 0)
    k_from = token * (k_stride_t * 16) + head * (k_stride_g * 16)
    v_from = token * (v_stride_t * 16) + head * (v_stride_g * 16)
    k = load_tile(k_ptr, k_from, mask, K.parts, K.width, K.block, K.rest)
    if not K.rest:
        v = load_tile(v_ptr, v_from, mask, V.parts, V.width, V.block)
    to = page, head, slot % PAGE, mask
    _put(k, *to, k_pages_ptr, k_scales_ptr, NUM_KV_HEADS, PAGE, K)
    if not K.rest:
        _put(v, *to, v_pages_ptr, v_scales_ptr, NUM_KV_HEADS, PAGE, V)


def write_kv(
    k: Tensor, v: Tensor | None, k_pages: Tensor | Pages, v_pages: Tensor | Pages, slots: Tensor
) -> None:
    """Twin of `reference.write_kv`; K and V may be slices of a wider tensor.

    Args:
        v: None if V's pages are a view of K's.
    """
    halves = [Pages.of(k_pages), Pages.of(v_pages)]
    first_page = 0
    if halves[0].staging is not None:
        first_page = halves[0].data.shape[0]
        halves = [Pages.of(x.staging) for x in halves if x.staging is not None]
    (k_half, v_half), page = halves, halves[0].data.shape[2]
    rest = 0
    if v is None:
        v, rest = k, k_half.head_dim - v_half.head_dim
    check_aligned(k=k, v=v, k_pages=halves[0].data, v_pages=halves[1].data, slots=slots)
    for pages in halves:
        dtype = pages.data.dtype if pages.format.dense else k.dtype
        if not k.dtype == v.dtype == dtype:
            raise TypeError(
                f"k, v: expected the dtype of the pages, {dtype}, got {k.dtype} and {v.dtype}"
            )
    tokens, kv_heads, dim = k.shape
    strides = *in_units("k", k), *in_units("v", v)
    if not tokens:
        return
    of_k = Half.of(k_half.format, k_half.data, dim - rest, rest)
    of_v = Half.of(v_half.format, v_half.data, v.shape[2] - rest)
    dtypes, target = (k.dtype, slots.dtype), target_of(k.device)
    _launcher(kv_heads, page, of_k, of_v, dtypes, target)(
        (triton.cdiv(tokens * kv_heads, BLOCK_ROWS), 1, 1),
        *(k, v, k_half.data, v_half.data, k_half.scales, v_half.scales, slots),
        *(tokens, first_page, *strides),
    )


@functools.cache
def _launcher(
    kv_heads: int, page: int, k: Half, v: Half, dtypes: tuple[torch.dtype, ...], target: Target
) -> Launcher:
    sizes = {"NUM_KV_HEADS": kv_heads, "PAGE": page, "BLOCK_ROWS": BLOCK_ROWS}
    static = sizes | {"K": k, "V": v}
    return Launcher(_write_kv, target, static, NUM_WARPS, 1)
