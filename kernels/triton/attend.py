"""Device function: attention to a range of a row's tokens, the loop of all attention kernels.

Two facts decide speed here, both visible in compiled code (`benchmarks/kernel_report.py`): page ids
are loaded one tile before they are used, else the pipeline of K and V would be half as deep;
strides that touch pages are compile-time constants, else copies would be narrow and synchronous.

Queries and sums come in as many parts of the head dim as a word of K, or of V, holds elements
(`codes.py`): each part is a product of its own. Each scale is applied where it costs least: that of
fp8 to all scores, or all sums; a token's to its score, or its weight; only a channel's to each
element. Scales of tokens are too narrow for asynchronous copies: they are loaded a tile ahead, and
page ids two tiles.

V is masked as well as scores: a slot that nobody wrote may hold NaN, and 0 x NaN is NaN. In coded
pages only scales can be NaN.
"""

from __future__ import annotations

import triton
import triton.language as tl

from pagedkv.kernels import scoring

from .codes import by_channel, excess, raised, step_and_least, unit, unpack
from .tile import load_tile, page_ids, pages_of, place, times

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)
FARTHEST: tl.constexpr = tl.constexpr(scoring.FARTHEST)
INFINITE: tl.constexpr = tl.constexpr(3e38)  # stands for an infinite sink, whose distance is 0

# In all attention kernels `terms` is a `scoring.Terms`, and `KIND` the `scoring.ScoringKind` that
# they are compiled for.


@triton.jit
def before_tokens(terms, head, counted):
    """Largest score and sum of weights of rows that have seen no token, but may have a sink.

    Args:
        terms: of the scores.
        head: `[BLOCK_M]`, the head of each row's query.
        counted: `[BLOCK_M]`, whether a sink is counted here: it is, once for every query.
    """
    top = tl.full(head.shape, float("-inf"), tl.float32)
    total = tl.zeros(head.shape, tl.float32)
    if terms.sinks is not None:
        sink = tl.load(terms.sinks + head, mask=counted, other=float("-inf"))
        top = sink.to(tl.float32) * LOG2E
        top = tl.where(top == float("inf"), INFINITE, top)
        total = tl.where(top == float("-inf"), 0.0, 1.0)
    return top, total


@triton.jit
def natural(sums, SINKS: tl.constexpr):
    """The log-sum-exp of sums in powers of two."""
    if SINKS:  # which may be infinite
        return tl.where(sums >= INFINITE, float("inf"), sums * LN2)
    else:
        return sums * LN2


@triton.jit
def made(products, scale, terms, rows, token, KIND: tl.constexpr):
    """Scores, in powers of two, of products of queries and keys.

    Args:
        products: `[BLOCK_M, BLOCK_N]`.
        scale: the scale of `terms`, times scales of K; it broadcasts against products.
        terms: of the scores.
        rows: `[BLOCK_M]` each: positions and heads of the queries, their places among all queries
            and heads of the step, whether there is a query, and their bits of a tree if any.
        token: `[BLOCK_N]`, positions of the keys.
        KIND: which terms there are.
    """
    scores = products * scale
    if KIND.softcap:
        # tanh(x) = 1 - 2 / (exp(2x) + 1), which does not overflow into NaN.
        grown = tl.exp2(scores * (2 * LOG2E / terms.softcap))
        scores = terms.softcap * LOG2E * (1 - 2 / (grown + 1))
    if KIND.alibi_slopes is not None:
        slope = tl.load(terms.alibi_slopes + rows[1], mask=rows[3], other=0.0).to(tl.float32)
        away = (token[None, :] - rows[0][:, None]).to(tl.float32)
        scores += (slope * LOG2E)[:, None] * away
    if KIND.distance_bias is not None:
        # Offsets from the tile's first row are int32: addresses of all scores take registers.
        table = (rows[2] if KIND.by_query else rows[1]).to(tl.int64)
        first = tl.min(table, 0)
        begin = (table - first).to(tl.int32) * KIND.distances
        distance = rows[0][:, None] - token[None, :]
        near = rows[3][:, None] & (distance >= 0) & (distance < KIND.distances)
        bias = terms.distance_bias + first * KIND.distances
        added = tl.load(bias + (begin[:, None] + distance), mask=near, other=0.0)
        scores += added.to(tl.float32) * LOG2E
    if KIND.tree:
        back = tl.minimum(tl.maximum(rows[0][:, None] - token[None, :], 0), FARTHEST)
        seen = (((rows[4][:, None] >> back) & 1) != 0) | (back == FARTHEST)
        scores = tl.where(seen, scores, float("-inf"))
    return scores


