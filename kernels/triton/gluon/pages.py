"""Tiles of K and V on their way from pages into shared memory, and the work they are copied for.

A ring has places for tiles. Its barriers tell the warps that multiply when a place is full, and the
warp that copies when it is empty; the phase of a barrier tells one round from the next.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from pagedkv.kernels.scoring import Scoring
from pagedkv.kernels.triton.geometry import Geometry, Layout, Target
from pagedkv.kernels.triton.work_list import FIELDS

BLANK: gl.constexpr = gl.constexpr(16)  # tokens that are blanked at once

# Triton 3.7 gave the first another name, which is for all warps of the group that calls it, and 3.8
# the second.
barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier
copy_box = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared


class Sizes(NamedTuple):
    """The constants that a kernel is compiled for.

    Attributes:
        k, v: strides of pages, KV heads and slots.
        box: tokens of a copy, all of one page.
        block_n: tokens of a tile.
        stages: places of a ring.
        registers: of a thread that multiplies, and of one that copies.
        window, softcap: whether there is one.
        tables: page tables of a row: one, or one for each KV head.
        heads_first: whether programs side by side have the KV heads of an item, which lie side by
            side in a page, or else the items of a KV head, which share its tiles in L2.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    page: int
    k: tuple[int, int, int]
    v: tuple[int, int, int]
    box: int
    block_n: int
    stages: int
    registers: tuple[int, int]
    window: bool
    softcap: bool
    tables: int = 1
    heads_first: bool = False


@gluon.jit
def item(items_ptr, total, index, SIZES: gl.constexpr):
    """Reads an item of a program's work: row, first token, queries, position, range, KV head."""
    if SIZES.heads_first:
        at = index // SIZES.num_kv_heads
        head = index % SIZES.num_kv_heads
    else:
        at = index % total
        head = index // total
    row, token, queries, first, begin, end = fields_of(items_ptr + at * FIELDS)
    return row, token, queries, first, begin, end, head


@gluon.jit
def fields_of(item):
    """Row, first token, queries, position and range of an item."""
    row = gl.load(item)
    token = gl.load(item + 1)
    queries = gl.load(item + 2)
    first = gl.load(item + 3)
    begin = gl.load(item + 4)
    end = gl.load(item + 5)
    return row, token, queries, first, begin, end


@gluon.jit
def tiles(begin, end, BLOCK_N: gl.constexpr):
    """First tile of a range, and one past its last; an empty range has one tile, too."""
    low = begin // BLOCK_N
    return low, gl.maximum(gl.cdiv(end, BLOCK_N), low + 1)


