"""The C backend: attention over pages where they are, on a processor.

The twin of the other kernels' `paged_attention`; `attend.c` explains how. C writes coded pages as
well; the torch backend does everything else. Bytes moved per decode step and layer: K and V of
every visible token, once.
"""

from __future__ import annotations

from ctypes import Structure, byref, c_float, c_int32, c_int64, c_void_p

import numpy as np
import torch
from torch import Tensor

from pagedkv.kernels.formats import Pages, is_view_of_k
from pagedkv.kernels.prefixes import Ints
from pagedkv.kernels.scoring import Scoring
from pagedkv.kernels.torch import backend as dense
from pagedkv.kernels.torch.backend import copy_pages as copy_pages
from pagedkv.kernels.torch.backend import decode_pages as decode_pages

from . import page_coding as coded
from .library import library
from .page_coding import encode_pages as encode_pages
from .page_coding import write_pages as write_pages
from .pages import FORMATS, TYPES, CPages, address_of, in_c, side_by_side


def serves(*pages: Tensor | Pages) -> bool:
    """Whether the library knows the formats of pages; torch reads every format."""
    return all(isinstance(one, Tensor) or one.format in FORMATS for one in pages)


def write_kv(
    k: Tensor, v: Tensor, k_pages: Tensor | Pages, v_pages: Tensor | Pages, slots: Tensor
) -> None:
    """Twin of `reference.write_kv`, for slots that are all >= 0; torch writes dense pages."""
    if isinstance(k_pages, Pages) and isinstance(v_pages, Pages):
        coded.write_kv(k, v, k_pages, v_pages, slots)
    else:
        dense.write_kv(k, v, k_pages, v_pages, slots)


BY_HEAD = "sinks", "alibi_slopes", "distance_bias"


class Call(Structure):
    """The arguments of attention, as `Call` in attend.c."""

    _fields_ = [
        *((name, CPages) for name in ("k", "v")),
        *((name, c_void_p) for name in ("q", "out", "lse", *BY_HEAD, "tree", "table", "chosen")),
        *((name, c_void_p) for name in ("num_new", "kv_lens")),
        *((name, c_int64) for name in ("q_token", "q_head", "columns", "read")),
        *((name, c_int64) for name in ("rows", "heads", "groups", "page_size", "window")),
        *((name, c_int64) for name in ("bias_token", "bias_head", "distances")),
        *((name, c_float) for name in ("scale", "softcap")),
        *((name, c_int32) for name in ("type", "v_is_k", "threads", "causal")),
    ]


def paged_attention(
    q: Tensor,
    k_pages: Tensor | Pages,
    v_pages: Tensor | Pages,
    page_table: Tensor,
    num_new: Ints,
    kv_lens: Ints,
    scoring: Scoring,
    *,
    return_lse: bool = False,
    chosen: Tensor | None = None,
    causal: bool = True,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention as in `reference.paged_attention`, after K and V of the step were written.

    Args:
        q: `[T, H, D]`.
        page_table: `[B, columns]` int32.
        num_new, kv_lens: `[B]` int64, new tokens of each row, and its length with them.
        chosen: `[B, G, count]` int32, columns that the only query of a row reads, ascending; -1 in
            the first place if the row reads all.
        causal: if not, every query sees all tokens of its row; without a window or chosen pages.
        out, lse: contiguous buffers for the results; made unless given.

    Returns:
        `[T, H, D]` in the dtype of `q`, D that of V, and the log-sum-exp `[T, H]`, empty unless
        the caller asks for it.
    """
    if out is None:
        out = q.new_empty(*q.shape[:2], Pages.of(v_pages).head_dim)
    if lse is None:
        lse = q.new_empty(q.shape[:2] if return_lse else 0, dtype=torch.float32)
    pages, results = (k_pages, v_pages), (out, lse if return_lse else None)
    call = call_of(q, pages, page_table, num_new, kv_lens, scoring, results, chosen, causal)
    if library().paged_attention(byref(call)):
        raise MemoryError("paged attention: no memory for scratch")
    return out, lse


def call_of(
    q: Tensor,
    pages: tuple[Tensor | Pages, Tensor | Pages],
    page_table: Tensor,
    num_new: Ints,
    kv_lens: Ints,
    scoring: Scoring,
    results: tuple[Tensor, Tensor | None],
    chosen: Tensor | None = None,
    causal: bool = True,
) -> Call:
    """Describes a call to C; the result keeps alive all that C reads."""
    k, v = map(Pages.of, pages)
    q = side_by_side(q)
    page_table = page_table if page_table.is_contiguous() else page_table.contiguous()
    sinks, slopes, bias = (None if x is None else x.float() for x in scoring[3:6])
    by_head = (None if x is None else x.contiguous() for x in (sinks, slopes))
    bias = bias if bias is None or bias.stride(2) == 1 else bias.contiguous()
    by_distance = (0, 0, 0) if bias is None else (*bias.stride()[:2], bias.shape[2])
    num_new, kv_lens = (np.ascontiguousarray(x, np.int64) for x in (num_new, kv_lens))
    tensors = q, *results, *by_head, bias, scoring.tree, page_table, chosen
    call = Call(
        *(in_c(x, q.dtype) for x in (k, v)),
        *map(address_of, tensors),
        *(num_new.ctypes.data, kv_lens.ctypes.data),
        *(q.stride(0), q.stride(1), page_table.shape[1], 0 if chosen is None else chosen.shape[2]),
        *(len(num_new), q.shape[1], k.data.shape[1], k.data.shape[2], scoring.window or 0),
        *(*by_distance, scoring.scale, scoring.softcap or 0.0),
        *(TYPES[q.dtype], is_view_of_k(*pages), torch.get_num_threads(), causal),
    )
    call.kept = tensors, num_new, kv_lens  # kept alive, because C reads them
    return call