@triton.jit
def token_scales(
    ptr,  # the KV head's first
    pages,
    in_page,
    inside,
    FORMAT: tl.constexpr,
    PAGE: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
):
    """Scales of a tile's tokens, zeros for those that are not inside, or have none."""
    if FORMAT.scales == "token":
        return tl.load(ptr + (pages * (NUM_KV_HEADS * PAGE) + in_page), mask=inside, other=0)
    else:
        return tl.zeros(in_page.shape, tl.float16)


@triton.jit
def scales_at(ptr, kv_head, FORMAT: tl.constexpr, HEAD_DIM: tl.constexpr, PAGE: tl.constexpr):
    """Where a KV head's scales begin; a step and its minimum are read as one."""
    if FORMAT.pairs:
        ptr = ptr.to(tl.pointer_type(tl.int32))
    if FORMAT.scales == "token":
        return ptr + kv_head * PAGE
    elif FORMAT.scales == "channel":
        return ptr + kv_head * HEAD_DIM
    else:
        tl.static_assert(FORMAT.static)
        return ptr + kv_head


@triton.jit
def attend(
    q,  # parts [BLOCK_M, K_BLOCK], as many as K has in a word
    rows,  # as in `made`
    top,  # [BLOCK_M], largest score so far, in powers of two
    total,  # [BLOCK_M], sum of weights so far
    acc,  # parts [BLOCK_M, V_BLOCK], as many as V has in a word
    kv_head,
    k_ptr,
    v_ptr,
    k_scales_ptr,
    v_scales_ptr,
    table_ptr,  # the row's page table
    first_staging,  # id of the first staging page
    begin,  # first token of the tiles' range
    end,  # one past its last
    window,
    terms,  # of the scores
    NUM_KV_HEADS: tl.constexpr,
    PAGE: tl.constexpr,
    K: tl.constexpr,
    V: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    PACKED: tl.constexpr,  # see `codes.unpack`
    STAGING: tl.constexpr,  # whether staging pages are `absent`, `skipped`, or what is `read`
    RAGGED: tl.constexpr,  # the range may end within a tile, or begin within one if windowed
    CAUSAL: tl.constexpr,  # some query of the tile may not see some token of the range
    HAS_WINDOW: tl.constexpr,
    KIND: tl.constexpr,  # which terms scores have
    # Where a row's chunk 0 goes, and whether it does, [BLOCK_M] each; and how far behind a chunk
    # its score goes. Not `()`, of which Triton 3.6 makes no tuple.
    notes=tl.tuple([]),  # noqa: B008
    CHUNK: tl.constexpr = 0,  # tokens of a chunk; 0 stores nothing
):
    """Attends to tokens `begin..end` of a KV head."""
    K_FORMAT: tl.constexpr = K.format
    V_FORMAT: tl.constexpr = V.format
    V_IS_K: tl.constexpr = K.rest != 0
    K_PARTS: tl.constexpr = len(q) - V_IS_K
    V_PARTS: tl.constexpr = len(acc)
    K_BLOCK: tl.constexpr = q[0].shape[1]
    V_BLOCK: tl.constexpr = acc[0].shape[1]
    K_WIDTH: tl.constexpr = K.dim // K_PARTS  # dense staging pages fall into parts like coded ones
    V_WIDTH: tl.constexpr = V.dim // V_PARTS
    dtype: tl.constexpr = q[0].dtype
    # Scales of tokens are loaded a tile ahead, and page ids two.
    AHEAD: tl.constexpr = K_FORMAT.scales == "token" or V_FORMAT.scales == "token"
    position = rows[0]
    scale = terms.scale
    MASKED: tl.constexpr = RAGGED or STAGING != "absent" or KIND.tree
    # Weights times scales of tokens need bfloat16's range, other weights float16's digits.
    V_DTYPE: tl.constexpr = (
        dtype
        if V_FORMAT.dense or dtype == tl.float32
        else tl.float16
        if V_FORMAT.static
        else tl.bfloat16
    )
    k_ptr += kv_head * K.stride_g
    v_ptr += kv_head * V.stride_g
    if not K_FORMAT.dense:
        k_scales_ptr = scales_at(k_scales_ptr, kv_head, K_FORMAT, K.dim, PAGE)
    if not V_FORMAT.dense:
        v_scales_ptr = scales_at(v_scales_ptr, kv_head, V_FORMAT, V.dim, PAGE)
    if K_FORMAT.static:
        scale *= tl.load(k_scales_ptr)
        if K_FORMAT.bias and dtype == tl.bfloat16:
            # Half of the unit goes to the queries: products would be too small for float32.
            root: tl.constexpr = 2.0 ** ((127 - K_FORMAT.bias) // 2)
            q = times(q, root)
            scale *= root
        else:
            scale *= unit(K_FORMAT, dtype)
    if K_FORMAT.scales == "channel" and dtype != tl.float32:
        # Scales are float16, so elements are, too, and a bfloat16 query may exceed its range.
        q, power = raised(q)
        scale = (power * scale)[:, None]
    v_unit = 1.0
    if V_FORMAT.static:
        v_unit = tl.load(v_scales_ptr) * unit(V_FORMAT, V_DTYPE)
        acc = times(acc, 1.0 / v_unit)
    minima = tl.zeros(total.shape, tl.float32)  # sums of weights times minima of tokens

    offs_n = tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, K_BLOCK)
    first = begin // BLOCK_N * BLOCK_N
    ids = page_ids(table_ptr, first, begin, end, PAGE, BLOCK_N, HAS_WINDOW)
    if AHEAD:
        # Carried as int64: the pipeliner gives up if an iteration hands a variable on unchanged.
        next_pages = pages_of(ids, first_staging, STAGING)
        at, slots, there = place(next_pages, first, begin, end, PAGE, STAGING, BLOCK_N, HAS_WINDOW)
        next_k = token_scales(k_scales_ptr, at, slots, there, K_FORMAT, PAGE, NUM_KV_HEADS)
        next_v = token_scales(v_scales_ptr, at, slots, there, V_FORMAT, PAGE, NUM_KV_HEADS)
        ids = page_ids(table_ptr, first + BLOCK_N, begin, end, PAGE, BLOCK_N, HAS_WINDOW)
    for start in tl.range(first, end, BLOCK_N, num_stages=STAGES):
        # The next tile's ids are fetched now, so that no load of K or V waits for one.
        following = start + BLOCK_N
        if AHEAD:
            pages, k_scales, v_scales = next_pages, next_k, next_v
            next_pages = pages_of(ids, first_staging, STAGING)
            at, slots, there = place(
                next_pages, following, begin, end, PAGE, STAGING, BLOCK_N, HAS_WINDOW
            )
            next_k = token_scales(k_scales_ptr, at, slots, there, K_FORMAT, PAGE, NUM_KV_HEADS)
            next_v = token_scales(v_scales_ptr, at, slots, there, V_FORMAT, PAGE, NUM_KV_HEADS)
            following += BLOCK_N
        else:
            pages = pages_of(ids, first_staging, STAGING)
        ids = page_ids(table_ptr, following, begin, end, PAGE, BLOCK_N, HAS_WINDOW)
        pages, in_page, inside = place(pages, start, begin, end, PAGE, STAGING, BLOCK_N, HAS_WINDOW)
        # Scores of K are masked later on, V must be zero where nothing was written.
        k = load_tile(
            *(k_ptr, pages * K.stride_n + in_page * K.stride_p),
            inside if MASKED and V_IS_K else None,
            *(K_PARTS if K_FORMAT.dense else 1, K_WIDTH, K_BLOCK, K.rest),
        )
        if V_IS_K:
            v = k
        else:
            v = load_tile(
                *(v_ptr, pages * V.stride_n + in_page * V.stride_p),
                inside if MASKED and V_FORMAT.dense else None,
                *(V_PARTS if V_FORMAT.dense else 1, V_WIDTH, V_BLOCK),
            )
        if not K_FORMAT.dense:
            k = unpack(k[0], K_FORMAT, q[0].dtype, PACKED)
        if not V_FORMAT.dense:
            v = unpack(v[0], V_FORMAT, V_DTYPE, PACKED)
        for part in tl.static_range(len(q)):
            keys = k[part]
            if K_FORMAT.scales == "channel":
                channel = pages * (NUM_KV_HEADS * K.dim) + part * K_WIDTH + offs_k
                pairs = tl.load(k_scales_ptr + channel, mask=offs_k < K_WIDTH, other=0)
                keys = by_channel(keys, pairs, PACKED)
            if part == 0:
                scores = tl.dot(q[part], tl.trans(keys), input_precision="ieee")
            else:
                scores = tl.dot(q[part], tl.trans(keys), scores, input_precision="ieee")
        token = start + offs_n
        if K_FORMAT.scales == "token":
            by_token = k_scales.to(tl.float32)[None, :] * scale
            scores = made(scores, by_token, terms, rows, token, KIND)
        else:
            scores = made(scores, scale, terms, rows, token, KIND)
        if MASKED:
            seen = inside[None, :]
            if CAUSAL:
                seen = seen & (token[None, :] <= position[:, None])
                if HAS_WINDOW:
                    seen = seen & (token[None, :] > position[:, None] - window)
            scores = tl.where(seen, scores, float("-inf"))
        highest = tl.maximum(top, tl.max(scores, 1))
        # A row that has seen nothing yet has no largest score: -inf minus -inf is NaN.
        level = tl.where(highest == float("-inf"), 0.0, highest) if MASKED else highest
        weights = tl.exp2(scores - level[:, None])
        fade = tl.exp2(top - level)
        total = total * fade + tl.sum(weights, 1)
        if CHUNK:
            CHUNKS: tl.constexpr = BLOCK_N // CHUNK
            by_chunk = tl.sum(tl.reshape(weights, [weights.shape[0], CHUNKS, CHUNK]), 2)
            chunk = start // CHUNK + tl.arange(0, CHUNKS)
            kept = chunk * CHUNK < end
            if STAGING != "absent":
                kept = tl.max(tl.reshape(inside.to(tl.int32), [CHUNKS, CHUNK]), 1) > 0
            kept = notes[1][:, None] & kept[None, :]
            to = notes[0][:, None] + chunk[None, :]
            tl.store(to, by_chunk, mask=kept)
            tl.store(to + notes[2], tl.broadcast_to(level[:, None], by_chunk.shape), mask=kept)
        if V_FORMAT.scales == "token" and not V_FORMAT.pairs:
            weights *= v_scales.to(tl.float32)[None, :]
        if V_FORMAT.pairs:
            step, least = step_and_least(v_scales)
            stepped = (weights * step[None, :]).to(V_DTYPE)
            # Codes are too large by `excess`: so many times the same weights are taken off.
            rest = weights * least[None, :] - excess(V_FORMAT) * stepped.to(tl.float32)
            minima = minima * fade + tl.sum(rest, 1)
            weights = stepped
        weights = weights.to(V_DTYPE)
        acc = times(acc, fade[:, None])
        summed = tl.tuple([])
        for part in tl.static_range(V_PARTS):
            summed += (tl.dot(weights, v[part], acc[part], input_precision="ieee"),)
        acc = summed
        top = highest
    if V_FORMAT.static:
        acc = times(acc, v_unit)
    if V_FORMAT.pairs:
        summed = tl.tuple([])
        for part in tl.static_range(V_PARTS):
            summed += (acc[part] + minima[:, None],)
        acc = summed
    return top, total, acc


# As in tile.py: hashed once, in one order.
for _function in (before_tokens, natural, made, token_scales, scales_at, attend):
    getattr(_function, "cache_key", None)