@gluon.jit
def page_ids(table, start, begin, end, SIZES: gl.constexpr):
    """Page ids of a tile's boxes. Tokens out of range are read from page 0, and blanked."""
    ids = ()
    for box in gl.static_range(SIZES.block_n // SIZES.box):
        token = start + box * SIZES.box
        there = (token < end) & (token + SIZES.box > begin)
        ids += (gl.load(table + token // SIZES.page, mask=there, other=0),)  # type: ignore[assignment]
    return ids


@gluon.jit
def copy_boxes(
    desc,
    tile,
    full,
    ids,  # from `page_ids`
    start,
    head,
    IS_K: gl.constexpr,
    FIRST: gl.constexpr,  # column of the head
    WIDTH: gl.constexpr,
    SIZES: gl.constexpr,
):
    """Begins to copy some columns of a tile of K, or of V, box by box."""
    STRIDES: gl.constexpr = SIZES.k if IS_K else SIZES.v
    BYTES: gl.constexpr = SIZES.block_n * WIDTH * desc.dtype.primitive_bitwidth // 8
    mbarrier.expect(full, BYTES)
    for box in gl.static_range(SIZES.block_n // SIZES.box):
        in_page = (start + box * SIZES.box) % SIZES.page
        at_row = ids[box] * (STRIDES[0] // STRIDES[2]) + head * STRIDES[1] // STRIDES[2] + in_page
        column = head * STRIDES[1] % STRIDES[2] + FIRST
        part = tile.slice(box * SIZES.box, SIZES.box, dim=0)
        copy_box(desc, [at_row, column], full, part)


@gluon.jit
def new_rings(k_desc, v_desc, READERS: gl.constexpr, SIZES: gl.constexpr):
    """Rings of K and of V, and their barriers: full, and empty once so many groups have read."""
    STAGES: gl.constexpr = SIZES.stages
    tile: gl.constexpr = [STAGES, SIZES.block_n, SIZES.head_dim]
    k_ring = gl.allocate_shared_memory(k_desc.dtype, tile, k_desc.layout)
    v_ring = gl.allocate_shared_memory(v_desc.dtype, tile, v_desc.layout)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for place in gl.static_range(STAGES):
        mbarrier.init(k_full.index(place), count=1)
        mbarrier.init(v_full.index(place), count=1)
        mbarrier.init(k_empty.index(place), count=READERS)
        mbarrier.init(v_empty.index(place), count=READERS)
    return k_ring, v_ring, k_full, v_full, k_empty, v_empty


@gluon.jit
def copy_item(found, source, rings, count, SIZES: gl.constexpr):
    """Tile after tile of an item into the ring, as soon as a place in it is empty.

    Args:
        found: from `item`.
        count: tiles copied before.

    Returns:
        Tiles copied so far.
    """
    row, _, _, _, begin, end, head = found
    table_ptr, table_stride, k_desc, v_desc = source
    k_ring, v_ring, k_full, v_full, k_empty, v_empty = rings
    table = table_ptr + row.to(gl.int64) * table_stride
    if SIZES.tables > 1:
        table = table_ptr + (row.to(gl.int64) * SIZES.tables + head) * table_stride
    low, high = tiles(begin, end, SIZES.block_n)
    for at in range(high - low):
        start = (high - 1 - at) * SIZES.block_n
        place = count % SIZES.stages
        phase = count // SIZES.stages % 2 ^ 1
        ids = page_ids(table, start, begin, end, SIZES)  # all of them before any copy
        mbarrier.wait(k_empty.index(place), phase)
        copy_boxes(
            *(k_desc, k_ring.index(place), k_full.index(place), ids, start, head),
            *(True, 0, SIZES.head_dim, SIZES),
        )
        mbarrier.wait(v_empty.index(place), phase)
        copy_boxes(
            *(v_desc, v_ring.index(place), v_full.index(place), ids, start, head),
            *(False, 0, SIZES.head_dim, SIZES),
        )
        count += 1
    return count


@gluon.jit
def copy_tiles(work, source, rings, SIZES: gl.constexpr):
    """The warp that copies, if the items of a program are known beforehand."""
    items_ptr, total = work
    count = 0
    for index in range(gl.program_id(0), total * SIZES.num_kv_heads, gl.num_programs(0)):
        count = copy_item(item(items_ptr, total, index, SIZES), source, rings, count, SIZES)


@gluon.jit
def blank(tile, start, begin, end, LAYOUT: gl.constexpr, SIZES: gl.constexpr):
    """Zeroes tokens out of range: an unwritten slot may hold NaN, and 0 x NaN is NaN.

    If there are two groups, both do it, and write the same.
    """
    offs = gl.arange(0, BLANK, gl.SliceLayout(1, LAYOUT))
    if (start < begin) | (start + SIZES.block_n > end):
        for box in gl.static_range(SIZES.block_n // BLANK):
            token = start + box * BLANK
            if (token < begin) | (token + BLANK > end):
                part = tile.slice(box * BLANK, BLANK, dim=0)
                inside = (token + offs >= begin) & (token + offs < end)
                elements = part.load(LAYOUT)
                part.store(gl.where(gl.expand_dims(inside, 1), elements, 0.0))
        fence_async_shared()
        barrier()


# ------------------------------------------------------------------ on the host


def served(geometry: Geometry, scoring: Scoring, target: Target) -> bool:
    """Whether tiles can be copied out of these pages, and such scores be made of them."""
    return (
        target.arch == 90
        and geometry.dtype.itemsize == 2
        and geometry.k.format.dense
        and geometry.v.format.dense
        and not geometry.staging.stride_n
        and geometry.page % 16 == 0  # the fewest tokens of a copy, see `Sizes.box`
        and _is_grid(geometry.k)
        and _is_grid(geometry.v)
        and scoring.tree is None
        and scoring.scale > 0
        and not scoring.is_biased
    )


def _is_grid(pages: Layout) -> bool:
    """Whether slots lie in a grid: rows of slots, and in each the columns of some heads."""
    return pages.stride_n % pages.stride_p == 0 and (
        pages.stride_g % pages.stride_p == 0 or pages.stride_g < pages.stride_p
    )


def grid(pages: Tensor, box: int, columns: int) -> TensorDescriptor:
    """Describes slots as rows, of which the accelerator copies boxes."""
    stride = pages.stride(2)
    last = sum(step * (count - 1) for step, count in zip(pages.stride(), pages.shape))
    shape = [last // stride + 1, stride]
    layout = _layout(box, columns, pages.dtype)
    return TensorDescriptor(pages, shape, [stride, 1], [box, columns], layout)


@functools.cache  # it takes Triton longer to make than the rest of a launch
def _layout(box: int, columns: int, dtype: torch.dtype) -> gl.NVMMASharedLayout:
    """How a box lies in shared memory."""
    kind = getattr(gl, str(dtype).removeprefix("torch."))
    return gl.NVMMASharedLayout.get_default_for([box, columns], kind)
