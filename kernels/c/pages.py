"""Describes tensors, and K or V pages of one layer, for the C files."""

from __future__ import annotations

from ctypes import Structure, c_int32, c_int64, c_void_p

import torch
from torch import Tensor

from pagedkv.kernels.formats import DENSE, FP8, INT4_CHANNEL, INT4_TOKEN, INT8, Pages

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
FORMATS = {format: i for i, format in enumerate((DENSE, FP8, INT8, INT4_TOKEN, INT4_CHANNEL))}


class CPages(Structure):
    """K or V pages, as `Pages` in attend.c."""

    _fields_ = [
        *((name, c_void_p) for name in ("data", "scales", "staging")),
        *((f"data_{axis}", c_int64) for axis in ("page", "head", "slot")),
        *((f"scales_{axis}", c_int64) for axis in ("page", "head")),
        *((f"staging_{axis}", c_int64) for axis in ("page", "head", "slot")),
        *((name, c_int64) for name in ("count", "dim")),
        *((name, c_int32) for name in ("format", "type")),
    ]


def address_of(x: Tensor | None) -> int | None:
    """Returns the address of a tensor's elements; None for no tensor.

    Raises:
        TypeError: it has no memory, because it only traces a computation.
    """
    address = None if x is None else x.data_ptr()
    if address == 0 and x is not None and x.numel():
        raise TypeError(f"expected tensors with elements in memory, got a {type(x).__name__}")
    return address


def side_by_side(x: Tensor) -> Tensor:
    """Returns `[n, heads, D]` with a contiguous last axis and its true values in memory."""
    x = x.resolve_neg()
    return x if x.stride(2) == 1 else x.contiguous()


def in_c(pages: Pages, dtype: torch.dtype) -> CPages:
    """Describes pages of a model of this dtype."""
    format, data, scales, staging = pages
    page, head, slot, _ = data.stride()
    by_page = (0, 0) if scales is None or format.static else scales.stride()[:2]
    staged = (0, 0, 0) if staging is None else staging.stride()[:3]
    return CPages(
        *map(address_of, (data, scales, staging)),
        *(page, head, slot, *by_page, *staged, data.shape[0], pages.head_dim),
        *(FORMATS[format], TYPES[dtype]),
    )
