"""The mathematics, on one page: a plain-torch twin of every launcher.

Slow and obvious on purpose. Tests hold the other implementations against these functions; pass
float64 tensors for the truth. Shapes and symbols are those of `docs/notation.md`; page tensors are
logical `[N, G, P, D]`, whatever lies behind their strides.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def write_kv(k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, slots: Tensor) -> None:
    """Writes token t of `k` and `v` `[T, G, D]` to slot `slots[t]`, in place; -1 writes nothing."""
    page_size = k_pages.shape[2]
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            k_pages[slot // page_size, :, slot % page_size] = k[token]
            v_pages[slot // page_size, :, slot % page_size] = v[token]


def copy_pages(pages: Tensor, source: Tensor, target: Tensor, into: Tensor | None = None) -> None:
    """Copies whole pages of all layers of `[L, N, G, P, D]`, in place or `into` another storage."""
    (pages if into is None else into)[:, target] = pages[:, source].clone()


def gather_pages(pages: Tensor, page_ids: Tensor, begin: int, end: int) -> Tensor:
    """The tokens in slots `begin..end` of a row of pages: `[end - begin, G, D]`, a copy."""
    rows = pages[page_ids.long()]  # [n, G, P, D]
    return rows.transpose(1, 2).reshape(-1, pages.shape[1], pages.shape[3])[begin:end].clone()


def paged_attention(
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    kv_lens: Tensor,
    query_start_loc: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Causal attention of every row's new tokens over the row's pages.

    Row b owns queries `query_start_loc[b] .. query_start_loc[b + 1]`, the last of its
    `kv_lens[b]` tokens. A query at position i sees positions j with `i - window < j <= i`.

    Args:
        q: `[T, H, D]`.
        page_table: `[B, max_pages]`, int. Entries that no visible position needs are not read.
        kv_lens: `[B]`, int, tokens. Counts the new ones.
        query_start_loc: `[B + 1]`, int.
        sinks: `[H]`, a score per head that takes its share of the weights and has no value.

    Returns:
        Output `[T, H, D]` in the dtype of `q`, and the log-sum-exp of the scores, the sink's
        included, `[T, H]` in float32 (float64 for float64 input). A query without keys gives zeros
        and -inf, or its sink.
    """
    exact = torch.float64 if q.dtype == torch.float64 else torch.float32
    out = torch.zeros_like(q)
    none = torch.full(q.shape[1:2], -math.inf, dtype=exact, device=q.device)
    sink = none if sinks is None else sinks.to(exact)
    lse = sink.expand(q.shape[:2]).clone()
    group_size = q.shape[1] // k_pages.shape[1]
    page_size = k_pages.shape[2]
    for row, kv_len in enumerate(kv_lens.tolist()):
        start, stop = query_start_loc[row : row + 2].tolist()
        for token in range(start, stop):
            last = kv_len - (stop - token)  # position of this query
            first = 0 if window is None else max(0, last - window + 1)
            if last < first:
                continue
            ids = page_table[row, first // page_size : last // page_size + 1]
            begin = first % page_size
            k = gather_pages(k_pages, ids, begin, begin + last - first + 1).to(exact)
            v = gather_pages(v_pages, ids, begin, begin + last - first + 1).to(exact)
            k = k.repeat_interleave(group_size, dim=1)  # [n, H, D]
            v = v.repeat_interleave(group_size, dim=1)
            scores = torch.einsum("hd,nhd->hn", q[token].to(exact), k) * scale
            if softcap is not None:
                scores = softcap * torch.tanh(scores / softcap)
            lse[token] = torch.logaddexp(scores.logsumexp(-1), sink)
            weights = (scores - lse[token, :, None]).exp()
            out[token] = torch.einsum("hn,nhd->hd", weights, v).to(q.dtype)
    return out, lse
