"""Rows with many new tokens: causal attention over a prefix in pages and the chunk itself.

A tile is as many queries as fit, times the H / G query heads of a KV head; a row's last tile, which
sees most, comes first. Tokens that all queries of a tile see are attended without masks.

Work: 4 x visible (query, token) pairs x H x D FLOP; bound by the tensor cores from some hundred new
tokens on. Bytes: K and V once a tile, mostly out of L2.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from pagedkv.kernels.formats import Pages
from pagedkv.kernels.scoring import NO_WINDOW, Scoring, ScoringKind

from .attend import attend, before_tokens, natural
from .decode_tuning import MOST_QUERIES
from .geometry import Geometry, Target, pointers
from .launch import Launcher, in_units, target_of
from .proved import is_on
from .tile import load_tile, next_staging, store_tile, times, zeros
from .work_list import FIELDS, Bounds, Cut, Work, cut_rows


class Tuning(NamedTuple):
    """How a prefill kernel is compiled; `packed` as in decode_tuning.py."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    packed: bool = True


# Keyed as in decode_tuning.py. Static choices: no spills, and as many buffers as fit.
TUNING: dict[tuple[int | str | None, bool, int, int], Tuning] = {
    (None, True, 64, 2): Tuning(128, 64, 8, 3),
    (80, True, 128, 2): Tuning(128, 32, 8, 4),
    (None, True, 128, 2): Tuning(128, 64, 8, 3),
    # Warps lie side by side along tokens here (on sm_90 along rows): a narrower tile would have
    # them make the same scores twice and more.
    (90, True, 256, 2): Tuning(128, 32, 8, 3),
    (None, True, 256, 2): Tuning(64, 64, 8, 2),
    (None, False, 64, 2): Tuning(128, 64, 8, 3),
    (None, False, 128, 2): Tuning(128, 32, 8, 3),
    (None, False, 256, 2): Tuning(32, 64, 8, 2),
    (None, True, 64, 4): Tuning(64, 32, 8, 3),
    (80, True, 128, 4): Tuning(32, 16, 4, 3),
    (None, True, 128, 4): Tuning(32, 16, 8, 3),
    (None, True, 256, 4): Tuning(32, 16, 8, 3),
    (None, False, 64, 4): Tuning(32, 32, 8, 3),
    (None, False, 128, 4): Tuning(32, 16, 8, 3),
    (None, False, 256, 4): Tuning(16, 16, 8, 2),
    # Wide heads. Long chunks over latents are better attended expanded, so these need not be fast.
    (None, True, 512, 2): Tuning(32, 32, 8, 3),
    (None, True, 1024, 2): Tuning(32, 32, 8, 3),
    (None, False, 512, 2): Tuning(32, 16, 4, 3),
    (None, False, 1024, 2): Tuning(32, 16, 4, 3),
    (None, True, 512, 4): Tuning(16, 16, 8, 2),
    (None, True, 1024, 4): Tuning(16, 16, 8, 3),
    (None, False, 512, 4): Tuning(16, 16, 8, 2),
    (None, False, 1024, 4): Tuning(16, 16, 8, 2),
}
# For more query heads a KV head than the tile above has rows; as many tokens would not fit then.
TALL = {(False, 256, 2): Tuning(64, 32, 4, 2)}
# By padded head dim, if tiles would spill because words of K or V are taken apart; 16-bit queries.
# Other head dims take it as well if products must have fewer than 64 rows.
CODED: dict[int, Tuning] = {256: Tuning(32, 32, 4, 3)}
INTERPRETED = Tuning(64, 32, 4, 1, False)


def tuning(target: Target, geometry: Geometry) -> Tuning:
    """The table's entry for an architecture, or for any of its kind, with a row for every head."""
    found = INTERPRETED
    if target.arch:
        rest = target.roomy, geometry.padded, geometry.dtype.itemsize
        found = TUNING.get((target.arch, *rest)) or TUNING[(None, *rest)]
        if geometry.heads(found.block_m) > found.block_m:
            found = TALL.get(rest, found)
        if geometry.bits < 16 and geometry.dtype.itemsize == 2:
            few_rows = geometry.chained and not target.chains
            found = CODED.get(256 if few_rows else geometry.padded, found)
    heads = geometry.heads(found.block_m)
    block_m = max(found.block_m, triton.next_power_of_2(heads))
    return found._replace(block_m=block_m, block_n=geometry.block_n(found.block_n))


