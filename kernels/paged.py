"""The Triton backend: what `attention.py` calls where the torch backend (`gather.py`) is not used.

Rows of few new tokens go through `decode.py`, the others through `prefill.py`; both write into one
output, so a mixed batch is two lists of work and no copies. Everything is checked before the first
launch; what a kernel cannot serve is refused, not done in another way.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from . import cascade, decode, prefill, shared_prefix, write
from .cascade import Ints, Prefix
from .copy import copy_pages
from .launch import Geometry, Scoring, check_aligned, target_of
from .work import Bounds

__all__ = ["Plan", "copy_pages", "find_prefixes", "paged_attention", "plan", "write_kv"]

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
HEAD_DIMS = range(16, 257, 16)
MOST_RATIO = 128  # rows of the largest product
OLDEST = 80  # compute capability 8.0: asynchronous copies, bfloat16


class Plan(NamedTuple):
    """One step's work for every layer of one head geometry and window."""

    decode: decode.Plan | None
    prefill: prefill.Plan | None
    geometry: Geometry


def plan(
    kv_lens: Tensor,
    query_start_loc: Tensor,
    q: Tensor,
    k_pages: Tensor,
    *,
    num_new: Sequence[int],
    max_kv: int,
    window: int | None = None,
    prefixes: Sequence[Prefix] = (),
    shared: shared_prefix.Plan | None = None,
) -> Plan:
    """Cuts a step; on the device, so that a replayed graph cuts anew.

    Args:
        q, k_pages: as in `paged_attention`; only their shapes and strides count.
        num_new: of each row, known to the host. While a graph is captured, of its rows to come.
        max_kv: a bound of the rows' lengths.
        prefixes: from `find_prefixes`, if they shall be attended once.
        shared: or their work, already on the device.

    Raises:
        NotImplementedError: a head dim, dtype, number of heads or architecture without a kernel.
        ValueError: heads that do not divide, pages with strides that no kernel takes.
    """
    geometry = Geometry.of(q, k_pages)
    _check_supported(geometry, q.device)
    few = [new for new in num_new if 0 < new <= decode.MOST_QUERIES]
    many = [new for new in num_new if new > decode.MOST_QUERIES]
    lens = kv_lens, query_start_loc, geometry
    if prefixes:
        work = cut_prefixes(prefixes, num_new, geometry.num_heads, k_pages)
        shared = shared_prefix.plan(work, q.device)
    return Plan(
        decode.plan(*lens, _bounds(few, max_kv), window=window, shared=shared) if few else None,
        prefill.plan(*lens, _bounds(many, max_kv), window=window) if many else None,
        geometry,
    )


def find_prefixes(
    num_new: Ints, kv_lens: Ints, page_table: Ints, page_size: int, token_bytes: int
) -> list[Prefix]:
    """Prefixes that are worth a launch of their own; see `cascade.find_prefixes`.

    None where some row decodes several tokens: the parts of rows would not lie side by side.
    """
    if ((num_new > 1) & (num_new <= decode.MOST_QUERIES)).any():
        return []
    worth = shared_prefix.WORTH_BYTES
    return cascade.find_prefixes(num_new, kv_lens, page_table, page_size, token_bytes, worth)


def cut_prefixes(
    prefixes: Sequence[Prefix], num_new: Sequence[int], num_heads: int, k_pages: Tensor
) -> shared_prefix.Work:
    """The work of prefixes, still on the host."""
    ratio, page = num_heads // k_pages.shape[1], k_pages.shape[2]
    tune = _shared_tuning(num_heads, k_pages)
    return shared_prefix.cut(prefixes, num_new, page, ratio, tune.split, tune.splits)


def room_for_prefixes(rows: int, num_heads: int, k_pages: Tensor) -> shared_prefix.Plan:
    """Where a captured graph of so many rows finds the work of their prefixes."""
    splits = _shared_tuning(num_heads, k_pages).splits
    return shared_prefix.room(rows, splits, k_pages.device)


def _shared_tuning(num_heads: int, k_pages: Tensor) -> decode.Tuning:
    geometry = Geometry.of(k_pages.new_empty(0, num_heads, 0), k_pages)
    return decode.tuning(target_of(k_pages.device), geometry, shared_prefix.BLOCK_M)


def _bounds(num_new: list[int], max_kv: int) -> Bounds:
    return Bounds(len(num_new), sum(num_new), max(num_new), max_kv)


