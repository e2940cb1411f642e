"""Device functions: page ids one tile ahead, K and V tiles out of pages, the online softmax.

Three facts decide speed here, all visible in compiled code (`benchmarks/kernel_report.py`): page
ids are loaded one tile before they are used, or the pipeline of K and V is half as deep; strides
that touch pages are compile-time constants, or copies are narrow and synchronous; page ids become
int64 before they are multiplied, or a pool beyond 2^31 elements is read elsewhere.

No load leaves a page: ids of tokens out of range are replaced before they are used. V is masked as
well as scores: a slot that nobody wrote may hold NaN, and 0 x NaN is NaN.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E: tl.constexpr = tl.constexpr(1.4426950408889634)
LN2: tl.constexpr = tl.constexpr(0.6931471805599453)


@triton.jit
def page_ids(
    table_ptr,
    start,
    begin,
    end,
    PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):
    """Pages of the tile at `start`: one id where a page holds whole tiles, else one a token.

    Tokens outside the range get page 0, which can be read like any other.
    """
    if PAGE % BLOCK_N == 0:
        return tl.load(table_ptr + start // PAGE, mask=start < end, other=0)
    else:
        offs_n = tl.arange(0, BLOCK_N)
        mask = start + offs_n < end
        if HAS_WINDOW:
            mask = mask & (start + offs_n >= begin)
        if BLOCK_N % PAGE == 0:
            return tl.load(table_ptr + start // PAGE + offs_n // PAGE, mask=mask, other=0)
        else:
            return tl.load(table_ptr + (start + offs_n) // PAGE, mask=mask, other=0)


@triton.jit
def attend(
    q,  # [BLOCK_M, BLOCK_D]
    position,  # [BLOCK_M], of each row's query in its text
    top,  # [BLOCK_M], largest score so far, in powers of two
    total,  # [BLOCK_M], sum of weights so far
    acc,  # [BLOCK_M, BLOCK_D]
    k_ptr,
    v_ptr,
    table_ptr,  # the row's page table
    begin,  # first token of the tiles' range
    end,  # one past its last
    window,
    scale,  # of the scores, times log2(e) unless there is a softcap
    softcap,
    HEAD_DIM: tl.constexpr,
    PAGE: tl.constexpr,
    STRIDE_N: tl.constexpr,
    STRIDE_P: tl.constexpr,
    BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr,
    RAGGED: tl.constexpr,  # the range may end within a tile, or begin within one if windowed
    CAUSAL: tl.constexpr,  # some query of the tile may not see some token of the range
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
):
    """Attends to tokens `begin..end`; `k_ptr` and `v_ptr` point at the KV head's first slot."""
    BLOCK_D: tl.constexpr = q.shape[1]
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    first = begin // BLOCK_N * BLOCK_N
    ids = page_ids(table_ptr, first, begin, end, PAGE, BLOCK_N, HAS_WINDOW)
    for start in tl.range(first, end, BLOCK_N, num_stages=STAGES):
        if PAGE % BLOCK_N == 0:
            in_page = start % PAGE + offs_n
        elif BLOCK_N % PAGE == 0:
            in_page = offs_n % PAGE
        else:
            in_page = (start + offs_n) % PAGE
        offsets = ids.to(tl.int64) * STRIDE_N + in_page * STRIDE_P  # [BLOCK_N]
        offsets = offsets[:, None] + offs_d[None, :]
        # The next tile's ids are fetched now, so that no load of K or V waits for one.
        ids = page_ids(table_ptr, start + BLOCK_N, begin, end, PAGE, BLOCK_N, HAS_WINDOW)
        inside = start + offs_n < end
        if HAS_WINDOW:
            inside = inside & (start + offs_n >= begin)
        # Scores of K are masked later on, V must be zero where nothing was written.
        if BLOCK_D != HEAD_DIM:
            real = (offs_d < HEAD_DIM)[None, :]
            k = tl.load(k_ptr + offsets, mask=real, other=0.0)
            v = tl.load(v_ptr + offsets, mask=inside[:, None] & real if RAGGED else real, other=0.0)
        elif RAGGED:
            k = tl.load(k_ptr + offsets)
            v = tl.load(v_ptr + offsets, mask=inside[:, None], other=0.0)
        else:
            k = tl.load(k_ptr + offsets)
            v = tl.load(v_ptr + offsets)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if HAS_SOFTCAP:
            # tanh(x) = 1 - 2 / (exp(2x) + 1), which does not overflow into NaN.
            grown = tl.exp2(scores * (2 * LOG2E / softcap))
            scores = softcap * LOG2E * (1 - 2 / (grown + 1))
        if RAGGED:
            seen = inside[None, :]
            if CAUSAL:
                token = start + offs_n
                seen = seen & (token[None, :] <= position[:, None])
                if HAS_WINDOW:
                    seen = seen & (token[None, :] > position[:, None] - window)
            scores = tl.where(seen, scores, float("-inf"))
        highest = tl.maximum(top, tl.max(scores, 1))
        # A row that has seen nothing yet has no largest score: -inf minus -inf is NaN.
        level = tl.where(highest == float("-inf"), 0.0, highest) if RAGGED else highest
        weights = tl.exp2(scores - level[:, None])
        fade = tl.exp2(top - level)
        total = total * fade + tl.sum(weights, 1)
        acc = acc * fade[:, None]
        acc = tl.dot(weights.to(v.dtype), v, acc, input_precision="ieee")
        top = highest
    return top, total, acc


# Triton hashes a kernel with the functions it calls, and the hash depends on whether these were
# hashed before. In this order a kernel has one hash, whoever compiles it: caches on disk are found.
for _function in (page_ids, attend):
    getattr(_function, "cache_key", None)  # the interpreter's have none
