"""Decode over latents on Hopper: one group of warps makes scores and weights, both sum values.

A program takes up to 64 query heads of an item of the work list, an item being one query. K is all
columns of a latent, V the first of them, and a tile lies in shared memory in three parts, each in
a ring of its own: the left half of V, its right half, and the columns of K behind V.

- The group `attend_left` multiplies queries with all three parts, makes weights of the scores, and
  sums the left half, whose 64 x 256 sums are all that a group's registers hold.
- The group `attend_right` sums the right half with the same weights, out of shared memory.
- A warp copies parts as soon as the last product that reads them has ended.

A tile's scores take 1,152 cycles of the tensor cores, its sums twice 512 (128 FLOP a byte for 64
heads). Bytes as in `triton/decode.py`; the programs of an item's heads run beside each other, and
the second finds its tiles in L2.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

from pagedkv.kernels.formats import Pages
from pagedkv.kernels.scoring import Scoring
from pagedkv.kernels.triton.geometry import Geometry, Target
from pagedkv.kernels.triton.launch import Launcher, in_units, target_of
from pagedkv.kernels.triton.work_list import Work

from .attend import GROUP_M
from .attend_latents import HALF, REST, attend_left, attend_right, copy_parts
from .pages import grid, served

COLUMNS = 576, 64  # of K, and of its part behind V
HALF_COLUMNS = 256
NUM_WARPS = 4  # of a group
# Heads of a tile of one query; with fewer, which would leave much empty, a tile has several.
FEWEST_HEADS, MOST_HEADS = 33, 64


class Tuning(NamedTuple):
    """Tokens a tile, tiles in a ring, registers of a thread that multiplies or copies."""

    block_n: int = 64
    stages: int = 2
    multiplying: int = 232
    copying: int = 40


TUNING = Tuning()


class Sizes(NamedTuple):
    """The constants that a kernel is compiled for.

    Attributes:
        k: strides of pages, KV heads and slots.
        heads: query heads of a tile.
        shares: programs of an item, one for each share of each KV head's query heads.
        box: tokens of a copy, all of one page.
    """

    num_heads: int
    num_kv_heads: int
    page: int
    k: tuple[int, int, int]
    heads: int
    shares: int
    box: int
    block_n: int
    stages: int
    registers: tuple[int, int]


@gluon.jit(do_not_specialize=["table_stride", "q_rows", "most_parts"])
def _latents_hopper(
    q_half_desc,
    q_rest_desc,
    half_desc,
    rest_desc,
    table_ptr,
    items_ptr,
    total_ptr,
    parts_ptr,
    out_ptr,
    lse_ptr,
    partial_ptr,
    sums_ptr,
    table_stride,
    q_rows,
    most_parts,
    scale,
    SIZES: gl.constexpr,
):
    """Programs of two groups that multiply, and a warp that copies for both."""
    STAGES: gl.constexpr = SIZES.stages
    BLOCK_N: gl.constexpr = SIZES.block_n
    dtype: gl.constexpr = half_desc.dtype
    words: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    by_place: gl.constexpr = mbarrier.MBarrierLayout()
    q_left = gl.allocate_shared_memory(dtype, [GROUP_M, HALF], half_desc.layout)
    q_right = gl.allocate_shared_memory(dtype, [GROUP_M, HALF], half_desc.layout)
    q_rest = gl.allocate_shared_memory(dtype, [GROUP_M, REST], rest_desc.layout)
    left = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, HALF], half_desc.layout)
    right = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, HALF], half_desc.layout)
    rest = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, REST], rest_desc.layout)
    w_tile = gl.allocate_shared_memory(dtype, [GROUP_M, BLOCK_N], rest_desc.layout)
    fades = gl.allocate_shared_memory(gl.float32, [GROUP_M], words)
    left_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], by_place)
    right_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], by_place)
    rest_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], by_place)
    left_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], by_place)
    right_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], by_place)
    rest_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], by_place)
    w_full = gl.allocate_shared_memory(gl.int64, [1], by_place)
    w_empty = gl.allocate_shared_memory(gl.int64, [1], by_place)
    asked = gl.allocate_shared_memory(gl.int64, [2, 1], by_place)  # of queries
    for place in gl.static_range(STAGES):
        mbarrier.init(left_full.index(place), count=1)
        mbarrier.init(right_full.index(place), count=1)
        mbarrier.init(rest_full.index(place), count=1)
        mbarrier.init(left_empty.index(place), count=1)
        mbarrier.init(right_empty.index(place), count=1)
        mbarrier.init(rest_empty.index(place), count=1)
    mbarrier.init(w_full, count=1)
    mbarrier.init(w_empty, count=1)
    q_full, q_empty = asked.index(0), asked.index(1)
    mbarrier.init(q_full, count=1)
    mbarrier.init(q_empty, count=1)
    fence_async_shared()
    work = items_ptr, gl.load(total_ptr), parts_ptr
    full = left_full, right_full, rest_full
    empty = left_empty, right_empty, rest_empty
    rings = left, right, rest, full, empty
    queries = q_half_desc, q_rest_desc, q_rows, q_left, q_right, q_rest, q_full, q_empty
    exchange = w_tile, fades, w_full, w_empty
    results = out_ptr, lse_ptr, partial_ptr, sums_ptr, most_parts
    source = table_ptr, table_stride, half_desc, rest_desc
    gl.warp_specialize(
        [
            (attend_left, (work, results, queries, rings, exchange, scale, SIZES)),
            (attend_right, (work, results, rings, exchange, SIZES)),
            (copy_parts, (work, source, queries, rings, SIZES)),
        ],
        [4, 1],
        [SIZES.registers[0], SIZES.registers[1]],
    )


def serves(q: Tensor, geometry: Geometry, heads: int, scoring: Scoring, target: Target) -> bool:
    """Whether there is a kernel for these latents and terms; `triton/decode.py` has the others.

    Args:
        q: its heads are copied as rows of a grid.
        heads: of a tile of one query.
    """
    return (
        (geometry.head_dim, geometry.rest) == COLUMNS
        and FEWEST_HEADS <= heads <= MOST_HEADS
        and q.stride(1) >= q.shape[2]
        and q.stride(0) % q.stride(1) == 0
        and scoring.softcap is None
        and scoring.sinks is None
        and served(geometry, scoring, target)
    )


def paged_attention(
    heads: int,
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
        heads: of a tile.
        v_pages: a view of `k_pages`.
        page_table: `[B, columns]`, or `[B, 1, columns]`.
        work: cut into tiles of one query, whose range of tokens says what it sees.
        results: output, log-sum-exp, and where parts of both lie until they are merged.
    """
    target = target_of(q.device)
    launcher = _launcher(geometry, heads, TUNING, target)
    sizes = launcher.static["SIZES"]
    most = work.items.shape[0] * sizes.shares
    step, each = in_units("q", q)
    boxes = HALF_COLUMNS, COLUMNS[1]
    launcher(
        (min(most, target.processors), 1, 1),
        *(grid(q[:, None], MOST_HEADS, columns) for columns in boxes),
        *(grid(k_pages.data, sizes.box, columns) for columns in boxes),
        *(page_table, *work, *results),
        *(page_table.stride(-2), step // each, results[2].shape[1]),
        scoring.arguments()[1].scale,
    )


@functools.cache
def _launcher(geometry: Geometry, heads: int, tune: Tuning, target: Target) -> Launcher:
    sizes = Sizes(
        *(geometry.num_heads, geometry.num_kv_heads, geometry.page, geometry.k[1:]),
        heads=heads,
        shares=-(-geometry.ratio // heads) * geometry.num_kv_heads,
        box=min(geometry.page & -geometry.page, tune.block_n),
        block_n=tune.block_n,
        stages=tune.stages,
        registers=(tune.multiplying, tune.copying),
    )
    return Launcher(_latents_hopper, target, {"SIZES": sizes}, NUM_WARPS, tune.stages)
