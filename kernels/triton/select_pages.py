"""Scores the pages of decoding rows by the range of their keys, and chooses the best of them.

Twin of `torch/select_pages`, which says what is computed. To score, a program takes the query heads
of a KV head and a tile of a row's pages, and moves 4 x D bytes a page. To choose, a program takes
all scores of a row and a KV head. Nothing is sorted: the smallest score that is chosen is found bit
by bit, by counting the scores above it, and ids are written in the order of their columns.
"""

from __future__ import annotations

import functools
import math

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagedkv.kernels.torch.select_pages import LARGEST, NEWEST

from .codes import step_and_least
from .geometry import Target
from .launch import Launcher, check_aligned, in_units, target_of
from .tile import WIDEST

BLOCK_N = 64  # pages a tile
WIDE_PART = 64  # columns of a part of keys that are too wide for one tile
NUM_WARPS = 4
CHOICE = 4096  # columns that a choosing program holds at once
CHOICE_WARPS = 8


@triton.jit(do_not_specialize=["table_stride", "q_stride_t", "q_stride_h", "num_bounds", "columns"])
def _score_columns(
    q_ptr,
    bounds_ptr,
    table_ptr,
    lens_ptr,
    scores_ptr,
    table_stride,
    q_stride_t,
    q_stride_h,
    num_bounds,
    columns,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    NEWEST: tl.constexpr,
    LARGEST: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    RATIO: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    WIDTH: tl.constexpr = HEAD_DIM // PARTS
    row, kv_head = tl.program_id(0), tl.program_id(1)
    column = tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_m = tl.arange(0, BLOCK_M)
    offs_d = tl.arange(0, BLOCK_D)
    last = (tl.load(lens_ptr + row) - 1) // PAGE
    real = (offs_d < WIDTH)[None, :]
    head = kv_head * RATIO + offs_m
    where = row.to(tl.int64) * (q_stride_t * 16) + head * (q_stride_h * 16)
    q = tl.tuple([])
    for part in tl.static_range(PARTS):
        at = q_ptr + where[:, None] + (part * WIDTH + offs_d)[None, :]
        q += (tl.load(at, mask=(offs_m < RATIO)[:, None] & real, other=0.0),)
    dtype: tl.constexpr = tl.float32 if q[0].dtype == tl.float32 else tl.bfloat16

    ids = tl.load(
        table_ptr + row.to(tl.int64) * table_stride + column, mask=column <= last, other=0
    )
    # Staging pages have no bounds, and are read anyway.
    pages = tl.where((ids >= 0) & (ids < num_bounds), ids, 0).to(tl.int64)
    at = pages * (NUM_KV_HEADS * HEAD_DIM) + kv_head * HEAD_DIM
    bounds_ptr = bounds_ptr.to(tl.pointer_type(tl.int32))
    for part in tl.static_range(PARTS):
        to = bounds_ptr + at[:, None] + (part * WIDTH + offs_d)[None, :]
        step, low = step_and_least(tl.load(to, mask=real, other=0))
        high = (low + 15 * step).to(dtype)
        query = q[part].to(tl.float32)
        above = tl.maximum(query, 0.0, propagate_nan=tl.PropagateNan.ALL).to(dtype)
        below = tl.minimum(query, 0.0, propagate_nan=tl.PropagateNan.ALL).to(dtype)
        if part == 0:
            scores = tl.dot(above, tl.trans(high), input_precision="ieee")
        else:
            scores = tl.dot(above, tl.trans(high), scores, input_precision="ieee")
        scores = tl.dot(below, tl.trans(low.to(dtype)), scores, input_precision="ieee")
    # NaN and infinite scores rank above all others.
    unknown = (LARGEST - column).to(tl.float32, bitcast=True)
    scores = tl.where(tl.abs(scores) < float("inf"), scores, unknown[None, :])
    scores = tl.where((offs_m < RATIO)[:, None], scores, float("-inf"))
    best = tl.max(scores, 0)
    best = tl.where((column == 0) | (column > last - NEWEST), float("inf"), best)
    best = tl.where(column > last, float("-inf"), best)
    to = (row.to(tl.int64) * NUM_KV_HEADS + kv_head) * columns + column
    tl.store(scores_ptr + to, best, mask=column < columns)


def score_columns(
    q: Tensor, bounds: Tensor, page_ids: Tensor, lens: Tensor, page_size: int
) -> Tensor:
    """Twin of `torch/select_pages.score_columns`; ids and lengths are int32, bounds contiguous.

    Products are of bfloat16 if queries are of 16 bits: a choice needs no more digits.
    """
    check_aligned(q=q, bounds=bounds, page_ids=page_ids, lens=lens)
    n, heads, dim = q.shape
    columns, kv_heads = page_ids.shape[1], bounds.shape[1]
    scores = torch.empty(n, kv_heads, columns, dtype=torch.float32, device=q.device)
    launcher = _launcher(heads, kv_heads, dim, page_size, q.dtype, target_of(q.device))
    launcher(
        (n, kv_heads, triton.cdiv(columns, BLOCK_N)),
        *(q, bounds, page_ids, lens, scores),
        *(page_ids.stride(0), *in_units("q", q), bounds.shape[0], columns),
    )
    return scores


@triton.jit
def _ordered(scores):
    """Bits of scores that, read as unsigned integers, have the order of the scores."""
    bits = scores.to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) | -(2**31))).to(tl.uint32, bitcast=True)


