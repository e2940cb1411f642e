"""Chooses pages for decoding queries in C: the twin of the torch kernels' file of this name.

`select_pages.h` explains how. Bytes moved: 4 x D for every page and KV head.
"""

from __future__ import annotations

from ctypes import Structure, byref, c_int32, c_int64, c_void_p

import torch
from torch import Tensor

from .library import library
from .pages import TYPES, address_of, side_by_side


class _Bounds(Structure):
    """The arguments of `score_columns`, as `Bounds` in select_pages.h."""

    _fields_ = [
        *((name, c_void_p) for name in ("q", "bounds", "table", "lens", "scores")),
        *((name, c_int64) for name in ("q_row", "q_head", "bounds_page", "bounds_head")),
        *((name, c_int64) for name in ("table_row", "rows", "heads", "groups", "dim", "count")),
        *((name, c_int64) for name in ("columns", "page_size")),
        *((name, c_int32) for name in ("type", "threads")),
    ]


def score_columns(
    q: Tensor, bounds: Tensor, page_ids: Tensor, lens: Tensor, page_size: int
) -> Tensor:
    """Twin of `torch/select_pages.score_columns`; ids are int32, contiguous in each row."""
    q = side_by_side(q)
    (n, heads, dim), (count, groups, *_), columns = q.shape, bounds.shape, page_ids.shape[1]
    scores = torch.empty(n, groups, columns, dtype=torch.float32, device=q.device)
    call = _Bounds(
        *map(address_of, (q, bounds, page_ids, lens, scores)),
        *(*q.stride()[:2], *bounds.stride()[:2], page_ids.stride(0)),
        *(n, heads, groups, dim, count, columns, page_size),
        *(TYPES[q.dtype], torch.get_num_threads()),
    )
    library().score_columns(byref(call))
    return scores


def choose_columns(scores: Tensor, count: int) -> Tensor:
    """Twin of `torch/select_pages.choose_columns`, in int32; of equal scores the first ones."""
    n, groups, columns = scores.shape
    chosen = torch.empty(n, groups, count, dtype=torch.int32, device=scores.device)
    sizes = (c_int64(x) for x in (n * groups, columns, count))
    to = c_void_p(scores.data_ptr()), c_void_p(chosen.data_ptr())
    library().choose_columns(*to, *sizes, c_int32(torch.get_num_threads()))
    return chosen
