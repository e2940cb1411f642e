"""Converts whole pages between the dtype of the model and the coded formats.

A page whose keys are coded by channel is coded once, when it is full: from the staging page it was
written to (`encode_pages`), or straight from the step's K and V if one step fills it
(`write_pages`). `decode_pages` brings coded pages back if part of a page is to be written anew.

One program takes K or V of one page, head and layer. Bytes moved: 2 x pages x L x G x P x D x
itemsize read, and the bytes of the formats written; for `decode_pages` the other way round.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagedkv.kernels.formats import DENSE, Pages

from .codes import encode_channels, encode_tokens, excess, step_and_least, unpack
from .geometry import Half, Target
from .launch import Launcher, check_aligned, in_units, layer_stride, target_of
from .tile import at_layer, load_tile, store_tile
from .write import store_scales

ROWS = 16  # tokens at a time, where each has its own scale
NUM_WARPS = 4


@triton.jit
def _encode(
    from_ptr,  # the page's first token
    stride_p,
    data_ptr,  # the page
    scales_ptr,  # its scales
    PAGE: tl.constexpr,
    HALF: tl.constexpr,
    ROWS: tl.constexpr,
    ALL_ROWS: tl.constexpr,  # of the page, padded
):
    """Codes one page of one head."""
    FORMAT: tl.constexpr = HALF.format
    PARTS: tl.constexpr = HALF.parts
    WIDTH: tl.constexpr = HALF.width
    BLOCK: tl.constexpr = HALF.block
    if FORMAT.scales == "channel":
        row = tl.arange(0, ALL_ROWS)
        offs = tl.arange(0, BLOCK)
        inside = row < PAGE
        words = tl.zeros([ALL_ROWS, BLOCK], tl.int32)
        for part in tl.static_range(PARTS):
            at = from_ptr + part * WIDTH
            (x,) = load_tile(at, row * stride_p, inside, 1, WIDTH, BLOCK)
            codes, step, least = encode_channels(x, inside)
            words |= codes << (16 // PARTS * part)
            store_scales(scales_ptr, part * WIDTH + offs, step, least, offs < WIDTH, FORMAT)
        store_tile(data_ptr, row * HALF.stride_p, inside, (words.to(tl.int16),), WIDTH)
    else:
        for start in range(0, PAGE, ROWS):
            row = start + tl.arange(0, ROWS)
            inside = row < PAGE
            x = load_tile(from_ptr, row * stride_p, inside, PARTS, WIDTH, BLOCK)
            if FORMAT.dense:
                store_tile(data_ptr, row * HALF.stride_p, inside, x, WIDTH)
            else:
                scale = 1.0
                if FORMAT.static:
                    scale = tl.full(x[0].shape, 1.0, tl.float32) * tl.load(scales_ptr)
                words, scale, least = encode_tokens(x, WIDTH, FORMAT, scale)
                store_tile(data_ptr, row * HALF.stride_p, inside, (words,), WIDTH)
                store_scales(scales_ptr, row, scale, least, inside, FORMAT)


@triton.jit
def _scaled(
    codes,  # [ROWS, BLOCK], a part of what tokens hold
    scales_ptr,  # the page's
    row,
    inside,
    PART: tl.constexpr,
    WIDTH: tl.constexpr,
    FORMAT: tl.constexpr,
):
    """The values that codes stand for."""
    if FORMAT.static:
        return codes * tl.load(scales_ptr)
    elif not FORMAT.pairs:
        scale = tl.load(scales_ptr + row, mask=inside, other=0.0)
        return codes * scale.to(tl.float32)[:, None]
    else:
        pairs_ptr = scales_ptr.to(tl.pointer_type(tl.int32))
        if FORMAT.scales == "token":
            pairs = tl.load(pairs_ptr + row, mask=inside, other=0)[:, None]
        else:
            offs = tl.arange(0, codes.shape[1])
            at = pairs_ptr + PART * WIDTH + offs
            pairs = tl.load(at, mask=offs < WIDTH, other=0)[None, :]
        step, least = step_and_least(pairs)
        return (codes - excess(FORMAT)) * step + least


@triton.jit
def _decode(
    data_ptr,  # the page
    scales_ptr,  # its scales
    to_ptr,  # the staging page
    PAGE: tl.constexpr,
    HALF: tl.constexpr,
    STAGING: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Decodes one page of one head."""
    FORMAT: tl.constexpr = HALF.format
    PARTS: tl.constexpr = HALF.parts
    WIDTH: tl.constexpr = HALF.width
    for start in range(0, PAGE, ROWS):
        row = start + tl.arange(0, ROWS)
        inside = row < PAGE
        values = load_tile(data_ptr, row * HALF.stride_p, inside, 1, WIDTH, HALF.block)
        if not FORMAT.dense:
            codes = unpack(values[0], FORMAT, tl.float32, False)
            values = tl.tuple([])
            for part in tl.static_range(PARTS):
                values += (_scaled(codes[part], scales_ptr, row, inside, part, WIDTH, FORMAT),)
        store_tile(to_ptr, row * STAGING.stride_p, inside, values, WIDTH)


