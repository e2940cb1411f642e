"""The torch backend: gather pages into scratch, then let SDPA attend over plain tensors.

It runs wherever torch does. The buckets of a step (`buckets.py`) are gathered and attended in turn,
so that scratch stays small and warm. Decoding rows that begin with the same pages attend to these
together (`cascade.py`). Slots that a row may not see never enter its product: a bucket of equally
long rows is cut to the exact length; in a ragged one the slots beyond a row's end are zeroed before
the mask, because 0 x NaN is NaN.

Bytes moved per decode step and layer: K and V of every visible token, read from the pages, written
to scratch and read again by SDPA.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from pagedkv.kernels.formats import Pages, is_view_of_k
from pagedkv.kernels.scoring import Scoring

from . import cascade
from . import page_coding as coded
from . import select_pages as sparse
from .buckets import Bucket
from .gather import gather
from .page_coding import decode_pages as decode_pages
from .page_coding import encode_pages as encode_pages
from .page_coding import write_pages as write_pages
from .sdpa import attend, is_fine, unmoved, without_cudnn

MASK_ELEMENTS = 1 << 23  # a prefill over a long prefix makes masks of blocks of queries this large


def write_kv(
    k: Tensor, v: Tensor, k_pages: Tensor | Pages, v_pages: Tensor | Pages, slots: Tensor
) -> None:
    """Twin of `reference.write_kv`, for slots that are all >= 0."""
    if isinstance(k_pages, Pages) and isinstance(v_pages, Pages):
        coded.write_kv(k, v, k_pages, v_pages, slots)
        return
    assert isinstance(k_pages, Tensor)
    assert isinstance(v_pages, Tensor)
    written = [(k, k_pages)] if is_view_of_k(k_pages, v_pages) else [(k, k_pages), (v, v_pages)]
    for new, pages in written:
        by_slot = pages.transpose(1, 2)  # [N, P, G, D]
        if by_slot.is_contiguous():
            by_slot.flatten(2).flatten(0, 1).index_copy_(0, slots, new.flatten(1))
        else:
            pages[slots // pages.shape[2], :, slots % pages.shape[2]] = new


def copy_pages(pages: Tensor, source: Tensor, target: Tensor) -> None:
    """Twin of `reference.copy_pages`; sources and targets are distinct."""
    by_slot = pages.transpose(2, 3)
    pages = by_slot if by_slot.is_contiguous() else pages  # a strided copy is 1000 times slower
    pages.index_copy_(1, target, pages.index_select(1, source))


def paged_attention(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    k_pages: Tensor | Pages,
    v_pages: Tensor | Pages,
    page_table: Tensor,
    buckets: list[Bucket],
    scratch: Tensor,
    scoring: Scoring,
    *,
    return_lse: bool = False,
    bounds: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention as in `reference.paged_attention`, after K and V of the step were written.

    Args:
        q, k, v: `[T, H, D]` and `[T, G, D]`, the new tokens; D of V may differ. K and V may be None
            if no bucket is fresh.
        buckets: from `buckets.cut_step`, the same for every layer of a group.
        scratch: `[2, elements]`, at least `buckets.scratch_elements(...)`.
        bounds: `[N, G, D, 2]`, bounds of pages' keys, if some rows read only chosen pages.

    Returns:
        `[T, H, D]`, and the log-sum-exp `[T, H]`, empty unless asked for or needed for sinks.
    """
    place = q.device.type
    if torch.is_autocast_enabled(place):
        given = (q, k, v, k_pages, v_pages, page_table, buckets, scratch, scoring)
        with torch.autocast(place, enabled=False):  # it would round the products of float32
            return paged_attention(*given, return_lse=return_lse, bounds=bounds)
    out = q.new_empty(*q.shape[:2], v_pages.shape[3])
    sinks = scoring.sinks
    return_lse |= sinks is not None
    lse = q.new_empty(q.shape[:2] if return_lse else 0, dtype=torch.float32)
    pages = k_pages, v_pages, page_table
    prefix, front = None, (q, q)
    with without_cudnn(q.device):
        for bucket in buckets:
            if bucket.prefix is not None and bucket.prefix is not prefix:
                prefix = bucket.prefix
                by_head = q[prefix.tokens].unflatten(1, (k_pages.shape[1], -1))
                parts = gather(*pages, prefix, scratch)
                front = cascade.attend_prefix(by_head, *parts, scoring.scale)
            result, sums = _attend_bucket(
                *(q, k, v, *pages, bucket, scratch),
                *(front, bounds, scoring, return_lse),
            )
            out[bucket.tokens] = result.transpose(1, 2).flatten(0, 1)
            if sums is not None and return_lse:
                lse[bucket.tokens] = sums.transpose(1, 2).flatten(0, 1)
    if sinks is not None:
        # A sink is one more score in every sum, without a value.
        without, lse = lse, torch.logaddexp(lse, sinks.float())
        out = (out.float() * (without - lse).exp().unsqueeze(-1)).to(q.dtype)
    return out, lse


