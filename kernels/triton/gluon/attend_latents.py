"""Attention of two groups of warps to latents, and the warp that copies for them.

Each part of a tile has a ring of its own, as `latents.py` says. One group gives the other a tile
of weights and a number a row, which have one place.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from pagedkv.kernels.triton.work_list import FIELDS

from .attend import GROUP_M
from .pages import barrier, blank, copy_box, copy_boxes, fields_of, page_ids, tiles

HALF: gl.constexpr = gl.constexpr(256)  # columns of half of V
REST: gl.constexpr = gl.constexpr(64)  # columns of K behind those of V
LN2: gl.constexpr = gl.constexpr(0.6931471805599453)


@gluon.jit
def _share(work, index, SIZES: gl.constexpr):
    """Reads a program's next share of an item's heads.

    Returns:
        The item's row, first query, and range of tokens; the KV head, the first query head and one
        past the last; which part it is, of how many, and in which row of parts.
    """
    items_ptr, _, parts_ptr = work
    RATIO: gl.constexpr = SIZES.num_heads // SIZES.num_kv_heads
    EACH: gl.constexpr = SIZES.shares // SIZES.num_kv_heads
    at = index // SIZES.shares
    fields = items_ptr + at * FIELDS
    row, token, _, _, begin, end = fields_of(fields)
    part, partial, parts = gl.load(fields + 6), gl.load(fields + 7), gl.load(parts_ptr + row)
    kv_head = index // EACH % SIZES.num_kv_heads
    first = kv_head * RATIO + index % EACH * SIZES.heads
    last = gl.minimum(first + SIZES.heads, kv_head * RATIO + RATIO)
    return row, token, begin, end, kv_head, first, last, part, parts, partial


@gluon.jit
def _copy_queries(queries, token, first, shares):
    """Begins to copy 64 heads of a query; results of those behind the share's last go nowhere."""
    half_desc, rest_desc, rows, q_left, q_right, q_rest, full, empty = queries
    ROW: gl.constexpr = (2 * HALF + REST) * half_desc.dtype.primitive_bitwidth // 8
    mbarrier.wait(empty, shares % 2 ^ 1)
    mbarrier.expect(full, GROUP_M * ROW)
    at = token * rows + first
    copy_box(rest_desc, [at, 2 * HALF], full, q_rest)
    copy_box(half_desc, [at, 0], full, q_left)
    copy_box(half_desc, [at, HALF], full, q_right)