@triton.jit(
    do_not_specialize=[
        *("table_stride", "q_stride_t", "q_stride_h", "first_staging"),
        "window",
    ]
)
def _prefill(
    q_ptr,
    k_ptr,
    v_ptr,
    k_scales_ptr,
    v_scales_ptr,
    k_staging_ptr,
    v_staging_ptr,
    table_ptr,
    items_ptr,
    total_ptr,
    out_ptr,
    lse_ptr,
    table_stride,
    q_stride_t,
    q_stride_h,
    first_staging,
    window,
    terms,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    STAGING: tl.constexpr,
    HEADS: tl.constexpr,  # query heads of a KV head in a tile
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGING_N: tl.constexpr,  # tokens a tile of staging pages
    STAGES: tl.constexpr,
    PACKED: tl.constexpr,
    KIND: tl.constexpr,  # which terms scores have
):
    """One program a tile of queries and KV head; tiles of one head next to each other, for L2."""
    RATIO: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    HAS_STAGING: tl.constexpr = STAGING.stride_p != 0
    STAGED: tl.constexpr = "skipped" if HAS_STAGING else "absent"
    index = tl.program_id(0)
    SHARES: tl.constexpr = (RATIO + HEADS - 1) // HEADS
    share = tl.program_id(1)  # of a KV head's query heads, as many as fit into a tile
    kv_head = share // SHARES
    if index < tl.load(total_ptr):
        item = items_ptr + index * FIELDS
        row = tl.load(item)
        token = tl.load(item + 1).to(tl.int64)
        queries = tl.load(item + 2)
        first = tl.load(item + 3)
        begin = tl.load(item + 4)
        end = tl.load(item + 5)

        offs_m = tl.arange(0, BLOCK_M)
        query = offs_m // HEADS
        position = first + query
        head = kv_head * RATIO + (share % SHARES * HEADS + offs_m % HEADS)
        real = query < queries
        if RATIO % HEADS:
            real = real & (head < kv_head * RATIO + RATIO)
        rows = tl.tuple([position, head, (token + query) * NUM_HEADS + head, real])
        if KIND.tree:
            rows += (tl.load(terms.tree + token + query, mask=real, other=-1),)
        where = (token + query) * (q_stride_t * 16) + head * (q_stride_h * 16)
        q = load_tile(q_ptr, where, real, K.parts, K.width, K.block, K.rest)
        top, total = before_tokens(terms, head, real)
        acc = zeros(BLOCK_M, V.parts, V.block)
        table_ptr += row.to(tl.int64) * table_stride

        if HAS_STAGING:
            # A few pages, wherever they are; the loops over the others leave them out.
            column = next_staging(table_ptr, begin // PAGE, tl.cdiv(end, PAGE), first_staging)
            while column * PAGE < end:
                top, total, acc = attend(
                    *(q, rows, top, total, acc, kv_head),
                    *(k_staging_ptr, v_staging_ptr, None, None, table_ptr, first_staging),
                    *(tl.maximum(begin, column * PAGE), tl.minimum(end, column * PAGE + PAGE)),
                    *(window, terms, NUM_KV_HEADS, PAGE, STAGING, STAGING),
                    *(STAGING_N, 1, False, "read", True, True, KIND.window, KIND),
                )
                column = next_staging(table_ptr, column + 1, tl.cdiv(end, PAGE), first_staging)

        # Tokens that every query sees: from the last one's window to the first one's position.
        full_begin = begin  # 0 without a window
        full_end = tl.maximum((first + 1) // BLOCK_N * BLOCK_N, 0)
        rest = full_end
        if KIND.window:
            seen = tl.maximum(begin, first + queries - window)
            full_begin = (seen + BLOCK_N - 1) // BLOCK_N * BLOCK_N
            edge = full_begin
            if full_begin > full_end:  # none: all of it is edge
                full_begin = 0
                full_end = 0
                edge = begin
                rest = begin
            top, total, acc = attend(
                *(q, rows, top, total, acc, kv_head),
                *(k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, table_ptr, first_staging),
                *(begin, edge, window, terms, NUM_KV_HEADS, PAGE, K, V),
                *(BLOCK_N, STAGES, PACKED, STAGED, True, True, True, KIND),
            )
        top, total, acc = attend(
            *(q, rows, top, total, acc, kv_head),
            *(k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, table_ptr, first_staging),
            *(full_begin, full_end, window, terms, NUM_KV_HEADS, PAGE, K, V),
            *(BLOCK_N, STAGES, PACKED, STAGED, False, False, False, KIND),
        )
        top, total, acc = attend(
            *(q, rows, top, total, acc, kv_head),
            *(k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, table_ptr, first_staging),
            *(rest, end, window, terms, NUM_KV_HEADS, PAGE, K, V),
            *(BLOCK_N, STAGES, PACKED, STAGED, True, True, KIND.window, KIND),
        )
        safe = tl.where(total == 0, 1.0, total)
        to = (token + query) * NUM_HEADS + head
        store_tile(out_ptr, to * V.dim, real, times(acc, (1.0 / safe)[:, None]), V.width)
        sums = tl.where(total == 0, float("-inf"), top + tl.log2(safe))
        tl.store(lse_ptr + to, natural(sums, terms.sinks is not None), mask=real)


class Plan(NamedTuple):
    """A step's rows of many new tokens, cut into tiles."""

    work: Work
    tuning: Tuning
    tiles: int
    geometry: Geometry
    causal: bool


def plan(
    kv_lens: Tensor,
    query_start_loc: Tensor,
    geometry: Geometry,
    bounds: Bounds,
    *,
    window: int | None = None,
    causal: bool = True,
) -> Plan:
    """Cuts the rows of more than 16 new tokens; `bounds` are of these rows."""
    tune = tuning(target_of(kv_lens.device), geometry)
    queries = tune.block_m // geometry.heads(tune.block_m)
    cut = Cut(MOST_QUERIES + 1, NO_WINDOW, queries, NO_WINDOW, 1, 1)
    tiles = cut.tiles(bounds)
    work = cut_rows(
        *(kv_lens, query_start_loc, cut, tiles),
        max_new=bounds.max_new,
        window=window,
        causal=causal,
    )
    return Plan(work, tune, tiles, geometry, causal)


def _on_gluon(plan: Plan, scoring: Scoring, target: Target) -> ModuleType | None:
    """Returns `gluon/prefill.py` if it attends instead."""
    has_terms = scoring.softcap is not None or scoring.sinks is not None
    rest = has_terms or plan.geometry.head_dim == 256
    if not is_on("gluon_rest" if rest else "gluon_prefill", target.arch):
        return None
    from .gluon import prefill as faster  # versions of Triton before 3.6 have less of Gluon

    # It finds the end of a row by positions alone, so attention must be causal.
    is_served = plan.causal and plan.tuning.block_m == faster.ROWS
    return faster if is_served and faster.serves(plan.geometry, scoring, target) else None


def paged_attention(
    q: Tensor,
    k_pages: Pages,
    v_pages: Pages,
    page_table: Tensor,
    plan: Plan,
    scoring: Scoring,
    out: Tensor,
    lse: Tensor,
) -> None:
    """Attends for the rows of the plan, as in `reference.paged_attention`.

    Args:
        out, lse: `[T, H, Dv]` and `[T, H]`, written where these rows have tokens.
    """
    geometry, work, target = plan.geometry, plan.work, target_of(q.device)
    if faster := _on_gluon(plan, scoring, target):
        given = q, k_pages, v_pages, page_table, work, geometry, scoring
        faster.paged_attention(*given, out, lse)
        return
    launcher = _launcher(geometry, plan.tuning, scoring.kind, target)
    shares = -(-geometry.ratio // geometry.heads(plan.tuning.block_m))
    launcher(
        (plan.tiles, geometry.num_kv_heads * shares, 1),
        *(q, *pointers(k_pages, v_pages), page_table, work.items, work.total),
        *(out, lse),
        *(page_table.stride(0), *in_units("q", q), k_pages.data.shape[0]),
        *scoring.arguments(),
    )


@functools.cache
def _launcher(geometry: Geometry, tuning: Tuning, kind: ScoringKind, target: Target) -> Launcher:
    static = {
        **geometry.static(),
        "HEADS": geometry.heads(tuning.block_m),
        "BLOCK_M": tuning.block_m,
        "BLOCK_N": tuning.block_n,
        "STAGING_N": geometry.staging_n(tuning.block_n),
        "STAGES": tuning.num_stages,
        "PACKED": tuning.packed,
        "KIND": kind,
    }
    registers = 255 if geometry.wide else None  # else the compiler takes fewer, and spills
    return Launcher(_prefill, target, static, tuning.num_warps, tuning.num_stages, registers)
