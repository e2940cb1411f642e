"""Prefill on Hopper: a warp that copies pages beside warps that multiply, written in Gluon.

One of a program's nine warps copies tiles of K and V out of pages by the tensor memory accelerator
(TMA), a ring of tiles ahead of the others. Two groups of four warps take 64 rows each of a tile of
128, which is cut as in `triton/prefill.py` and means the same. There are as many programs as
multiprocessors, and they walk the work list.

Bytes and FLOP as in `triton/prefill.py`. Triton's interpreter has no Gluon; tests
run the functions of this folder in threads instead (`tests/kernels/triton/gluon/emulator.py`).
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from pagedkv.kernels.formats import Pages
from pagedkv.kernels.scoring import Scoring, ScoringKind
from pagedkv.kernels.triton.geometry import Geometry, Target
from pagedkv.kernels.triton.launch import Launcher, in_units, target_of
from pagedkv.kernels.triton.work_list import Work

from .attend import GROUP_M, LARGEST, attend, before_tokens, made
from .pages import Sizes, barrier, copy_tiles, grid, item, new_rings, served

LN2: gl.constexpr = gl.constexpr(0.6931471805599453)
GROUPS: gl.constexpr = gl.constexpr(2)
ROWS = 128  # of a tile: those of both groups


class Tuning(NamedTuple):
    """Tokens a tile, tiles of K and of V in the ring, registers of a thread.

    Attributes:
        multiplying, copying: registers, together at most 65,536 of two groups and of a third in
            which only one warp works.
    """

    block_n: int
    stages: int
    multiplying: int
    copying: int


# By head dim: 160 KiB each, 192 for 256; a tile or more is on its way while one is attended.
TUNING = {
    64: Tuning(128, 4, 232, 40),
    128: Tuning(128, 2, 240, 24),
    256: Tuning(64, 2, 240, 24),
}
NUM_WARPS = 4  # of a group


@gluon.jit
def _multiply(
    GROUP: gl.constexpr,
    work,
    queries,
    results,
    mine,  # shared memory of the group
    rings,
    window,
    terms,
    SIZES: gl.constexpr,
):
    """A group of warps: its rows of one item after another."""
    items_ptr, total_items = work
    q_ptr, q_stride_t, q_stride_h = queries
    out_ptr, lse_ptr = results
    q_tile, anchor = mine
    DIM: gl.constexpr = SIZES.head_dim
    RATIO: gl.constexpr = SIZES.num_heads // SIZES.num_kv_heads
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DIM, DIM // 8], [4, 1], [1, 0])
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SIZES.block_n, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    dims = gl.expand_dims(gl.arange(0, DIM, gl.SliceLayout(0, LAYOUT)), 0)
    offs = GROUP * GROUP_M + gl.arange(0, GROUP_M, gl.SliceLayout(1, LAYOUT))
    rows = GROUP * GROUP_M + gl.arange(0, GROUP_M, gl.SliceLayout(1, S_LAYOUT))
    scores_by = made(terms, SIZES)
    scale = scores_by[1]
    count = 0
    for index in range(gl.program_id(0), total_items * SIZES.num_kv_heads, gl.num_programs(0)):
        found = item(items_ptr, total_items, index, SIZES)
        _, token, new, first, _, _, kv_head = found
        real = gl.expand_dims(offs // RATIO < new, 1)
        at = (token + offs // RATIO).to(gl.int64)
        head = kv_head * RATIO + offs % RATIO
        where = at * (q_stride_t * 16) + head * (q_stride_h * 16)
        q_tile.store(gl.load(q_ptr + gl.expand_dims(where, 1) + dims, mask=real, other=0.0))
        fence_async_shared()
        barrier()
        shares = kv_head * RATIO + rows % RATIO, rows // RATIO < new
        before = before_tokens(terms, *shares, scale, S_LAYOUT)
        acc, total, top, count = attend(
            *(q_tile, found, first + rows // RATIO, before, count, window, scores_by),
            *(rings, anchor, SIZES, LAYOUT, S_LAYOUT, O_LAYOUT),
        )
        safe = gl.where(total > 0, total, 1.0)
        share = gl.convert_layout(1.0 / safe, gl.SliceLayout(1, O_LAYOUT))
        # Through the queries' memory, so that stores are 16 bytes wide.
        q_tile.store((acc * gl.expand_dims(share, 1)).to(q_tile.dtype))
        barrier()
        to = (at * SIZES.num_heads + head) * DIM
        gl.store(out_ptr + gl.expand_dims(to, 1) + dims, q_tile.load(LAYOUT), mask=real)
        barrier()
        sums = gl.where(total > 0, (top * scale + gl.log2(safe)) * LN2, float("-inf"))
        if terms.sinks is not None:
            sums = gl.where(top == LARGEST, float("inf"), sums)
        to = (token + rows // RATIO).to(gl.int64) * SIZES.num_heads + kv_head * RATIO + rows % RATIO
        gl.store(lse_ptr + to, sums, mask=rows // RATIO < new)


@gluon.jit(do_not_specialize=["table_stride", "q_stride_t", "q_stride_h", "window"])
def _prefill_hopper(
    q_ptr,
    k_desc,
    v_desc,
    table_ptr,
    items_ptr,
    total_ptr,
    out_ptr,
    lse_ptr,
    table_stride,
    q_stride_t,
    q_stride_h,
    window,
    terms,
    SIZES: gl.constexpr,
):
    """Programs of two groups that multiply, and a warp that copies for both."""
    dtype: gl.constexpr = k_desc.dtype
    q_tiles = gl.allocate_shared_memory(dtype, [GROUPS, GROUP_M, SIZES.head_dim], k_desc.layout)
    words: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    anchors = gl.allocate_shared_memory(gl.float32, [GROUPS, GROUP_M], words)
    rings = new_rings(k_desc, v_desc, GROUPS, SIZES)
    fence_async_shared()
    work = items_ptr, gl.load(total_ptr)
    queries, results = (q_ptr, q_stride_t, q_stride_h), (out_ptr, lse_ptr)
    first, second = (q_tiles.index(0), anchors.index(0)), (q_tiles.index(1), anchors.index(1))
    source = table_ptr, table_stride, k_desc, v_desc
    gl.warp_specialize(
        [
            (_multiply, (0, work, queries, results, first, rings, window, terms, SIZES)),
            (_multiply, (1, work, queries, results, second, rings, window, terms, SIZES)),
            (copy_tiles, (work, source, rings, SIZES)),
        ],
        [4, 1],
        [SIZES.registers[0], SIZES.registers[1]],
    )


def serves(geometry: Geometry, scoring: Scoring, target: Target) -> bool:
    """Whether there is a kernel for these heads and terms; `triton/prefill.py` has the others."""
    is_known = geometry.head_dim == geometry.v_dim and geometry.head_dim in TUNING
    return is_known and served(geometry, scoring, target)


def paged_attention(
    q: Tensor,
    k_pages: Pages,
    v_pages: Pages,
    page_table: Tensor,
    work: Work,
    geometry: Geometry,
    scoring: Scoring,
    out: Tensor,
    lse: Tensor,
) -> None:
    """Attends as `triton/prefill.py` does, to what `serves` allows.

    Args:
        work: cut into tiles of `ROWS` rows.
    """
    target = target_of(q.device)
    launcher = _launcher(geometry, scoring.kind, target)
    sizes = launcher.static["SIZES"]
    window, terms = scoring.arguments()
    launcher(
        (target.processors, 1, 1),
        *(q, *(grid(x.data, sizes.box, sizes.head_dim) for x in (k_pages, v_pages)), page_table),
        *(work.items, work.total, out, lse),
        *(page_table.stride(0), *in_units("q", q), window, terms),
    )


@functools.cache
def _launcher(geometry: Geometry, kind: ScoringKind, target: Target) -> Launcher:
    tune = TUNING[geometry.head_dim]
    sizes = Sizes(
        *(geometry.num_heads, geometry.num_kv_heads, geometry.head_dim, geometry.page),
        *(geometry.k[1:], geometry.v[1:]),
        box=min(geometry.page & -geometry.page, tune.block_n),
        block_n=tune.block_n,
        stages=tune.stages,
        registers=(tune.multiplying, tune.copying),
        window=kind.window,
        softcap=kind.softcap,
    )
    return Launcher(_prefill_hopper, target, {"SIZES": sizes}, NUM_WARPS, tune.stages)