@gluon.jit
def copy_parts(work, source, queries, rings, SIZES: gl.constexpr):
    """The warp that copies: part after part of a tile, as soon as its place is empty."""
    total = work[1]
    table_ptr, table_stride, half_desc, rest_desc = source
    left, right, rest, full, empty = rings
    left_full, right_full, rest_full = full
    left_empty, right_empty, rest_empty = empty
    count = 0
    for index in range(gl.program_id(0), total * SIZES.shares, gl.num_programs(0)):
        row, token, begin, end, head, first, _, _, _, _ = _share(work, index, SIZES)
        _copy_queries(queries, token, first, index // gl.num_programs(0))
        table = table_ptr + row.to(gl.int64) * table_stride
        low, high = tiles(begin, end, SIZES.block_n)
        for at in range(high - low):
            start = (high - 1 - at) * SIZES.block_n
            place = count % SIZES.stages
            phase = count // SIZES.stages % 2 ^ 1
            ids = page_ids(table, start, begin, end, SIZES)  # all of them before any copy
            mbarrier.wait(rest_empty.index(place), phase)
            copy_boxes(
                *(rest_desc, rest.index(place), rest_full.index(place), ids, start, head),
                *(True, 2 * HALF, REST, SIZES),
            )
            mbarrier.wait(left_empty.index(place), phase)
            copy_boxes(
                *(half_desc, left.index(place), left_full.index(place), ids, start, head),
                *(True, 0, HALF, SIZES),
            )
            mbarrier.wait(right_empty.index(place), phase)
            copy_boxes(
                *(half_desc, right.index(place), right_full.index(place), ids, start, head),
                *(True, HALF, HALF, SIZES),
            )
            count += 1


@gluon.jit
def _scores(queries, rings, count, S_LAYOUT: gl.constexpr, SIZES: gl.constexpr):
    """Begins to multiply the queries with a tile, in three products."""
    left, right, rest, full, _ = rings
    left_full, right_full, rest_full = full
    _, _, _, q_left, q_right, q_rest, _, _ = queries
    BLOCK_N: gl.constexpr = SIZES.block_n
    place = count % SIZES.stages
    phase = count // SIZES.stages % 2
    zeros = gl.zeros([GROUP_M, BLOCK_N], gl.float32, S_LAYOUT)
    mbarrier.wait(rest_full.index(place), phase)
    keys = rest.index(place).permute((1, 0))
    scores = warpgroup_mma(q_rest, keys, zeros, use_acc=False, is_async=True)
    mbarrier.wait(left_full.index(place), phase)
    scores = warpgroup_mma(q_left, left.index(place).permute((1, 0)), scores, is_async=True)
    # The part that is emptied last comes last.
    mbarrier.wait(right_full.index(place), phase)
    return warpgroup_mma(q_right, right.index(place).permute((1, 0)), scores, is_async=True)


@gluon.jit
def _weights(
    scores,
    start,
    begin,
    end,
    scale,
    top,  # [GROUP_M], largest product so far
    total,  # [GROUP_M], sum of weights so far
    dtype: gl.constexpr,
    S_LAYOUT: gl.constexpr,
    SIZES: gl.constexpr,
):
    """Weights of a tile, the factor of earlier sums, largest product and sum of weights."""
    if (start < begin) | (start + SIZES.block_n > end):
        token = start + gl.arange(0, SIZES.block_n, gl.SliceLayout(0, S_LAYOUT))
        seen = gl.expand_dims((token >= begin) & (token < end), 0)
        scores = gl.where(seen, scores, float("-inf"))
    highest = gl.maximum(top, gl.max(scores, 1))
    # A row that has seen nothing has no largest product: -inf minus -inf is NaN.
    level = gl.where(highest == float("-inf"), 0.0, highest * scale)
    weights = gl.exp2(scores * scale - gl.expand_dims(level, 1))
    fade = gl.exp2(top * scale - level)
    return weights.to(dtype), fade, highest, total * fade + gl.sum(weights, 1)


@gluon.jit
def _show(exchange, weights, fade, shown):
    """Gives the other group a tile's weights, once it has multiplied those before.

    The other group multiplies its sums by `fade`.
    """
    w_tile, fades, full, empty = exchange
    mbarrier.wait(empty, shown % 2 ^ 1)
    if weights is not None:
        w_tile.store(weights)
    fades.store(fade)
    fence_async_shared()
    barrier()
    mbarrier.arrive(full, count=1)


@gluon.jit
def _store(
    acc,
    factor,
    results,
    found,
    COLUMN: gl.constexpr,
    O_LAYOUT: gl.constexpr,
    SIZES: gl.constexpr,
):
    """Stores half of a share's output, or of a part of it."""
    out_ptr, _, partial_ptr, _, most_parts = results
    _, token, _, _, _, first, last, part, parts, partial = found
    head = first + gl.arange(0, GROUP_M, gl.SliceLayout(1, O_LAYOUT))
    real = gl.expand_dims(head < last, 1)
    columns = gl.expand_dims(COLUMN + gl.arange(0, HALF, gl.SliceLayout(0, O_LAYOUT)), 0)
    within = gl.expand_dims(head * (2 * HALF), 1) + columns
    out = acc * gl.expand_dims(factor, 1)
    ROW: gl.constexpr = SIZES.num_heads * 2 * HALF
    if parts == 1:
        whole = out_ptr + token.to(gl.int64) * ROW
        gl.store(whole + within, out, mask=real)
    else:
        to = partial_ptr + (partial.to(gl.int64) * most_parts + part) * ROW
        gl.store(to + within, out, mask=real)


@gluon.jit
def attend_left(
    work,
    results,
    queries,
    rings,
    exchange,
    scale,
    SIZES: gl.constexpr,
):
    """The group that makes scores and weights, and sums the left half."""
    total_items = work[1]
    lse_ptr, sums_ptr, most_parts = results[1], results[3], results[4]
    q_full, q_empty = queries[6], queries[7]
    left_ring, left_empty, rest_empty = rings[0], rings[4][0], rings[4][2]
    dtype: gl.constexpr = exchange[0].dtype
    BLOCK_N: gl.constexpr = SIZES.block_n
    S_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, SIZES.block_n, 16])
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    W_LAYOUT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=O_LAYOUT, k_width=2)
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    ROWS: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    O_ROWS: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    count = 0  # tiles whose scores were made
    shown = 0  # times that the other group was given something
    for index in range(gl.program_id(0), total_items * SIZES.shares, gl.num_programs(0)):
        found = _share(work, index, SIZES)
        _, token, begin, end, _, first, last, part, parts, partial = found
        low, high = tiles(begin, end, SIZES.block_n)
        mbarrier.wait(q_full, index // gl.num_programs(0) % 2)
        top = gl.full([GROUP_M], float("-inf"), gl.float32, ROWS)
        total = gl.zeros([GROUP_M], gl.float32, ROWS)
        acc = gl.zeros([GROUP_M, HALF], gl.float32, O_LAYOUT)
        scores = _scores(queries, rings, count, S_LAYOUT, SIZES)
        scores = warpgroup_mma_wait(0, deps=[scores])
        barrier()
        mbarrier.arrive(rest_empty.index(count % SIZES.stages), count=1)
        count += 1
        for at in range(1, high - low):
            place = (count - 1) % SIZES.stages
            start = (high - at) * BLOCK_N
            left = left_ring.index(place)
            blank(left, start, begin, end, LAYOUT, SIZES)
            weights, fade, top, total = _weights(
                *(scores, start, begin, end, scale, top, total, dtype, S_LAYOUT, SIZES)
            )
            acc = acc * gl.expand_dims(gl.convert_layout(fade, O_ROWS), 1)
            operand = gl.convert_layout(weights, W_LAYOUT)
            acc = warpgroup_mma(operand, left, acc, is_async=True)
            _show(exchange, weights, fade, shown)
            scores = _scores(queries, rings, count, S_LAYOUT, SIZES)
            acc, operand = warpgroup_mma_wait(3, deps=[acc, operand])
            barrier()
            mbarrier.arrive(left_empty.index(place), count=1)
            scores = warpgroup_mma_wait(0, deps=[scores])
            barrier()
            mbarrier.arrive(rest_empty.index(count % SIZES.stages), count=1)
            count += 1
            shown += 1
        mbarrier.arrive(q_empty, count=1)  # behind the barrier of the last scores
        place = (count - 1) % SIZES.stages
        start = low * BLOCK_N
        left = left_ring.index(place)
        blank(left, start, begin, end, LAYOUT, SIZES)
        weights, fade, top, total = _weights(
            *(scores, start, begin, end, scale, top, total, dtype, S_LAYOUT, SIZES)
        )
        acc = acc * gl.expand_dims(gl.convert_layout(fade, O_ROWS), 1)
        operand = gl.convert_layout(weights, W_LAYOUT)
        acc = warpgroup_mma(operand, left, acc, is_async=True)
        _show(exchange, weights, fade, shown)
        shown += 1
        acc, operand = warpgroup_mma_wait(0, deps=[acc, operand])
        barrier()
        mbarrier.arrive(left_empty.index(place), count=1)

        safe = gl.where(total > 0, total, 1.0)
        _store(acc, gl.convert_layout(1.0 / safe, O_ROWS), results, found, 0, O_LAYOUT, SIZES)
        head = first + gl.arange(0, GROUP_M, ROWS)
        sums = gl.where(total > 0, top * scale + gl.log2(safe), float("-inf"))
        if parts == 1:
            whole = lse_ptr + token.to(gl.int64) * SIZES.num_heads
            gl.store(whole + head, sums * LN2, mask=head < last)
        else:
            to = sums_ptr + (partial.to(gl.int64) * most_parts + part) * SIZES.num_heads
            gl.store(to + head, sums, mask=head < last)
        _show(exchange, None, 1.0 / safe, shown)  # last: it waits for the other group
        shown += 1


@gluon.jit
def attend_right(work, results, rings, exchange, SIZES: gl.constexpr):
    """The group that sums the right half, by weights that the other group gives it."""
    total_items = work[1]
    right_ring, right_full, right_empty = rings[1], rings[3][1], rings[4][1]
    w_tile, fades, full, empty = exchange
    O_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, HALF, 16])
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [4, 1], [1, 0])
    O_ROWS: gl.constexpr = gl.SliceLayout(1, O_LAYOUT)
    count = 0
    shown = 0
    for index in range(gl.program_id(0), total_items * SIZES.shares, gl.num_programs(0)):
        found = _share(work, index, SIZES)
        _, _, begin, end, _, _, _, _, _, _ = found
        low, high = tiles(begin, end, SIZES.block_n)
        acc = gl.zeros([GROUP_M, HALF], gl.float32, O_LAYOUT)
        for at in range(high - low):
            place = count % SIZES.stages
            right = right_ring.index(place)
            mbarrier.wait(right_full.index(place), count // SIZES.stages % 2)
            mbarrier.wait(full, shown % 2)
            fade = fades.load(O_ROWS)
            acc = acc * gl.expand_dims(fade, 1)
            blank(right, (high - 1 - at) * SIZES.block_n, begin, end, LAYOUT, SIZES)
            acc = warpgroup_mma(w_tile, right, acc, is_async=True)
            acc = warpgroup_mma_wait(0, deps=[acc])
            barrier()
            mbarrier.arrive(empty, count=1)
            mbarrier.arrive(right_empty.index(place), count=1)
            count += 1
            shown += 1
        mbarrier.wait(full, shown % 2)
        factor = fades.load(O_ROWS)
        barrier()
        mbarrier.arrive(empty, count=1)
        shown += 1
        _store(acc, factor, results, found, HALF, O_LAYOUT, SIZES)