def _attend_bucket(
    q: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    k_pages: Tensor | Pages,
    v_pages: Tensor | Pages,
    page_table: Tensor,
    bucket: Bucket,
    scratch: Tensor,
    front: tuple[Tensor, Tensor],
    bounds: Tensor | None,
    scoring: Scoring,
    return_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    """Attends for one bucket's rows: `[n, H, new, D]`, and the LSE `[n, H, new]` if asked for.

    Args:
        front: the result of `cascade.attend_prefix` for all rows of the bucket's prefix.
    """
    pages = k_pages, v_pages, page_table
    queries = _by_row(q, bucket)
    if scoring.distance_bias is not None:
        scoring = scoring._replace(distance_bias=_by_row(scoring.distance_bias, bucket))
    if bucket.read:
        assert bounds is not None
        return _attend_chosen(queries, *pages, bounds, bucket, scoring, return_lse)
    if bucket.fresh:
        assert k is not None
        assert v is not None
        keys, values = _by_row(k, bucket), _by_row(v, bucket)
    else:
        keys, values = gather(*pages, bucket, scratch)
    if bucket.prefix is not None:
        parts = queries, keys, values, bucket, bucket.prefix, front
        return _behind_prefix(*parts, scoring), None
    return _attend(queries, keys, values, bucket, scoring, return_lse)


def _by_row(x: Tensor, bucket: Bucket) -> Tensor:
    """Returns a bucket's new tokens by row: `[n, H or G, new, D]`, a view."""
    return x[bucket.tokens].unflatten(0, (bucket.count, bucket.new)).transpose(1, 2)


def _behind_prefix(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bucket: Bucket,
    prefix: Bucket,
    front: tuple[Tensor, Tensor],
    scoring: Scoring,
) -> Tensor:
    """Attends for decoding rows to tokens behind their prefix, and merges the prefix's part."""
    n, heads, _, dim = q.shape
    mask = None if bucket.lengths is None else _mask(bucket, 0, 1, scoring, q)
    own = cascade.attend(q.reshape(n, k.shape[1], -1, dim), k, v, mask, scoring.scale)
    first = prefix.tokens.start
    mine = slice(bucket.tokens.start - first, bucket.tokens.stop - first)
    return cascade.merge(*own, front[0][mine], front[1][mine]).reshape(n, heads, 1, -1)


def _attend_chosen(
    q: Tensor,
    k_pages: Tensor | Pages,
    v_pages: Tensor | Pages,
    page_table: Tensor,
    bounds: Tensor,
    bucket: Bucket,
    scoring: Scoring,
    return_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    """Attends for decoding rows, `[n, H, 1, D]`, to the pages that their queries choose."""
    size = k_pages.shape[2]
    ids = page_table[bucket.rows, : bucket.num_pages].long()
    lengths = np.full(bucket.count, bucket.length) if bucket.lengths is None else bucket.lengths
    lens = torch.from_numpy(lengths).to(q.device)
    scores = sparse.score_columns(q.squeeze(2), bounds, ids, lens, size)
    columns = sparse.choose_columns(scores, bucket.read)
    query, token = lens[:, None, None] - 1, sparse.slots_of(columns, size)
    hidden = scoring.hidden(query, token)
    k, v = (sparse.read_chosen(x, ids, columns, hidden, q.dtype) for x in (k_pages, v_pages))
    mask = torch.zeros(hidden.shape, dtype=q.dtype, device=q.device)
    mask = mask.masked_fill_(hidden, -math.inf).unsqueeze(2)
    if return_lse or not scoring.plain:
        places = query[..., None, None], token[:, :, None, None]
        return _products(q, k, v, mask, scoring, *places)
    rows = q.reshape(q.shape[0], k.shape[1], -1, q.shape[3])
    out = attend(rows, k, v, scoring.scale, mask=mask)
    return out.reshape(*q.shape[:3], -1), None


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bucket: Bucket,
    scoring: Scoring,
    return_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    """Attends over plain tensors: `[n, H, new, D]`, and the LSE `[n, H, new]` if asked for."""
    scale, window = scoring.scale, scoring.window
    plain = scoring.plain and not return_lse
    limits = window is not None and bucket.new > 1 and bucket.length > window
    limits |= scoring.tree is not None
    if plain and bucket.new == 1:
        # The H / G queries of a KV head are rows of one product, which reads K and V once.
        n, heads, _, dim = q.shape
        rows = q.reshape(n, k.shape[1], heads // k.shape[1], dim)
        mask = None if bucket.lengths is None else _mask(bucket, 0, 1, scoring, q)
        out = attend(rows, k, v, scale, mask=mask)
        return out.reshape(n, heads, 1, -1), None
    if plain and (not bucket.causal or (bucket.new == bucket.length and not limits)):
        return attend(q, k, v, scale, causal=bucket.causal), None
    elements = bucket.length if plain else bucket.length * q.shape[0] * q.shape[1]
    block = max(1, MASK_ELEMENTS // elements)
    parts: list[tuple[Tensor, Tensor | None]] = []
    for start in range(0, bucket.new, block):
        stop = min(start + block, bucket.new)
        mask = _mask(bucket, start, stop, scoring, q)
        queries = q[:, :, start:stop]
        if plain:
            parts.append((attend(queries, k, v, scale, mask=mask), None))
        else:
            query, token = _places(bucket, start, stop, q.device)
            terms = scoring
            if scoring.distance_bias is not None:
                terms = scoring._replace(distance_bias=scoring.distance_bias[:, :, start:stop])
            parts.append(_products(queries, k, v, mask, terms, query[:, None, None], token))
    out = parts[0][0] if len(parts) == 1 else torch.cat([part for part, _ in parts], dim=2)
    sums = [lse for _, lse in parts if lse is not None]
    return out, torch.cat(sums, dim=2) if sums else None


def _products(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor,
    scoring: Scoring,
    query: Tensor,
    token: Tensor,
) -> tuple[Tensor, Tensor]:
    """Attends by explicit products in float32, if SDPA lacks a term or does not return the LSE.

    Args:
        query, token: as in `Scoring.scores`.
    """
    n, heads, new, dim = q.shape
    groups = k.shape[1]
    rows = q.float().reshape(n, groups, heads // groups * new, dim)

    def attended(k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        products = (rows @ k.float().transpose(2, 3)).view(n, groups, heads // groups, new, -1)
        # The mask is added, because this is several times faster than filling.
        scores = scoring.scores(products, query, token).add_(mask.float().unsqueeze(2))
        lse = scores.logsumexp(-1)
        weights = scores.softmax(-1).view(n, groups, heads // groups * new, -1)
        out = (weights @ v.float()).view(n, heads, new, -1).to(q.dtype)
        return out, lse.view(n, heads, new)

    out, lse = attended(k, v)
    return (out, lse) if is_fine(out) else unmoved(attended, k, v, mask)


def _places(bucket: Bucket, start: int, stop: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns places of queries `start..stop`, `[n or 1, stop - start, 1]`, and of all slots."""
    if not bucket.causal and bucket.lengths is None:
        query = torch.full((1, stop - start, 1), bucket.length - 1, device=device)
    elif bucket.lengths is None:
        query = bucket.length - bucket.new + torch.arange(start, stop, device=device)[None, :, None]
    else:
        query = torch.from_numpy(bucket.lengths).to(device)[:, None, None] - 1  # one query a row
    return query, torch.arange(bucket.length, device=device)


def _mask(bucket: Bucket, start: int, stop: int, scoring: Scoring, q: Tensor) -> Tensor:
    """Makes an additive mask that hides slots from queries `start..stop` of a bucket.

    Returns:
        `[n or 1, 1, stop - start, length]`. No row hides everything: every query sees at least
        itself.
    """
    mask = bucket.masks.get((start, q.dtype)) if scoring.tree is None else None
    if mask is None:
        tree = scoring.tree
        if tree is not None:
            tree = tree[bucket.tokens].view(-1, bucket.new, 1)[:, start:stop]
        hidden = scoring.hidden(*_places(bucket, start, stop, q.device), tree).unsqueeze(1)
        mask = torch.zeros(hidden.shape, dtype=q.dtype, device=q.device)
        mask.masked_fill_(hidden, -math.inf)
        if start == 0 and stop == bucket.new and tree is None:
            # The whole mask is one block, which all layers can use, so it is kept.
            bucket.masks[(start, q.dtype)] = mask
    return mask
