"""Parts of rows become their outputs: weighed by their log-sum-exp, in a fixed order.

Bytes moved: H x (D + 1) x 4 for every part that is read, H x D x itemsize written for a query.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from .attend import LN2
from .launch import Launcher, Target, target_of
from .tile import WIDEST


@triton.jit(do_not_specialize=["most_new", "most_parts"])
def _merge(
    query_start_ptr,
    parts_ptr,
    partial_ptr,
    sums_ptr,
    out_ptr,
    lse_ptr,
    most_new,
    most_parts,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PARTS: tl.constexpr,
):
    """One program weighs all parts of one query and head by their log-sum-exp, at once."""
    row, query, head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    begin = tl.load(query_start_ptr + row)
    new = tl.load(query_start_ptr + row + 1) - begin
    parts = tl.load(parts_ptr + row)
    if (query < new) & (parts > 1):
        part = tl.arange(0, PARTS)
        offs_d = tl.arange(0, BLOCK_D)
        there = part < parts
        where = ((row * most_new + query).to(tl.int64) * most_parts + part) * NUM_HEADS + head
        sums = tl.load(sums_ptr + where, mask=there, other=float("-inf"))
        mask = there[:, None] & (offs_d < HEAD_DIM)[None, :]
        partial = tl.load(
            partial_ptr + where[:, None] * HEAD_DIM + offs_d[None, :], mask=mask, other=0.0
        )
        highest = tl.max(sums, 0)
        level = tl.where(highest == float("-inf"), 0.0, highest)
        weights = tl.exp2(sums - level)
        total = tl.sum(weights, 0)
        safe = tl.where(total > 0, total, 1.0)
        out = tl.sum(partial * weights[:, None], 0) / safe
        to = (begin + query).to(tl.int64) * NUM_HEADS + head
        tl.store(
            out_ptr + to * HEAD_DIM + offs_d,
            out.to(out_ptr.dtype.element_ty),
            mask=offs_d < HEAD_DIM,
        )
        lse = tl.where(total > 0, (level + tl.log2(safe)) * LN2, float("-inf"))
        tl.store(lse_ptr + to, lse)


def merge_parts(
    query_start_loc: Tensor,
    parts: Tensor,
    partial: Tensor,
    sums: Tensor,
    out: Tensor,
    lse: Tensor,
    max_new: int,
    most_parts: int,
) -> None:
    """Merges the rows that were cut into several parts.

    Args:
        parts: `[B]`, of each row.
        partial, sums: `[B * max_new, P, H, D]` and `[B * max_new, P, H]`, the output and the
            log2-sum-exp of up to P parts.
        out, lse: `[T, H, D]` and `[T, H]`, written where those rows have tokens.
        max_new: a bound of a row's new tokens.
        most_parts: a bound of P, the same for all lengths, so that growing texts compile nothing.
    """
    _, heads, dim = out.shape
    size = triton.next_power_of_2(most_parts)
    launcher = _launcher(heads, dim, out.dtype, size, target_of(out.device))
    launcher(
        (parts.shape[0], max_new, heads),
        *(query_start_loc, parts, partial, sums, out, lse),
        *(max_new, partial.shape[1]),
    )


@functools.cache
def _launcher(
    num_heads: int, head_dim: int, dtype: torch.dtype, parts: int, target: Target
) -> Launcher:
    static = {
        "NUM_HEADS": num_heads,
        "HEAD_DIM": head_dim,
        "BLOCK_D": triton.next_power_of_2(head_dim),
        "PARTS": parts,
    }
    return Launcher(
        _merge, target, static, num_warps=4 if head_dim <= WIDEST.value else 8, num_stages=1
    )