@triton.jit
def _scales_of(
    ptr,
    layer,
    page,
    head,
    num_pages,
    NUM_KV_HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    HALF: tl.constexpr,
):
    """Where the scales of one page and head begin, in a tensor of all layers."""
    FORMAT: tl.constexpr = HALF.format
    which = (layer * num_pages + page) * NUM_KV_HEADS + head
    NUMBERS: tl.constexpr = 2 if FORMAT.pairs else 1
    if FORMAT.dense:
        return ptr
    elif FORMAT.static:
        # Each layer's begin at a multiple of 16 bytes.
        return ptr + layer * ((NUM_KV_HEADS + 3) // 4 * 4) + head
    elif FORMAT.scales == "token":
        return ptr + which * (NUMBERS * PAGE)
    else:
        return ptr + which * (NUMBERS * HALF.dim)


_STRIDES = [f"{name}_stride_{axis}" for name in "kv" for axis in "lngp"]
_LAYERS = ["k_layer", "v_layer"]


@triton.jit(do_not_specialize=["first_source", "num_pages", *_LAYERS, *_STRIDES])
def _encode_pages(
    k_from_ptr,
    v_from_ptr,
    k_pages_ptr,
    v_pages_ptr,
    k_scales_ptr,
    v_scales_ptr,
    source_ptr,
    target_ptr,
    first_source,
    num_pages,
    k_layer,
    v_layer,
    k_stride_l,
    k_stride_n,
    k_stride_g,
    k_stride_p,
    v_stride_l,
    v_stride_n,
    v_stride_g,
    v_stride_p,
    NUM_KV_HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    ROWS: tl.constexpr,
    ALL_ROWS: tl.constexpr,
):
    """One program a page and head, a layer, and K or V; strides of sources in units of 16."""
    pair, layer = tl.program_id(0) // NUM_KV_HEADS, tl.program_id(1).to(tl.int64)
    head = tl.program_id(0) % NUM_KV_HEADS
    source = (tl.load(source_ptr + pair) - first_source).to(tl.int64)
    target = tl.load(target_ptr + pair).to(tl.int64)
    if tl.program_id(2) == 0:
        at = layer * k_stride_l + source * k_stride_n + head.to(tl.int64) * k_stride_g
        _encode(
            *(k_from_ptr + at * 16, k_stride_p * 16),
            at_layer(k_pages_ptr, layer, k_layer) + (target * K.stride_n + head * K.stride_g),
            _scales_of(k_scales_ptr, layer, target, head, num_pages, NUM_KV_HEADS, PAGE, K),
            *(PAGE, K, ROWS, ALL_ROWS),
        )
    else:
        at = layer * v_stride_l + source * v_stride_n + head.to(tl.int64) * v_stride_g
        _encode(
            *(v_from_ptr + at * 16, v_stride_p * 16),
            at_layer(v_pages_ptr, layer, v_layer) + (target * V.stride_n + head * V.stride_g),
            _scales_of(v_scales_ptr, layer, target, head, num_pages, NUM_KV_HEADS, PAGE, V),
            *(PAGE, V, ROWS, ALL_ROWS),
        )


@triton.jit(do_not_specialize=["num_pages", *_LAYERS, "staging_layer"])
def _decode_pages(
    k_pages_ptr,
    v_pages_ptr,
    k_scales_ptr,
    v_scales_ptr,
    k_staging_ptr,
    v_staging_ptr,
    source_ptr,
    target_ptr,
    num_pages,
    k_layer,
    v_layer,
    staging_layer,
    NUM_KV_HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    STAGING: tl.constexpr,
    ROWS: tl.constexpr,
):
    """One program a page and head, a layer, and K or V."""
    pair, layer = tl.program_id(0) // NUM_KV_HEADS, tl.program_id(1).to(tl.int64)
    head = tl.program_id(0) % NUM_KV_HEADS
    source = tl.load(source_ptr + pair).to(tl.int64)
    target = (tl.load(target_ptr + pair) - num_pages).to(tl.int64)
    to = target * STAGING.stride_n + head * STAGING.stride_g
    if tl.program_id(2) == 0:
        _decode(
            at_layer(k_pages_ptr, layer, k_layer) + (source * K.stride_n + head * K.stride_g),
            _scales_of(k_scales_ptr, layer, source, head, num_pages, NUM_KV_HEADS, PAGE, K),
            at_layer(k_staging_ptr, layer, staging_layer) + to,
            *(PAGE, K, STAGING, ROWS),
        )
    else:
        _decode(
            at_layer(v_pages_ptr, layer, v_layer) + (source * V.stride_n + head * V.stride_g),
            _scales_of(v_scales_ptr, layer, source, head, num_pages, NUM_KV_HEADS, PAGE, V),
            at_layer(v_staging_ptr, layer, staging_layer) + to,
            *(PAGE, V, STAGING, ROWS),
        )


def encode_pages(k_pages: Pages, v_pages: Pages, source: Tensor, target: Tensor) -> None:
    """Twin of `reference.encode_pages`; sources and targets are distinct."""
    k, v = k_pages.staging, v_pages.staging
    assert k is not None
    assert v is not None
    strides = tuple(stride // 16 for x in (k, v) for stride in x.stride()[:4])
    _launch_encode(k, v, k_pages, v_pages, source, target, k_pages.data.shape[1], strides)


def write_pages(
    k: Tensor, v: Tensor, k_pages: Pages, v_pages: Pages, first_token: Tensor, target: Tensor
) -> None:
    """Twin of `reference.write_pages`; K and V may be slices of a wider tensor."""
    (k_token, k_head), (v_token, v_head) = in_units("k", k), in_units("v", v)
    strides = 0, k_token, k_head, k_token, 0, v_token, v_head, v_token
    k_pages, v_pages = (x.each(lambda tensor: tensor[None]) for x in (k_pages, v_pages))
    _launch_encode(k, v, k_pages, v_pages, first_token, target, 0, strides)


def _launch_encode(
    k: Tensor,
    v: Tensor,
    k_pages: Pages,
    v_pages: Pages,
    source: Tensor,
    target: Tensor,
    first_source: int,
    strides: tuple[int, ...],
) -> None:
    """Codes from any tensor: `source` counts in the second of four strides."""
    check_aligned(k=k, v=v, k_pages=k_pages.data, v_pages=v_pages.data)
    _check_ids(source=source, target=target)
    if not source.numel():
        return
    layers, pages, heads = k_pages.data.shape[:3]
    key = *_key(k_pages, v_pages, v.shape[-1]), k.dtype, target_of(k.device)
    _launcher("encode", *key)(
        (source.numel() * heads, layers, 2),
        *(k, v, k_pages.data, v_pages.data, k_pages.scales, v_pages.scales),
        *(source, target, first_source, pages),
        *(layer_stride(k_pages.data), layer_stride(v_pages.data), *strides),
    )


def decode_pages(k_pages: Pages, v_pages: Pages, source: Tensor, target: Tensor) -> None:
    """Twin of `reference.decode_pages`; sources and targets are distinct."""
    assert k_pages.staging is not None
    _check_ids(source=source, target=target)
    if not source.numel():
        return
    layers, _, heads, _, dim = k_pages.staging.shape
    key = *_key(k_pages, v_pages, dim), k_pages.staging.dtype, target_of(source.device)
    _launcher("decode", *key)(
        (source.numel() * heads, layers, 2),
        *(k_pages.data, v_pages.data, k_pages.scales, v_pages.scales),
        *(k_pages.staging, v_pages.staging, source, target, k_pages.data.shape[1]),
        *(layer_stride(x) for x in (k_pages.data, v_pages.data, k_pages.staging)),
    )


def _check_ids(**tensors: Tensor) -> None:
    """Raises for ids that are not int64, or differ in number."""
    (_, first), *_ = tensors.items()
    for name, ids in tensors.items():
        if ids.dtype != torch.int64 or ids.shape != first.shape or not ids.is_contiguous():
            raise ValueError(
                f"{name}: expected contiguous int64 {list(first.shape)}, got {ids.dtype} "
                f"{list(ids.shape)}"
            )
    check_aligned(**tensors)


def _key(k: Pages, v: Pages, dim: int) -> tuple[int, int, Half, Half, Half | None]:
    """Returns the key of a kernel for pages of all layers, however many they are."""
    _, _, heads, size, _ = k.data.shape
    staging = None if k.staging is None else Half.of(DENSE, k.staging, dim)
    return heads, size, Half.of(k.format, k.data, dim), Half.of(v.format, v.data, dim), staging


@functools.cache
def _launcher(
    what: str,
    kv_heads: int,
    page: int,
    k: Half,
    v: Half,
    staging: Half | None,
    dtype: torch.dtype,
    target: Target,
) -> Launcher:
    static: dict[str, Any] = {"NUM_KV_HEADS": kv_heads, "PAGE": page, "K": k, "V": v, "ROWS": ROWS}
    if what == "encode":
        static["ALL_ROWS"] = triton.next_power_of_2(page)
        return Launcher(_encode_pages, target, static, NUM_WARPS, 1)
    static["STAGING"] = staging
    return Launcher(_decode_pages, target, static, NUM_WARPS, 1)
