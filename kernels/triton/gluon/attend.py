"""Attention of a group of warps to the tiles of an item; products run during exponentials.

A tile's scores and the sums of the tile before it are issued together. Weights are made of those
scores while the tensor cores still sum: `WARPGROUP.DEPBAR` of the sums stands behind the
exponentials in compiled code, as `benchmarks/kernel_report.py` checks.

Tiles are attended from the last to the first: only the last has tokens that were not written, and
so masked tiles come before the loop without masks.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .pages import barrier, blank, tiles

GROUP_M: gl.constexpr = gl.constexpr(64)  # rows of a group of warps
LOG2E: gl.constexpr = gl.constexpr(1.4426950408889634)
LARGEST: gl.constexpr = gl.constexpr(1e36)  # stands for an infinite sink, whose distance is 0


@gluon.jit
def made(terms, SIZES: gl.constexpr):
    """Returns how scores are made of products: a factor within tanh, and the scale of the result.

    A capped score is tanh(product x scale / softcap), times softcap. Its tanh takes the place of
    the product, and softcap that of the scale.
    """
    if SIZES.softcap:
        return terms.scale * (2 * LOG2E / terms.softcap), terms.softcap * LOG2E
    else:
        return 1.0, terms.scale


@gluon.jit
def before_tokens(terms, head, real, scale, S_LAYOUT: gl.constexpr):
    """Largest product and sum of weights of rows that have seen no token, but may have a sink."""
    ROWS: gl.constexpr = gl.SliceLayout(1, S_LAYOUT)
    if terms.sinks is None:
        top = gl.full([GROUP_M], float("-inf"), gl.float32, ROWS)
        return top, gl.zeros([GROUP_M], gl.float32, ROWS)
    else:
        sink = gl.load(terms.sinks + head, mask=real, other=float("-inf")).to(gl.float32)
        top = gl.minimum(sink * (LOG2E / scale), LARGEST)
        return top, gl.where(top == float("-inf"), 0.0, 1.0)


@gluon.jit
def _weights(
    scores,
    position,  # [GROUP_M], of the queries
    start,
    window,
    scores_by,  # from `made`
    top,  # [GROUP_M], largest product so far, or tanh of one
    total,  # [GROUP_M], sum of weights so far
    dtype: gl.constexpr,
    MASKED: gl.constexpr,
    SIZES: gl.constexpr,
    S_LAYOUT: gl.constexpr,
    P_LAYOUT: gl.constexpr,
):
    """Weights of a tile, the factor of earlier sums, largest product and sum of weights."""
    growth, scale = scores_by
    if SIZES.softcap:
        # tanh(x) = 1 - 2 / (exp(2x) + 1), which does not overflow into NaN.
        scores = 1 - 2 / (gl.exp2(scores * growth) + 1)
    if MASKED:
        offs = gl.arange(0, SIZES.block_n, gl.SliceLayout(0, S_LAYOUT))
        token = gl.expand_dims(start + offs, 0)
        seen = token <= gl.expand_dims(position, 1)
        if SIZES.window:
            seen = seen & (token > gl.expand_dims(position - window, 1))
        scores = gl.where(seen, scores, float("-inf"))
    highest = gl.maximum(top, gl.max(scores, 1))
    level = highest * scale
    if MASKED:
        # A row that has seen nothing yet has no largest product: -inf minus -inf is NaN.
        level = gl.where(highest == float("-inf"), 0.0, level)
    weights = gl.exp2(scores * scale - gl.expand_dims(level, 1))
    fade = gl.exp2(top * scale - level)
    total = total * fade + gl.sum(weights, 1)
    return gl.convert_layout(weights.to(dtype), P_LAYOUT), fade, highest, total


@gluon.jit
def _steps(
    state,
    first_step,
    end_step,
    high,  # one past an item's last tile, which was the first step
    q,
    position,
    window,
    scores_by,
    rings,
    anchor,
    MASKED: gl.constexpr,
    SIZES: gl.constexpr,
    S_LAYOUT: gl.constexpr,
    O_LAYOUT: gl.constexpr,
):
    """Tiles of one kind: scores and weights of each, and sums of the tile before it."""
    weights, top, total, acc, count = state
    k_ring, v_ring, k_full, v_full, k_empty, v_empty = rings
    BLOCK_N: gl.constexpr = SIZES.block_n
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=O_LAYOUT, k_width=2)
    for at in range(first_step, end_step):
        place = count % SIZES.stages
        before = (count - 1) % SIZES.stages
        mbarrier.wait(k_full.index(place), count // SIZES.stages % 2)
        zeros = gl.zeros([GROUP_M, BLOCK_N], gl.float32, S_LAYOUT)
        keys = k_ring.index(place).permute((1, 0))
        scores = warpgroup_mma(q, keys, zeros, use_acc=False, is_async=True)
        mbarrier.wait(v_full.index(before), (count - 1) // SIZES.stages % 2)
        acc = warpgroup_mma(weights, v_ring.index(before), acc, is_async=True)
        scores = warpgroup_mma_wait(1, deps=[scores])
        barrier()
        mbarrier.arrive(k_empty.index(place), count=1)
        start = (high - 1 - at) * SIZES.block_n
        weights, fade, top, total = _weights(
            *(scores, position, start, window, scores_by, top, total),
            *(k_ring.dtype, MASKED, SIZES, S_LAYOUT, P_LAYOUT),
        )
        if not MASKED:
            # The wait depends on no weight, so ptxas would move it in front of them; but it does
            # not move it in front of a store.
            anchor.store(total)
        acc = warpgroup_mma_wait(0, deps=[acc])
        barrier()
        mbarrier.arrive(v_empty.index(before), count=1)
        acc = acc * gl.expand_dims(gl.convert_layout(fade, gl.SliceLayout(1, O_LAYOUT)), 1)
        count += 1
    return weights, top, total, acc, count


@gluon.jit
def attend(
    q,
    found,  # from `item`
    position,
    before,  # from `before_tokens`
    count,  # tiles attended before
    window,
    scores_by,
    rings,
    anchor,
    SIZES: gl.constexpr,
    LAYOUT: gl.constexpr,
    S_LAYOUT: gl.constexpr,
    O_LAYOUT: gl.constexpr,
):
    """All tiles of an item: sums, sum of weights, largest product, and tiles attended so far."""
    _, _, queries, first, begin, end, _ = found
    k_ring, v_ring, k_full, v_full, k_empty, v_empty = rings
    BLOCK_N: gl.constexpr = SIZES.block_n
    DIM: gl.constexpr = SIZES.head_dim
    P_LAYOUT: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=O_LAYOUT, k_width=2)
    low, high = tiles(begin, end, SIZES.block_n)
    place = count % SIZES.stages
    mbarrier.wait(k_full.index(place), count // SIZES.stages % 2)
    zeros = gl.zeros([GROUP_M, BLOCK_N], gl.float32, S_LAYOUT)
    keys = k_ring.index(place).permute((1, 0))
    scores = warpgroup_mma(q, keys, zeros, use_acc=False, is_async=True)
    scores = warpgroup_mma_wait(0, deps=[scores])
    barrier()
    mbarrier.arrive(k_empty.index(place), count=1)
    start = (high - 1) * SIZES.block_n
    top, total = before
    weights, _, top, total = _weights(
        *(scores, position, start, window, scores_by, top, total),
        *(k_ring.dtype, True, SIZES, S_LAYOUT, P_LAYOUT),
    )
    mbarrier.wait(v_full.index(place), count // SIZES.stages % 2)
    blank(v_ring.index(place), start, begin, end, LAYOUT, SIZES)
    acc = gl.zeros([GROUP_M, DIM], gl.float32, O_LAYOUT)
    state = weights, top, total, acc, count + 1

    # Steps count tiles from the last one on. All queries see all of the tiles between where the
    # last query's window begins and the first query's position.
    steps = high - low
    seen = high - gl.maximum(first + 1, 0) // SIZES.block_n
    seen = gl.minimum(gl.maximum(seen, 1), steps)
    edge = steps
    if SIZES.window:
        hidden = gl.cdiv(gl.maximum(first + queries - window, 0), SIZES.block_n)
        edge = gl.maximum(gl.minimum(steps, high - hidden), seen)
    tail = high, q, position, window, scores_by, rings, anchor
    state = _steps(state, 1, seen, *tail, True, SIZES, S_LAYOUT, O_LAYOUT)
    state = _steps(state, seen, edge, *tail, False, SIZES, S_LAYOUT, O_LAYOUT)
    if SIZES.window:
        state = _steps(state, edge, steps, *tail, True, SIZES, S_LAYOUT, O_LAYOUT)

    weights, top, total, acc, count = state
    place = (count - 1) % SIZES.stages
    mbarrier.wait(v_full.index(place), (count - 1) // SIZES.stages % 2)
    if SIZES.window:
        blank(v_ring.index(place), low * SIZES.block_n, begin, end, LAYOUT, SIZES)
    acc = warpgroup_mma(weights, v_ring.index(place), acc, is_async=True)
    acc = warpgroup_mma_wait(0, deps=[acc])
    barrier()
    mbarrier.arrive(v_empty.index(place), count=1)
    return acc, total, top, count