def paged_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    kv_lens: Tensor,
    query_start_loc: Tensor,
    plan: Plan,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention as in `reference.paged_attention`, after K and V of the step were written.

    Args:
        plan: from `plan`, the same for every layer of a kind.

    Raises:
        ValueError, TypeError: tensors that do not fit together, or are not aligned.
    """
    if Geometry.of(q, k_pages) != plan.geometry:
        raise ValueError(
            f"plan: expected one for {Geometry.of(q, k_pages)}, got one for {plan.geometry}"
        )
    tables = page_table, kv_lens, query_start_loc
    if not _is_fine(q, k_pages, v_pages, *tables) or sinks is not None:
        _check(q, k_pages, v_pages, *tables, sinks)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    scoring = Scoring(scale, window, softcap, sinks)
    pages = q, k_pages, v_pages, page_table
    if plan.decode is not None:
        decode.paged_attention(*pages, query_start_loc, plan.decode, scoring, out, lse)
    if plan.prefill is not None:
        prefill.paged_attention(*pages, plan.prefill, scoring, out, lse)
    return out, lse


def write_kv(k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, slots: Tensor) -> None:
    """Twin of `reference.write_kv`.

    Raises:
        ValueError: K or V is a view of the pages, or not aligned.
    """
    for name, tensor in (("k", k), ("v", v)):
        if _base(tensor) in (_base(k_pages), _base(v_pages)):
            raise ValueError(f"{name}: expected memory of its own, got a view of the pages")
    write.write_kv(k, v, k_pages, v_pages, slots)


def check_pages(pages: Tensor) -> None:
    """Raises NotImplementedError for pages `[N, G, P, D]` that no kernel serves."""
    _check_supported(Geometry.of(pages[:, :, 0], pages), pages.device)


def _base(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _is_fine(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    kv_lens: Tensor,
    query_start_loc: Tensor,
) -> bool:
    """What `_check` finds out in words, in one go: a layer's call should not cost 10 us of that."""
    rows, strides = kv_lens.shape[0], k_pages.stride()
    return bool(
        k_pages.shape == v_pages.shape
        and q.shape[2] == k_pages.shape[3]
        and strides == v_pages.stride()
        and k_pages.dtype is v_pages.dtype is q.dtype
        and page_table.dtype is kv_lens.dtype is query_start_loc.dtype is torch.int32
        and page_table.ndim == 2
        and page_table.shape[0] == rows
        and query_start_loc.shape == (rows + 1,)
        and page_table.stride(1) == kv_lens.stride(0) == query_start_loc.stride(0) == 1
        and strides[3] == 1
        and not (q.data_ptr() | k_pages.data_ptr() | v_pages.data_ptr()) % 16
        and not (page_table.data_ptr() | kv_lens.data_ptr() | query_start_loc.data_ptr()) % 16
        and q.device == k_pages.device == v_pages.device == page_table.device
        and q.device == kv_lens.device == query_start_loc.device
    )


def _check(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    kv_lens: Tensor,
    query_start_loc: Tensor,
    sinks: Tensor | None,
) -> None:
    """Raises for what the kernels rely on and a caller can get wrong."""
    if k_pages.shape != v_pages.shape or k_pages.stride() != v_pages.stride():
        raise ValueError(
            "v_pages: expected the shape and strides of k_pages, "
            f"{list(k_pages.shape)} and {k_pages.stride()}, got {list(v_pages.shape)} and "
            f"{v_pages.stride()}"
        )
    if q.shape[2] != k_pages.shape[3]:
        raise ValueError(
            f"q: expected the head dim of k_pages, {k_pages.shape[3]}, got {q.shape[2]}"
        )
    if k_pages.dtype != q.dtype or v_pages.dtype != q.dtype:
        raise TypeError(
            f"k_pages, v_pages: expected the dtype of q, {q.dtype}, got {k_pages.dtype} and "
            f"{v_pages.dtype}"
        )
    if k_pages.stride(3) != 1:
        raise ValueError(
            f"k_pages: expected a contiguous last axis, got strides {k_pages.stride()}"
        )
    rows = kv_lens.numel()
    for name, tensor, shape in (
        ("kv_lens", kv_lens, (rows,)),
        ("query_start_loc", query_start_loc, (rows + 1,)),
        ("page_table", page_table, (rows, page_table.shape[-1])),
    ):
        if tensor.dtype != torch.int32:
            raise TypeError(f"{name}: expected int32, got {tensor.dtype}")
        if tensor.shape != shape or (tensor.numel() and tensor.stride(-1) != 1):
            raise ValueError(
                f"{name}: expected shape {list(shape)}, contiguous along its last axis, got "
                f"{list(tensor.shape)} with strides {tensor.stride()}"
            )
    if sinks is not None and (sinks.shape != q.shape[1:2] or sinks.stride(0) != 1):
        raise ValueError(
            f"sinks: expected a contiguous [H] = [{q.shape[1]}], got {list(sinks.shape)}"
        )
    named = {"k_pages": k_pages, "v_pages": v_pages, "page_table": page_table}
    named |= {"kv_lens": kv_lens, "query_start_loc": query_start_loc}
    if sinks is not None:
        named["sinks"] = sinks
    for name, tensor in named.items():
        if tensor.device != q.device:
            raise ValueError(f"{name}: expected the device of q, {q.device}, got {tensor.device}")
    check_aligned(q=q, **named)


@functools.cache
def _check_supported(geometry: Geometry, device: torch.device) -> None:
    """Raises for heads and pages that no kernel serves, naming the nearest that one does."""
    if geometry.dtype not in DTYPES:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise NotImplementedError(
            f"dtype: expected one of {names}, got {geometry.dtype}; bfloat16 is the nearest"
        )
    if geometry.head_dim not in HEAD_DIMS:
        nearest = min(HEAD_DIMS, key=lambda dim: (abs(dim - geometry.head_dim), -dim))
        raise NotImplementedError(
            f"head_dim: expected a multiple of 16 up to 256, got {geometry.head_dim}; "
            f"{nearest} is the nearest"
        )
    if geometry.num_heads % geometry.num_kv_heads:
        raise ValueError(
            f"q: expected a multiple of {geometry.num_kv_heads} heads, got {geometry.num_heads}"
        )
    if geometry.ratio > MOST_RATIO:
        raise NotImplementedError(
            f"q: expected at most {MOST_RATIO} query heads a KV head, got {geometry.ratio}"
        )
    strides = geometry.stride_n, geometry.stride_g, geometry.stride_p
    if any(stride % 16 for stride in strides):
        raise ValueError(
            f"k_pages: expected strides that are multiples of 16 elements, got {strides}"
        )
    arch = target_of(device).arch
    if 0 < arch < OLDEST:
        raise NotImplementedError(
            f"device: {device} has compute capability {arch / 10}, the oldest with kernels is "
            f"{OLDEST / 10}; backend='torch' runs there"
        )
