"""Measures how much attention each page gets from its row's last queries, to rank pages by it.

    mass[b, c] = sum over queries, mean over heads, of softmax(q k^T * scale) over the slots of c

Attention does not keep its weights, so the scores of these few queries are computed anew: on the
torch backend for all queries, on Triton for queries that its decode kernel does not watch
(`triton/page_mass.py`).
Bytes read per call: K of every slot of the rows watched.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from pagedkv.kernels.formats import Pages
from pagedkv.kernels.prefixes import Ints
from pagedkv.kernels.scoring import Scoring
from pagedkv.kernels.sending import sent

from . import page_coding as coded

# Bytes of float32 K of rows that are watched together: as many as `buckets.BUCKET_BYTES`, because
# here, too, gathered keys are read again from the processor's cache. Not measured here.
BATCH_BYTES = 8 << 20


def page_mass(
    q: Tensor,
    k_pages: Tensor | Pages,
    page_table: Tensor,
    new: Ints,
    kv_lens: Ints,
    queries: Ints,
    scoring: Scoring,
) -> Tensor:
    """Measures the attention mass of every page of a step's rows; the step's keys are written.

    Args:
        q: `[T, H, D]`, the new tokens, row after row.
        k_pages: `[N, G, P, D]`, or pages of another format.
        page_table: `[B, columns]`.
        new, kv_lens, queries: `[B]` on the host: tokens each row adds, slots it holds with them,
            and how many of its last new tokens are watched.

    Returns:
        `[B, columns]` float32; a row's sum is its `queries`, less the mass of sinks.
    """
    mass = q.new_zeros(page_table.shape, dtype=torch.float32)
    count, heads, size, dim = k_pages.shape
    ends = np.cumsum(new)
    most = max(1, BATCH_BYTES // (4 * heads * dim))
    for rows in _batches(queries, kv_lens, most):
        n, longest = int(queries[rows[0]]), int(kv_lens[rows].max())
        columns = -(-longest // size)
        at = sent(rows, q.device)
        tokens = sent((ends[rows] - n)[:, None] + np.arange(n), q.device)
        ids = page_table[at, :columns].clamp(0, count - 1).flatten()
        keys = _read(k_pages, ids).view(len(rows), columns * size, heads, dim)
        by_head = q[tokens].float().unflatten(2, (heads, -1)).permute(0, 2, 3, 1, 4).flatten(2, 3)
        # Head by head, so that the products do not copy K once more.
        each = [by_head[:, g] @ keys[:, :, g].transpose(1, 2) for g in range(heads)]
        products = torch.stack(each, 1).unflatten(2, (-1, n))  # [b, G, r, n, slots]
        last = sent((kv_lens[rows] - n)[:, None] + np.arange(n), q.device)
        slot = torch.arange(columns * size, device=q.device)
        query = last[:, None, None, :, None]
        scores = scoring.scores(products, query, slot)
        scores = scores.masked_fill_(scoring.hidden(query, slot), -math.inf).flatten(1, 2)
        weights = _softmax(scores, scoring.sinks).mean(1).sum(1)  # [b, slots]
        mass[at, :columns] = weights.unflatten(1, (columns, size)).sum(2)
    return mass


def _read(k_pages: Tensor | Pages, ids: Tensor) -> Tensor:
    """Returns keys of pages in float32: `[n, P, G, D]`, contiguous."""
    if isinstance(k_pages, Pages):
        return coded.read_pages(k_pages, ids, torch.float32).transpose(1, 2).float().contiguous()
    by_slot = k_pages.transpose(1, 2)
    if by_slot.is_contiguous():
        return by_slot.index_select(0, ids).float()
    return k_pages[ids].transpose(1, 2).float().contiguous()


def _softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    if sinks is None:
        return scores.softmax(-1)
    sums = torch.logaddexp(scores.logsumexp(-1), sinks.float()[None, :, None])
    return (scores - sums.unsqueeze(-1)).exp()


def _batches(queries: Ints, kv_lens: Ints, most: int) -> list[Ints]:
    """Batches rows with equally many queries, while rows times the longest one is small."""
    batches: list[list[int]] = []
    longest = 0
    for row in np.lexsort((kv_lens, queries)).tolist():
        if not queries[row]:
            continue
        longest = int(kv_lens[row])  # ascending
        batch = batches[-1] if batches else []
        if batch and queries[batch[0]] == queries[row] and longest * (len(batch) + 1) <= most:
            batch.append(row)
        else:
            batches.append([row])
    return [np.asarray(batch) for batch in batches]
