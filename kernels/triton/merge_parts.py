"""Merges parts of rows into outputs: weighed by their log-sum-exp, in a fixed order.

Bytes moved: H x (D + 1) x 4 for every part that is read, H x D x itemsize written for a query.
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from .attend import natural
from .geometry import Target
from .launch import Launcher, target_of

# Registers hold the outputs of so many parts at once: 32 elements a thread, so that 8 programs of
# wide heads fit beside each other, and one loads while another waits.
MOST_AT_ONCE, AT_ONCE_ELEMENTS, WARPS = 32, 4096, 4


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
    AT_ONCE: tl.constexpr,
):
    """One program weighs all parts of one query and head by their log-sum-exp.

    It takes AT_ONCE parts at a time, so a row's bits do not depend on how many another row has.
    """
    row, query, head = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    begin = tl.load(query_start_ptr + row)
    new = tl.load(query_start_ptr + row + 1) - begin
    parts = tl.load(parts_ptr + row)
    if (query < new) & (parts > 1):
        offs_d = tl.arange(0, BLOCK_D)
        first = ((row * most_new + query).to(tl.int64) * most_parts) * NUM_HEADS + head
        level = tl.full([], float("-inf"), tl.float32)
        total = tl.zeros([], tl.float32)
        acc = tl.zeros([BLOCK_D], tl.float32)
        for start in range(0, parts, AT_ONCE):
            part = start + tl.arange(0, AT_ONCE)
            there = part < parts
            where = first + part * NUM_HEADS
            sums = tl.load(sums_ptr + where, mask=there, other=float("-inf"))
            mask = there[:, None] & (offs_d < HEAD_DIM)[None, :]
            partial = tl.load(
                partial_ptr + where[:, None] * HEAD_DIM + offs_d[None, :], mask=mask, other=0.0
            )
            higher = tl.maximum(level, tl.max(sums, 0))
            base = tl.where(higher == float("-inf"), 0.0, higher)
            fade, weights = tl.exp2(level - base), tl.exp2(sums - base)
            total = total * fade + tl.sum(weights, 0)
            acc = acc * fade + tl.sum(partial * weights[:, None], 0)
            level = higher
        safe = tl.where(total == 0, 1.0, total)
        out = acc / safe
        to = (begin + query).to(tl.int64) * NUM_HEADS + head
        tl.store(
            out_ptr + to * HEAD_DIM + offs_d,
            out.to(out_ptr.dtype.element_ty),
            mask=offs_d < HEAD_DIM,
        )
        sums = tl.where(total == 0, float("-inf"), level + tl.log2(safe))
        tl.store(lse_ptr + to, natural(sums, True))


def merge_parts(
    query_start_loc: Tensor,
    parts: Tensor,
    partial: Tensor,
    sums: Tensor,
    out: Tensor,
    lse: Tensor,
    max_new: int,
) -> None:
    """Merges the rows that were cut into several parts.

    Args:
        parts: `[B]`, how many parts each row has.
        partial, sums: `[B * max_new, P, H, D]` and `[B * max_new, P, H]`, the output and the
            log2-sum-exp of up to P parts.
        out, lse: `[T, H, D]` and `[T, H]`, written where those rows have tokens.
        max_new: a bound of a row's new tokens.
    """
    _, heads, dim = out.shape
    target = target_of(out.device)
    launcher = _launcher(heads, dim, out.dtype, target)
    launcher(
        (parts.shape[0], max_new, heads),
        *(query_start_loc, parts, partial, sums, out, lse),
        *(max_new, partial.shape[1]),
    )


@functools.cache
def _launcher(num_heads: int, head_dim: int, dtype: torch.dtype, target: Target) -> Launcher:
    block_d = triton.next_power_of_2(head_dim)
    static = {
        "NUM_HEADS": num_heads,
        "HEAD_DIM": head_dim,
        "BLOCK_D": block_d,
        "AT_ONCE": min(MOST_AT_ONCE, AT_ONCE_ELEMENTS // block_d),
    }
    return Launcher(_merge, target, static, WARPS, 1)
