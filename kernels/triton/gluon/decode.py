"""Decode on Hopper: a warp that copies pages, items ahead of the warps that multiply, in Gluon.

One of a program's five warps copies tiles of K and V by the tensor memory accelerator (TMA). It
walks the work list by itself, so the pages of an item are on their way while another is attended,
and memory is not idle while the row, table and ids of an item are loaded. The other four warps take
the rows of an item, the query heads of a KV head times its queries, as one product of 64 rows, most
of them empty: arithmetic is a third of the time that a tile's bytes take. Queries are loaded one
item ahead, and their places two.

Bytes, items and parts as in `triton/decode.py`; parts are merged as there. Tests run it in threads
(`tests/kernels/triton/gluon/emulator.py`).
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from pagedkv.kernels.formats import Pages
from pagedkv.kernels.scoring import Scoring, ScoringKind
from pagedkv.kernels.triton.geometry import Geometry, Target
from pagedkv.kernels.triton.launch import Launcher, in_units, target_of
from pagedkv.kernels.triton.work_list import FIELDS, Work

from .attend import GROUP_M, LARGEST, attend, before_tokens, made
from .pages import Sizes, barrier, copy_item, grid, item, new_rings, served

LN2: gl.constexpr = gl.constexpr(0.6931471805599453)
INFINITE: gl.constexpr = gl.constexpr(3e38)  # as in `triton/attend.py`, for merging parts
TOLD: gl.constexpr = gl.constexpr(4)  # items that one warp may be ahead of the others
ROWS = 64  # of a tile


class Tuning(NamedTuple):
    """Tokens a tile, tiles of K and of V in the ring, programs a multiprocessor, registers.

    Attributes:
        block_n: splits begin at multiples of it, see `decode_tuning.Tuning.cut`.
        registers: of a thread as the program starts; half of its threads copy, or do nothing.
        copying: registers of a thread of that half; the other half gets the rest.
    """

    block_n: int
    stages: int
    programs: int
    registers: int
    copying: int


# By head dim: 192 KiB of rings on a multiprocessor. If two programs fit, one multiplies while the
# other waits for a product or begins an item; heads of 256 leave room for one.
TUNING = {
    64: Tuning(64, 6, 2, 128, 40),
    128: Tuning(64, 3, 2, 128, 40),
    256: Tuning(32, 6, 1, 168, 96),
}
NUM_WARPS = 4  # that multiply


@gluon.jit
def _copy(work, source, rings, told, SIZES: gl.constexpr):
    """The warp that copies takes items as they come, tells the others which, and copies tiles.

    A program's first two items are fixed: asking takes time, and the first copy is waited for. The
    others go to the program that asks first, because not all multiprocessors read equally fast. The
    last program to end leaves the counters as it found them.
    """
    items_ptr, total_ptr, _ = work
    index_ring, full, empty = told
    WORD: gl.constexpr = gl.BlockedLayout([1], [32], [1], [0])
    index = gl.program_id(0)
    # Read without knowing that it exists: waiting for the count would delay the first copy.
    row, _, _, _, begin, end, head = item(items_ptr, 1, index, SIZES)
    last = gl.load(total_ptr) * SIZES.num_kv_heads - 1
    number = 0
    count = 0
    while index <= last:
        following = index + gl.num_programs(0)
        if number > 0:
            following = 2 * gl.num_programs(0) + gl.atomic_add(total_ptr + 1, 1, sem="relaxed")
        place = number % TOLD
        mbarrier.wait(empty.index(place), number // TOLD % 2 ^ 1)
        index_ring.index(place).store(gl.full([1], following, gl.int32, WORD))
        barrier()
        mbarrier.arrive(full.index(place), count=1)
        found = row, 0, 0, 0, begin, end, head
        row, _, _, _, begin, end, head = item(items_ptr, 1, gl.minimum(following, last), SIZES)
        count = copy_item(found, source, rings, count, SIZES)
        index = following
        number += 1
    if gl.atomic_add(total_ptr + 2, 1) == gl.num_programs(0) - 1:
        gl.store(total_ptr + 1, 0)
        gl.store(total_ptr + 2, 0)


@gluon.jit
def _told(told, number):
    """The item that the program has behind its `number`-th; one past all items if none."""
    index_ring, full, empty = told
    WORD: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    place = number % TOLD
    mbarrier.wait(full.index(place), number // TOLD % 2)
    index = gl.max(index_ring.index(place).load(WORD), 0)
    barrier()
    mbarrier.arrive(empty.index(place), count=1)
    return index


@gluon.jit
def _load_queries(queries, items_ptr, index, end, LAYOUT: gl.constexpr, SIZES: gl.constexpr):
    """The rows of an item; zeros for those that have no query, and for items that are not there."""
    q_ptr, q_stride_t, q_stride_h = queries
    is_there = index < end
    at = items_ptr + index // SIZES.num_kv_heads * FIELDS
    token = gl.load(at + 1, mask=is_there, other=0)
    new = gl.load(at + 2, mask=is_there, other=0)
    RATIO: gl.constexpr = SIZES.num_heads // SIZES.num_kv_heads
    rows = gl.arange(0, GROUP_M, gl.SliceLayout(1, LAYOUT))
    dims = gl.expand_dims(gl.arange(0, SIZES.head_dim, gl.SliceLayout(0, LAYOUT)), 0)
    at = (token + rows // RATIO).to(gl.int64)
    head = index % SIZES.num_kv_heads * RATIO + rows % RATIO
    where = at * (q_stride_t * 16) + head * (q_stride_h * 16)
    real = gl.expand_dims(rows // RATIO < new, 1)
    return gl.load(q_ptr + gl.expand_dims(where, 1) + dims, mask=real, other=0.0)


@gluon.jit
def _multiply(
    work,
    queries,
    results,
    mine,  # shared memory
    rings,
    told,  # by the warp that copies
    window,
    terms,
    SIZES: gl.constexpr,
):
    """The group of warps that attends: one item after another."""
    items_ptr, total_ptr, parts_ptr = work
    out_ptr, lse_ptr, partial_ptr, sums_ptr, most_parts = results
    q_tile, anchor = mine
    DIM: gl.constexpr = SIZES.head_dim
    HEADS: gl.constexpr = SIZES.num_heads
    RATIO: gl.constexpr = HEADS // SIZES.num_kv_heads
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [4, 1], [1, 0])
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SIZES.block_n, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    dims = gl.expand_dims(gl.arange(0, DIM, gl.SliceLayout(0, O_LAYOUT)), 0)
    rows = gl.arange(0, GROUP_M, gl.SliceLayout(1, S_LAYOUT))
    scores_by = made(terms, SIZES)
    scale = scores_by[1]
    end_at = gl.load(total_ptr) * SIZES.num_kv_heads
    index = gl.program_id(0)
    q = _load_queries(queries, items_ptr, index, end_at, LAYOUT, SIZES)
    number = 0
    count = 0
    while index < end_at:
        q_tile.store(q)
        fence_async_shared()
        row, own, new, first, begin, end, kv_head = item(items_ptr, 1, index, SIZES)
        at = items_ptr + index // SIZES.num_kv_heads * FIELDS
        part = gl.load(at + 6)
        partial = gl.load(at + 7)
        parts = gl.load(parts_ptr + row)
        index = _told(told, number)  # its barrier serves the queries, too
        number += 1
        q = _load_queries(queries, items_ptr, index, end_at, LAYOUT, SIZES)

        position = first + rows // RATIO
        if not SIZES.window:
            # Queries that see their whole row have positions behind its end.
            position = gl.minimum(position, end - 1)
        real = rows // RATIO < new
        head = kv_head * RATIO + rows % RATIO
        # A sink is counted once, in the row's first part.
        before = before_tokens(terms, head, real & (part == 0), scale, S_LAYOUT)
        found = row, own, new, first, begin, end, kv_head
        acc, total, top, count = attend(
            *(q_tile, found, position, before, count, window, scores_by),
            *(rings, anchor, SIZES, LAYOUT, S_LAYOUT, O_LAYOUT),
        )
        safe = gl.where(total > 0, total, 1.0)
        share = gl.convert_layout(1.0 / safe, gl.SliceLayout(1, O_LAYOUT))
        acc = acc * gl.expand_dims(share, 1)
        sums = gl.where(total > 0, top * scale + gl.log2(safe), float("-inf"))
        if terms.sinks is not None:
            sums = gl.where(top == LARGEST, INFINITE, sums)
        query = (rows // RATIO).to(gl.int64)
        if parts == 1:
            to = (own + query) * HEADS + head
            natural = sums * LN2
            if terms.sinks is not None:
                natural = gl.where(sums >= INFINITE, float("inf"), natural)
            gl.store(lse_ptr + to, natural, mask=real)
            _store_rows(out_ptr, to, real, acc.to(q_tile.dtype), dims, O_LAYOUT, SIZES)
        else:
            to = ((partial + query) * most_parts + part) * HEADS + head
            gl.store(sums_ptr + to, sums, mask=real)
            _store_rows(partial_ptr, to, real, acc, dims, O_LAYOUT, SIZES)


@gluon.jit
def _store_rows(ptr, to, real, values, dims, O_LAYOUT: gl.constexpr, SIZES: gl.constexpr):
    """Stores rows straight out of registers: four threads have 32 bytes of one side by side."""
    ROW: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    to = gl.expand_dims(gl.convert_layout(to, ROW) * SIZES.head_dim, 1)
    mask = gl.expand_dims(gl.convert_layout(real, ROW), 1)
    gl.store(ptr + to + dims, values, mask=mask)


@gluon.jit(do_not_specialize=["table_stride", "q_stride_t", "q_stride_h", "window", "most_parts"])
def _decode_hopper(
    q_ptr,
    k_desc,
    v_desc,
    table_ptr,
    items_ptr,
    total_ptr,
    parts_ptr,
    out_ptr,
    lse_ptr,
    partial_ptr,
    sums_ptr,
    table_stride,
    q_stride_t,
    q_stride_h,
    window,
    terms,
    most_parts,
    SIZES: gl.constexpr,
):
    """Programs of a group that multiplies, and a warp that copies for it."""
    dtype: gl.constexpr = k_desc.dtype
    q_tile = gl.allocate_shared_memory(dtype, [GROUP_M, SIZES.head_dim], k_desc.layout)
    words: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    anchor = gl.allocate_shared_memory(gl.float32, [GROUP_M], words)
    rings = new_rings(k_desc, v_desc, 1, SIZES)
    index_ring = gl.allocate_shared_memory(gl.int32, [TOLD, 1], words)
    index_full = gl.allocate_shared_memory(gl.int64, [TOLD, 1], mbarrier.MBarrierLayout())
    index_empty = gl.allocate_shared_memory(gl.int64, [TOLD, 1], mbarrier.MBarrierLayout())
    for place in gl.static_range(TOLD):
        mbarrier.init(index_full.index(place), count=1)
        mbarrier.init(index_empty.index(place), count=1)
    fence_async_shared()
    queries = q_ptr, q_stride_t, q_stride_h
    results = out_ptr, lse_ptr, partial_ptr, sums_ptr, most_parts
    mine, source = (q_tile, anchor), (table_ptr, table_stride, k_desc, v_desc)
    told = index_ring, index_full, index_empty
    work = items_ptr, total_ptr, parts_ptr
    gl.warp_specialize(
        [
            (_multiply, (work, queries, results, mine, rings, told, window, terms, SIZES)),
            (_copy, (work, source, rings, told, SIZES)),
        ],
        [1],
        [SIZES.registers[1]],
    )


def serves(geometry: Geometry, scoring: Scoring, target: Target, rows: int) -> bool:
    """Whether there is a kernel for tiles of so many rows; `triton/decode.py` has the others."""
    is_known = geometry.head_dim == geometry.v_dim and geometry.head_dim in TUNING
    return rows <= ROWS and is_known and served(geometry, scoring, target)


def paged_attention(
    q: Tensor,
    k_pages: Pages,
    v_pages: Pages,
    page_table: Tensor,
    work: Work,
    geometry: Geometry,
    scoring: Scoring,
    results: tuple[Tensor, Tensor, Tensor, Tensor],
) -> None:
    """Attends as `triton/decode.py` does, to what `serves` allows.

    Args:
        work: cut into tiles of at most `ROWS` rows.
        results: output, log-sum-exp, and where parts of both lie until they are merged.
    """
    target = target_of(q.device)
    tables = 1 if page_table.ndim == 2 else page_table.shape[1]
    launcher, programs = _launcher(geometry, scoring.kind, target, tables)
    sizes = launcher.static["SIZES"]
    window, terms = scoring.arguments()
    most = work.items.shape[0] * geometry.num_kv_heads
    launcher(
        (min(most, programs * target.processors), 1, 1),
        *(q, *(grid(x.data, sizes.box, sizes.head_dim) for x in (k_pages, v_pages)), page_table),
        *(*work, *results),
        *(page_table.stride(-2), *in_units("q", q), window, terms, results[2].shape[1]),
    )


@functools.cache
def _launcher(
    geometry: Geometry, kind: ScoringKind, target: Target, tables: int
) -> tuple[Launcher, int]:
    """A configuration, and its programs side by side on a multiprocessor."""
    tune = TUNING[geometry.head_dim]
    sizes = Sizes(
        *(geometry.num_heads, geometry.num_kv_heads, geometry.head_dim, geometry.page),
        *(geometry.k[1:], geometry.v[1:]),
        box=min(geometry.page & -geometry.page, tune.block_n),
        block_n=tune.block_n,
        stages=tune.stages,
        registers=(2 * tune.registers - tune.copying, tune.copying),
        window=kind.window,
        softcap=kind.softcap,
        tables=tables,
        heads_first=True,
    )
    static = {"SIZES": sizes}
    rest = NUM_WARPS, tune.stages, tune.registers
    return Launcher(_decode_hopper, target, static, *rest), tune.programs
