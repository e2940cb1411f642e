"""Attention over a caller's own pages: carries out a checked call in each backend."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pagedkv.kernels.scoring import Scoring

from .own_plan import AttentionPlan


class OwnCall(NamedTuple):
    """A checked call: packed queries, and pages as `[N, G, P, D]` with any strides."""

    q: Tensor
    k_pages: Tensor
    v_pages: Tensor
    plan: AttentionPlan
    scoring: Scoring
    causal: bool
    return_lse: bool
    out: Tensor | None
    lse: Tensor | None


def _by_triton(call: OwnCall) -> tuple[Tensor, Tensor]:
    from pagedkv.kernels.triton import backend as kernels
    from pagedkv.kernels.triton.geometry import Geometry
    from pagedkv.kernels.triton.launch import check_aligned

    q, k, v, plan, scoring, causal, _, out, lse = call
    geometry, window = Geometry.of(q, k, v), scoring.window
    tensors = q, k, v, plan.page_table, plan.cache_seqlens, plan.cu_seqlens_q
    check_aligned(out=out, lse=lse)
    if not plan.num_tokens:
        return _nothing(call)

    def cut() -> Any:
        bounds = {"num_new": plan.num_new.tolist(), "max_kv": plan.max_seqlen_k}
        return kernels.plan(*tensors[4:], q, k, v, **bounds, window=window, causal=causal)

    work = plan.once(("triton", geometry, window, causal), cut)
    kernels.check_call(*tensors, geometry, scoring)
    return kernels.attend(*tensors, work, scoring, out=out, lse=lse)


def _by_c(call: OwnCall) -> tuple[Tensor, Tensor]:
    from pagedkv.kernels.c import backend as kernels

    q, k, v, plan, scoring, causal, return_lse, out, lse = call
    assert plan.lens is not None
    rows = plan.page_table, plan.num_new, plan.lens
    given = q, k, v, *rows, scoring
    return kernels.paged_attention(*given, return_lse=return_lse, causal=causal, out=out, lse=lse)


def _by_torch(call: OwnCall) -> tuple[Tensor, Tensor]:
    """Attends for the queries that see a token; torch's products take no other rows."""
    from pagedkv.kernels.torch import backend as kernels
    from pagedkv.kernels.torch.buckets import cut_step, scratch_elements

    q, k, v, plan, scoring, causal, return_lse, out, lse = call
    lens, new = plan.lens, plan.num_new
    assert lens is not None
    heads, dims = k.shape[1], (k.shape[3], v.shape[3])

    def cut() -> Any:
        sees = np.minimum(new, lens) if causal else np.where(lens > 0, new, 0)
        rows = np.flatnonzero(sees)
        tokens = None
        if (sees < new).any():
            ends = np.cumsum(new)
            seeing = [np.arange(ends[row] - sees[row], ends[row]) for row in rows]
            tokens = torch.from_numpy(np.concatenate([*seeing, np.empty(0, np.int64)]))
            tokens = tokens.to(plan.device)
        one = heads * sum(dims) * q.element_size()
        each = sees[rows], lens[rows], plan.page_size, scoring.window, one
        buckets = cut_step(*each, exact=False, causal=causal)
        elements = scratch_elements(buckets, heads * max(dims), plan.page_size)
        with torch.inference_mode(False):  # so that calls outside of the mode can write there
            scratch = q.new_empty(2, elements)
        return plan.page_table[torch.from_numpy(rows).to(plan.device)], tokens, buckets, scratch

    key = "torch", scoring.window, causal, len(k), heads, dims, q.dtype
    table, tokens, *work = plan.once(key, cut)
    given, bias = q, scoring.distance_bias
    if tokens is not None:
        given = q[tokens]
        scoring = scoring._replace(distance_bias=None if bias is None else bias[tokens])
    found = kernels.paged_attention(
        *(given, None, None, k, v, table, *work, scoring), return_lse=return_lse
    )
    if tokens is not None:
        result, sums = _nothing(call)
        result[tokens] = found[0]
        if return_lse:
            sums[tokens] = found[1]
        return result, sums
    result, sums = found
    return result if out is None else out.copy_(result), sums if lse is None else lse.copy_(sums)


def _nothing(call: OwnCall) -> tuple[Tensor, Tensor]:
    """Returns the results of queries that see no token."""
    q, out, lse = call.q, call.out, call.lse
    out = q.new_empty(*q.shape[:2], call.v_pages.shape[3]) if out is None else out
    lse = q.new_empty(q.shape[:2], dtype=torch.float32) if lse is None else lse
    sinks = call.scoring.sinks
    lse.copy_(torch.full_like(lse, -torch.inf) if sinks is None else sinks.expand_as(lse))
    return out.zero_(), lse


BACKENDS = {"triton": _by_triton, "c": _by_c, "torch": _by_torch}
