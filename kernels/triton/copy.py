"""Copies whole pages, of all layers in one launch, within a storage or from one to another.

Bytes moved: 2 x pages x L x G x P x D x itemsize.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from .geometry import Target
from .launch import Launcher, check_aligned, layer_stride, target_of
from .tile import at_layer

BLOCK = 2048  # elements a program
NUM_WARPS = 8


@triton.jit(do_not_specialize=["from_stride", "to_stride"])
def _copy_pages(
    from_ptr,
    to_ptr,
    source_ptr,
    target_ptr,
    from_stride,
    to_stride,
    SIZE: tl.constexpr,  # elements of a page, which are contiguous
    BLOCK: tl.constexpr,
):
    """One program copies one piece of one page in one layer."""
    pair, layer, piece = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    source = tl.load(source_ptr + pair).to(tl.int64)
    target = tl.load(target_ptr + pair).to(tl.int64)
    offs = piece * BLOCK + tl.arange(0, BLOCK)
    mask = offs < SIZE
    source_ptr = at_layer(from_ptr, layer, from_stride) + source * SIZE
    target_ptr = at_layer(to_ptr, layer, to_stride) + target * SIZE
    tl.store(target_ptr + offs, tl.load(source_ptr + offs, mask=mask, other=0.0), mask=mask)


def copy_pages(pages: Tensor, source: Tensor, target: Tensor, into: Tensor | None = None) -> None:
    """Twin of `reference.copy_pages`; sources and targets are distinct.

    Raises:
        ValueError: a page is not one contiguous run, the two storages lay it out differently, or
            there are not as many sources as targets.
        TypeError: `into` has another dtype.
    """
    into = pages if into is None else into
    check_aligned(pages=pages, into=into, source=source, target=target)
    layers, _, *page = pages.shape
    size = page[0] * page[1] * page[2]
    if into.dtype != pages.dtype:
        raise TypeError(f"into: expected {pages.dtype}, got {into.dtype}")
    if source.shape != target.shape or source.dtype != target.dtype:
        raise ValueError(
            f"target: expected ids like `source`, {source.dtype} {list(source.shape)}, got "
            f"{target.dtype} {list(target.shape)}"
        )
    if into.shape[0] != layers or into.shape[2:] != pages.shape[2:]:
        raise ValueError(
            f"into: expected [L, N, G, P, D] = [{layers}, N, *{page}], got {list(into.shape)}"
        )
    # Each page has to be one run, and all in one order: HND and NHD pages do not mix.
    for name, tensor in (("pages", pages), ("into", into)):
        dense = sorted(tensor.stride()[2:]) == _dense(tensor)
        same = tensor.stride()[2:] == pages.stride()[2:]
        if tensor.stride(1) != size or not (dense and same):
            raise ValueError(
                f"{name}: expected pages of {size} contiguous elements in the order of `pages`, "
                f"got strides {tensor.stride()}"
            )
    if not source.numel():
        return
    launcher = _launcher(size, pages.dtype, source.dtype, target_of(pages.device))
    launcher(
        (source.numel(), layers, triton.cdiv(size, BLOCK)),
        *(pages, into, source, target),
        *(layer_stride(pages), layer_stride(into)),
    )


def _dense(pages: Tensor) -> list[int]:
    """Returns the strides, ascending, that `[G, P, D]` would have in this order without gaps."""
    order = sorted(zip(pages.stride()[2:], pages.shape[2:]))
    strides, run = [], 1
    for _, extent in order:
        strides.append(run)
        run *= extent
    return strides


@functools.cache
def _launcher(size: int, dtype: torch.dtype, ids: torch.dtype, target: Target) -> Launcher:
    return Launcher(_copy_pages, target, {"SIZE": size, "BLOCK": BLOCK}, NUM_WARPS, 1)