@triton.jit(do_not_specialize=["table_stride", "columns", "count", "width"])
def _choose_columns(
    scores_ptr,
    table_ptr,
    lens_ptr,
    starts_ptr,
    out_ptr,
    table_stride,
    columns,
    count,
    width,
    NUM_KV_HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK: tl.constexpr,
    ONE_BLOCK: tl.constexpr,  # one block holds all columns, and stays in registers
):
    row, kv_head = tl.program_id(0), tl.program_id(1)
    one = row.to(tl.int64) * NUM_KV_HEADS + kv_head
    scores_ptr += one * columns
    out_ptr += one * width
    table_ptr += row.to(tl.int64) * table_stride
    offs = tl.arange(0, BLOCK)
    new = tl.load(starts_ptr + row + 1) - tl.load(starts_ptr + row)
    chooses = (new == 1) & (tl.load(lens_ptr + row) > count * PAGE)
    begin = 0
    if chooses:
        begin = count
        if ONE_BLOCK:
            held = _ordered(tl.load(scores_ptr + offs, mask=offs < columns, other=float("-inf")))
        least = tl.full([], 0, tl.uint32)
        above = 0  # scores beyond the least, once it is found
        for bit in range(0, 32):
            tried = least | (tl.full([], 2**31, tl.uint32) >> bit)
            if ONE_BLOCK:
                many = tl.sum((held >= tried).to(tl.int32))
            else:
                many = 0
                for first in range(0, columns, BLOCK):
                    at = scores_ptr + first + offs
                    found = tl.load(at, mask=first + offs < columns, other=float("-inf"))
                    many += tl.sum((_ordered(found) >= tried).to(tl.int32))
            if many >= count:
                least = tried
            else:
                above = many
        # Among equal scores, those of the first columns are chosen.
        taken, equal = 0, 0
        for first in range(0, columns, BLOCK):
            column = first + offs
            if not ONE_BLOCK:
                at = scores_ptr + column
                held = _ordered(tl.load(at, mask=column < columns, other=float("-inf")))
            same = (held == least) & (column < columns)
            rank = equal + tl.cumsum(same.to(tl.int32))
            chosen = (held > least) | (same & (rank <= count - above))
            to = taken + tl.cumsum(chosen.to(tl.int32)) - 1
            ids = tl.load(table_ptr + column, mask=chosen, other=0)
            tl.store(out_ptr + to, ids, mask=chosen)
            taken += tl.sum(chosen.to(tl.int32))
            equal += tl.sum(same.to(tl.int32))
    for first in range(begin, width, BLOCK):
        column = first + offs
        ids = tl.load(table_ptr + column, mask=column < width, other=0)
        tl.store(out_ptr + column, ids, mask=column < width)


def lens_read(lens: Tensor, query_start_loc: Tensor, page_size: int, count: int) -> Tensor:
    """Slots that rows have in the tables of `chosen_table`: `[B]` int32.

    Rows of one new token and more than `count` pages read that many; the last is the newest.
    """
    chosen = (count - 1) * page_size + (lens - 1) % page_size + 1
    choosing = (lens > count * page_size) & (query_start_loc.diff() == 1)
    return torch.where(choosing, chosen, lens)


def chosen_table(
    q: Tensor,
    bounds: Tensor,
    page_table: Tensor,
    lens: Tensor,
    query_start_loc: Tensor,
    page_size: int,
    count: int,
    decoding: bool,
) -> Tensor:
    """Page tables of the pages that decoding queries choose: `[B, G, columns]` int32.

    Args:
        q: `[T, H, D]`, of all rows.
        lens: `[B]`, tokens of each row, all of them.
        count: pages to read; fewer than the tables have columns.
        decoding: every row has one new token, so that no row needs more than `count` columns.
    """
    queries = q if decoding else q[(query_start_loc[1:] - 1).long()]
    scores = score_columns(queries, bounds, page_table, lens, page_size)
    n, groups, columns = scores.shape
    width = count if decoding else columns
    chosen = torch.empty(n, groups, width, dtype=torch.int32, device=q.device)
    launcher = _choice(groups, page_size, columns, target_of(q.device))
    launcher(
        (n, groups, 1),
        *(scores, page_table, lens, query_start_loc, chosen),
        *(page_table.stride(0), columns, count, width),
    )
    return chosen


@functools.cache
def _choice(kv_heads: int, page: int, columns: int, target: Target) -> Launcher:
    static = {
        "NUM_KV_HEADS": kv_heads,
        "PAGE": page,
        "BLOCK": min(CHOICE, triton.next_power_of_2(columns)),
        "ONE_BLOCK": columns <= CHOICE,
    }
    return Launcher(_choose_columns, target, static, CHOICE_WARPS, 1)


@functools.cache
def _launcher(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    page: int,
    dtype: torch.dtype,
    target: Target,
) -> Launcher:
    parts = 1 if head_dim <= WIDEST.value else head_dim // math.gcd(head_dim, WIDE_PART)
    static = {
        "NUM_HEADS": num_heads,
        "NUM_KV_HEADS": num_kv_heads,
        "HEAD_DIM": head_dim,
        "PAGE": page,
        "NEWEST": NEWEST,
        "LARGEST": LARGEST,
        "PARTS": parts,
        "BLOCK_M": max(16, triton.next_power_of_2(num_heads // num_kv_heads)),
        "BLOCK_D": max(16, triton.next_power_of_2(head_dim // parts)),
        "BLOCK_N": BLOCK_N,
    }
    return Launcher(_score_columns, target, static, NUM_WARPS, 1)
