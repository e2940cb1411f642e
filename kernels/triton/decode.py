"""Rows with few new tokens: split over their tokens, merged by log-sum-exp.

The H / G query heads of a KV head, times the queries of a tile, are the rows of one product, so K
and V are read once for all of them. A fixed number of programs walks the step's items
(`work_list.py`); a row that was not split is written out directly, the parts of the others are
merged in order.

Bytes moved: 2 x visible tokens x G x D x itemsize for K and V, plus for every split of a row
H x (D + 1) x 4 written and read again. At 2 x H / G FLOP a byte this is bound by memory.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagedkv.kernels.formats import Pages
from pagedkv.kernels.scoring import Scoring, ScoringKind

from . import merge_parts as merge
from . import page_mass as observe
from . import shared_prefix
from .attend import attend, before_tokens, natural
from .decode_tuning import MOST_QUERIES, Tuning, most_rows
from .decode_tuning import tuning as tuning  # backend.py takes it from here
from .geometry import Geometry, Target, pointers
from .launch import Launcher, in_units, target_of
from .proved import is_on
from .tile import load_tile, store_tile, times, zeros
from .work_list import FIELDS, Bounds, Work, cut_rows

ROOM_FIELDS: tl.constexpr = observe.FIELDS
REGISTERS = 65536  # of a multiprocessor
# So many times the programs that fit beside each other are launched: the card starts the next one
# when one ends, which evens out their times, and its first loads come while others compute.
IN_TURN = 10


@triton.jit(
    do_not_specialize=[
        *("table_stride", "q_stride_t", "q_stride_h", "first_staging"),
        *("window", "most_parts"),
    ]
)
def _decode(
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
    parts_ptr,
    out_ptr,
    lse_ptr,
    partial_ptr,
    sums_ptr,
    rooms_ptr,
    chunks_ptr,
    table_stride,
    q_stride_t,
    q_stride_h,
    first_staging,
    window,
    terms,
    most_parts,
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
    MOST_NEW: tl.constexpr,  # tokens of a row
    TABLES: tl.constexpr,  # page tables of a row: one, or one for each KV head
    CAUSAL: tl.constexpr,  # a tile has queries of several positions
    CHUNK: tl.constexpr,  # tokens whose weight is noted down together; 0 for none
    KIND: tl.constexpr,  # which terms scores have
):
    """One program takes every n-th (item, KV head, share of its query heads), in this order."""
    RATIO: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    HAS_STAGING: tl.constexpr = STAGING.stride_p != 0
    SHARES: tl.constexpr = (RATIO + HEADS - 1) // HEADS
    offs_m = tl.arange(0, BLOCK_M)
    query = offs_m // HEADS
    items = tl.load(total_ptr) * (NUM_KV_HEADS * SHARES)
    for index in range(tl.program_id(0), items, tl.num_programs(0)):
        item = items_ptr + index // (NUM_KV_HEADS * SHARES) * FIELDS
        kv_head = index // SHARES % NUM_KV_HEADS
        row = tl.load(item)
        token = tl.load(item + 1).to(tl.int64)
        queries = tl.load(item + 2)
        first = tl.load(item + 3)
        begin = tl.load(item + 4)
        end = tl.load(item + 5)
        part = tl.load(item + 6)
        partial = tl.load(item + 7).to(tl.int64)
        parts = tl.load(parts_ptr + row)

        position = first + query
        head = kv_head * RATIO + (index % SHARES * HEADS + offs_m % HEADS)
        real = query < queries
        if RATIO % HEADS:
            real = real & (head < kv_head * RATIO + RATIO)
        rows = tl.tuple([position, head, (token + query) * NUM_HEADS + head, real])
        if KIND.tree:
            rows += (tl.load(terms.tree + token + query, mask=real, other=-1),)
        where = (token + query) * (q_stride_t * 16) + head * (q_stride_h * 16)
        q = load_tile(q_ptr, where, real, K.parts, K.width, K.block, K.rest)
        # A sink is counted once, in the row's first part.
        top, total = before_tokens(terms, head, real & (part == 0))
        acc = zeros(BLOCK_M, V.parts, V.block)
        notes = tl.tuple([])
        if CHUNK:
            room = rooms_ptr + row * ROOM_FIELDS
            width = tl.load(room + 1)
            at = tl.load(room) + ((token + query) * NUM_HEADS + head) * (2 * width)
            notes += (chunks_ptr + at, real & (width > 0), width)
        table = table_ptr + (row.to(tl.int64) * TABLES + kv_head % TABLES) * table_stride
        if HAS_STAGING:
            # Staging pages are few: a row's first, and those that this step writes. They are read
            # apart from the others, so that the loop over those has no branches.
            written = tl.maximum(first - (MOST_NEW - 1), 0) // PAGE * PAGE
            low = begin
            high = tl.minimum(tl.minimum(end, PAGE), written)
            for _ in range(2):
                top, total, acc = attend(
                    *(q, rows, top, total, acc, kv_head),
                    *(k_staging_ptr, v_staging_ptr, None, None, table, first_staging),
                    *(low, high, window, terms, NUM_KV_HEADS, PAGE, STAGING, STAGING),
                    *(STAGING_N, 1, False, "read", True, CAUSAL, KIND.window, KIND),
                    *(notes, CHUNK),
                )
                low = tl.maximum(begin, written)
                high = end
        top, total, acc = attend(
            *(q, rows, top, total, acc, kv_head),
            *(k_ptr, v_ptr, k_scales_ptr, v_scales_ptr, table, first_staging),
            *(begin, end, window, terms, NUM_KV_HEADS, PAGE, K, V),
            *(BLOCK_N, STAGES, PACKED, "skipped" if HAS_STAGING else "absent"),
            *(True, CAUSAL, KIND.window, KIND),
            *(notes, CHUNK),
        )
        safe = tl.where(total == 0, 1.0, total)
        out = times(acc, (1.0 / safe)[:, None])
        sums = tl.where(total == 0, float("-inf"), top + tl.log2(safe))
        if parts == 1:
            to = (token + query) * NUM_HEADS + head
            store_tile(out_ptr, to * V.dim, real, out, V.width)
            tl.store(lse_ptr + to, natural(sums, terms.sinks is not None), mask=real)
        else:
            to = ((partial + query) * most_parts + part) * NUM_HEADS + head
            store_tile(partial_ptr, to * V.dim, real, out, V.width)
            tl.store(sums_ptr + to, sums, mask=real)


class Plan(NamedTuple):
    """A step's rows of few new tokens, cut for one head geometry and window.

    Attributes:
        heads, block_m: query heads of a tile, and rows of a product.
        shares: programs of an item, one for each share of a KV head's query heads.
        max_new, max_parts: bounds of a row's new tokens and parts, by which `partial` and `sums`
            are sized.
        shared: the prefixes that are attended once for several rows.
        partial, sums: where parts lie until they are merged; each layer writes them anew.
    """

    work: Work
    tuning: Tuning
    heads: int
    shares: int
    block_m: int
    max_new: int
    max_parts: int
    shared: shared_prefix.Plan | None
    geometry: Geometry
    partial: Tensor
    sums: Tensor


def plan(
    kv_lens: Tensor,
    query_start_loc: Tensor,
    geometry: Geometry,
    bounds: Bounds,
    *,
    window: int | None = None,
    causal: bool = True,
    shared: shared_prefix.Plan | None = None,
) -> Plan:
    """Cuts the rows of 1 to 16 new tokens; on the device, for every layer of the same kind.

    Args:
        bounds: bounds of these rows.
        shared: for rows of one new token.
    """
    target = target_of(kv_lens.device)
    most = most_rows(target, geometry)
    heads = geometry.heads(most)
    # Few sizes, because each is compiled: one for one query a row, and two for several.
    fewest = min(most, 16 if bounds.max_new == 1 else 32)
    block_m = min(most, triton.next_power_of_2(bounds.max_new * heads))
    block_m = max(fewest, block_m, triton.next_power_of_2(heads))
    tune = tuning(target, geometry, block_m)
    cut = tune.cut(geometry, block_m // heads)
    visible = bounds.max_kv
    if window is not None:
        visible = min(visible, window + bounds.max_new + cut.block)
    parts, max_new = cut.parts(visible), bounds.max_new
    work = cut_rows(
        *(kv_lens, query_start_loc, cut, cut.tiles(bounds) * parts),
        max_new=max_new,
        window=window,
        causal=causal,
        skips=None if shared is None else shared.skips,
    )
    if shared is not None:
        assert max_new == 1
        parts += shared.parts
    room = kv_lens.numel() * max_new if parts > 1 else 0, parts, geometry.num_heads
    partial = torch.empty(*room, geometry.v_dim, dtype=torch.float32, device=kv_lens.device)
    sums = torch.empty(room, dtype=torch.float32, device=kv_lens.device)
    shares = geometry.num_kv_heads * -(-geometry.ratio // heads)
    return Plan(work, tune, heads, shares, block_m, max_new, parts, shared, geometry, partial, sums)


def _on_gluon(
    q: Tensor,
    plan: Plan,
    rows: int,
    scoring: Scoring,
    target: Target,
    tables: int,
    watched: observe.Plan | None,
) -> Callable[..., None] | None:
    """Returns the call of `gluon/` that serves tiles of at most so many rows, if there is one."""
    geometry = plan.geometry
    has_terms = scoring.softcap is not None or scoring.sinks is not None
    rest = "_rest" if has_terms or geometry.head_dim == 256 else ""
    name = "gluon_latents" if geometry.rest else f"gluon_decode{rest}"
    if watched is not None or not is_on(name, target.arch):
        return None
    from .gluon import decode, latents  # versions of Triton before 3.6 have less of Gluon

    if geometry.rest:
        is_served = tables == 1 and latents.serves(q, geometry, plan.heads, scoring, target)
        return functools.partial(latents.paged_attention, plan.heads) if is_served else None
    is_served = decode.serves(geometry, scoring, target, rows)
    return decode.paged_attention if is_served else None


def paged_attention(
    q: Tensor,
    k_pages: Pages,
    v_pages: Pages,
    page_table: Tensor,
    query_start_loc: Tensor,
    plan: Plan,
    scoring: Scoring,
    out: Tensor,
    lse: Tensor,
    watched: observe.Plan | None = None,
) -> None:
    """Attends for the rows of the plan, as in `reference.paged_attention`.

    Args:
        page_table: `[B, columns]`, or `[B, G, columns]` if KV heads read different pages.
        out, lse: `[T, H, Dv]` and `[T, H]`, written where these rows have tokens.
        watched: its chunks are written; with one table a row, nothing shared and no window.
    """
    tables = 1 if page_table.ndim == 2 else page_table.shape[1]
    geometry, heads, parts = plan.geometry, plan.heads, plan.max_parts
    target, work, shared = target_of(q.device), plan.work, plan.shared
    assert watched is None or (tables == 1 and shared is None and scoring.window is None)
    chunk = 0 if watched is None else watched.chunk
    noted = (None, None) if watched is None else (watched.rooms, watched.chunks)
    # Tokens of one row are attended by products of few rows, shared prefixes by products of many.
    kinds = [(plan.block_m, plan.tuning, plan.max_new > 1, work.items, work.total)]
    if shared is not None:
        block_m = max(most_rows(target, geometry), triton.next_power_of_2(heads))
        tune = tuning(target, geometry, block_m)
        kinds.insert(0, (block_m, tune, False, shared.items, shared.total))
    most = max(kind[0] for kind in kinds)
    faster = _on_gluon(q, plan, most, scoring, target, tables, watched)
    for block_m, tune, causal, items, total in kinds:
        if faster:
            mine = Work(items, total, work.parts), geometry, scoring
            results = out, lse, plan.partial, plan.sums
            faster(q, k_pages, v_pages, page_table, *mine, results)
            continue
        key = geometry, tune, heads, block_m, causal, scoring.kind, target, tables, chunk
        _decode_launcher(*key)(
            (min(items.shape[0] * plan.shares, IN_TURN * tune.programs * target.processors), 1, 1),
            *(q, *pointers(k_pages, v_pages), page_table, items, total, work.parts),
            *(out, lse, plan.partial, plan.sums, *noted),
            *(page_table.stride(-2), *in_units("q", q), k_pages.data.shape[0]),
            *scoring.arguments(),
            parts,
        )
    if parts > 1:
        tensors = query_start_loc, work.parts, plan.partial, plan.sums, out, lse
        merge.merge_parts(*tensors, plan.max_new)


@functools.cache
def _decode_launcher(
    geometry: Geometry,
    tuning: Tuning,
    heads: int,
    block_m: int,
    causal: bool,
    kind: ScoringKind,
    target: Target,
    tables: int,
    chunk: int,
) -> Launcher:
    static = {
        **geometry.static(),
        "HEADS": heads,
        "BLOCK_M": block_m,
        "BLOCK_N": tuning.block_n,
        "TABLES": tables,
        "STAGING_N": geometry.staging_n(tuning.block_n),
        "STAGES": tuning.num_stages,
        "PACKED": tuning.packed,
        "MOST_NEW": MOST_QUERIES if causal else 1,
        "CAUSAL": causal,
        "CHUNK": chunk,
        "KIND": kind,
    }
    registers = None
    if geometry.wide or (chunk and block_m <= 32):
        # With stores in the loop the compiler takes more registers than `programs` side by side can
        # have; for wide heads it takes fewer, and spills.
        registers = REGISTERS // (tuning.programs * tuning.num_warps * 32) // 8 * 8
    sizes = tuning.num_warps, tuning.num_stages
    return Launcher(_decode, target, static, *sizes, registers)
