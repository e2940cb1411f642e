"""The torch backend: gather pages into scratch, then let SDPA attend over plain tensors.

It runs wherever torch does. `plan`, run once a step on the host, cuts the batch into buckets of
neighbouring rows whose keys fit the cache of the processor together; each is gathered and attended
in turn, so that scratch stays small and warm. Decoding rows that begin with the same pages attend
to those in one piece (`cascade.py`). What a row may not see never enters its product: a
bucket of equal rows is cut to the exact length, in a ragged one the slots beyond a row's end are
zeroed before the mask, because 0 x NaN is NaN.

Bytes moved per decode step and layer: K and V of every visible token, read from the pages, written
to scratch and read again by SDPA.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from . import cascade

Ints = npt.NDArray[np.int64]

# One bucket's K and V, measured on 2 x AMD EPYC (1 MB L2, 32 MB L3), 9/3 heads of 64, fp32: 16
# rows of 1024 take 2.4 ms in buckets of 6 MB and 4.0 ms in one go (2026-11-21, docs/kernels.md).
BUCKET_BYTES = 8 << 20
# Padding that is still cheaper than one more call, as a share of the real tokens.
MAX_WASTE = 0.25
MASK_ELEMENTS = 1 << 23  # a prefill over a long prefix is masked in blocks of queries this large


@dataclass(slots=True, eq=False)
class Bucket:
    """Neighbouring rows that are attended in one call.

    Attributes:
        rows, tokens: the rows and their stretch of packed tokens.
        new: new tokens per row.
        first_page, num_pages: table columns that hold what the rows may see.
        skip: leading slots of the first page that no row may see.
        length: slots attended, counted from `skip`; the longest row's if they differ.
        lengths: each row's, if they differ.
        fresh: the rows have no committed tokens, so that K and V at hand are all there is.
        prefix: pages in front of these that the rows share with others, attended apart.
    """

    rows: slice
    tokens: slice
    new: int
    first_page: Ints
    num_pages: int
    skip: int
    length: int
    lengths: Ints | None
    fresh: bool
    prefix: Bucket | None = None
    page_ids: Tensor | None = None  # [rows * num_pages]
    padding: Tensor | None = None  # slots of the scratch that no row owns
    masks: dict[tuple[int, torch.dtype], Tensor] = field(default_factory=dict)

    @property
    def count(self) -> int:
        return self.rows.stop - self.rows.start


def plan(
    new: Ints,
    kv_lens: Ints,
    page_size: int,
    window: int | None,
    token_bytes: int,
    prefixes: Sequence[cascade.Prefix] = (),
) -> list[Bucket]:
    """Cuts a step into buckets.

    Args:
        new: `[B]`, new tokens per row, at least 1.
        kv_lens: `[B]`, tokens per row including the new ones.
        token_bytes: K and V bytes of one token in one layer.
        prefixes: what `cascade.find_prefixes` found, for rows without a window.
    """
    seen = kv_lens if window is None else np.minimum(kv_lens, new + (window - 1))
    begin = kv_lens - seen
    for prefix in prefixes:
        begin[prefix.rows] = prefix.num_pages * page_size
    first_page = begin // page_size
    # A single query sees a contiguous stretch, so the head of its first page can be cut off;
    # several queries see different stretches and need a mask, which covers that head as well.
    skip = np.where(new == 1, begin - first_page * page_size, 0)
    length = kv_lens - first_page * page_size - skip
    budget = max(1, BUCKET_BYTES // token_bytes)
    stops = np.cumsum(new).tolist()
    fronts: list[Bucket | None] = [None] * len(stops)
    for rows, pages in prefixes:
        fronts[rows] = [_front(rows, pages, stops, page_size)] * (rows.stop - rows.start)
    kinds = zip(new.tolist(), skip.tolist(), fronts)
    shape = list(zip(kinds, length.tolist(), (kv_lens == new).tolist()))
    buckets = []
    start = 0
    while start < len(shape):
        stop, ragged, longest = _extend(shape, start, budget)
        (size, cut, front), _, fresh = shape[start]
        buckets.append(
            Bucket(
                rows=slice(start, stop),
                tokens=slice(stops[start] - size, stops[stop - 1]),
                new=size,
                first_page=first_page[start:stop],
                num_pages=-(-(cut + longest) // page_size),
                skip=cut,
                length=longest,
                lengths=length[start:stop] if ragged else None,
                fresh=fresh and not ragged,
                prefix=front,
            )
        )
        start = stop
    return buckets


def _front(rows: slice, num_pages: int, stops: list[int], page_size: int) -> Bucket:
    """The bucket of a prefix: the pages of its first row, for the queries of all."""
    return Bucket(
        rows=slice(rows.start, rows.start + 1),
        tokens=slice(stops[rows.start] - 1, stops[rows.stop - 1]),
        new=rows.stop - rows.start,
        first_page=np.zeros(1, dtype=np.int64),
        num_pages=num_pages,
        skip=0,
        length=num_pages * page_size,
        lengths=None,
        fresh=False,
    )


Kind = tuple[int, int, Bucket | None]  # new tokens, slots skipped, pages in front


def _extend(shape: list[tuple[Kind, int, bool]], start: int, budget: int) -> tuple[int, bool, int]:
    """How far a bucket that begins at `start` reaches, whether it is ragged, its longest row."""
    kind, length, fresh = shape[start]
    longest = total = length
    ragged = False
    stop = start + 1
    while stop < len(shape) and shape[stop][0] == kind:
        other = shape[stop][1]
        differs = other != length
        if differs and (kind[0] > 1 or fresh):
            break  # a second mask per row would cost more than a second call
        most = max(longest, other)
        rows = stop - start + 1
        if rows * most > budget or rows * most > (1 + MAX_WASTE) * (total + other):
            break
        longest, total, ragged, stop = most, total + other, ragged or differs, stop + 1
    return stop, ragged, longest


def write_kv(k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, slots: Tensor) -> None:
    """Twin of `reference.write_kv`, for slots that are all >= 0."""
    for new, pages in ((k, k_pages), (v, v_pages)):
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
    k: Tensor,
    v: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    buckets: list[Bucket],
    scratch: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    return_lse: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Attention as in `reference.paged_attention`, after K and V of the step were written.

    Args:
        q, k, v: `[T, H, D]` and `[T, G, D]`, the new tokens.
        buckets: from `plan`, the same for every layer of a group.
        scratch: `[2, elements]`, at least `scratch_elements(buckets, G * D, P)`.

    Returns:
        `[T, H, D]`, and the log-sum-exp `[T, H]` if asked for.
    """
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    lse = q.new_empty(q.shape[:2], dtype=torch.float32) if return_lse else None
    prefix: Bucket | None = None
    for bucket in buckets:
        if bucket.prefix is not None and bucket.prefix is not prefix:
            prefix = bucket.prefix
            keys = _gather(k_pages, page_table, prefix, scratch[0])
            values = _gather(v_pages, page_table, prefix, scratch[1])
            front, front_lse = cascade.attend_prefix(
                q[prefix.tokens].unflatten(1, (k.shape[1], -1)), keys, values, scale
            )
        n, tokens = bucket.count, bucket.tokens
        queries = q[tokens].unflatten(0, (n, bucket.new)).transpose(1, 2)  # [n, H, new, D]
        if bucket.fresh:
            keys, values = (x[tokens].unflatten(0, (n, bucket.new)).transpose(1, 2) for x in (k, v))
        else:
            keys = _gather(k_pages, page_table, bucket, scratch[0])
            values = _gather(v_pages, page_table, bucket, scratch[1])
        if bucket.prefix is not None and prefix is not None:
            mask = None if bucket.lengths is None else _mask(bucket, 0, 1, window, q)
            own = queries.reshape(n, k.shape[1], -1, q.shape[2])
            at = slice(tokens.start - prefix.tokens.start, tokens.stop - prefix.tokens.start)
            merged = cascade.merge(
                *cascade.attend(own, keys, values, mask, scale), front[at], front_lse[at]
            )
            out[tokens] = merged.reshape(n, *q.shape[1:])
            continue
        result, sums = _attend(queries, keys, values, bucket, scale, window, softcap, return_lse)
        out[tokens] = result.transpose(1, 2).flatten(0, 1)
        if lse is not None and sums is not None:
            lse[tokens] = sums.transpose(1, 2).flatten(0, 1)
    return out, lse


def scratch_elements(buckets: list[Bucket], token_elements: int, page_size: int) -> int:
    """Elements of K (or V) that the largest bucket, or prefix, gathers."""
    slots = [b.count * b.num_pages * page_size for b in buckets if not b.fresh]
    slots += [b.prefix.length for b in buckets if b.prefix is not None]
    return token_elements * max(slots, default=0)


def _gather(pages: Tensor, page_table: Tensor, bucket: Bucket, scratch: Tensor) -> Tensor:
    """K or V of a bucket: `[n, G, length, D]`, a view of scratch."""
    n, m = bucket.count, bucket.num_pages
    _, heads, page_size, dim = pages.shape
    if bucket.page_ids is None:
        columns = torch.from_numpy(bucket.first_page[:, None] + np.arange(m)).to(page_table.device)
        columns = columns.clamp_(max=page_table.shape[1] - 1)
        ids = page_table[bucket.rows].gather(1, columns)
        bucket.page_ids = ids.clamp_(0, pages.shape[0] - 1).flatten()
    into = scratch[: n * m * page_size * heads * dim]
    by_slot = pages.transpose(1, 2)
    if by_slot.is_contiguous():
        into = into.view(n * m, page_size, heads, dim)
        torch.index_select(by_slot, 0, bucket.page_ids, out=into)
        if bucket.lengths is not None:
            into.view(-1, heads, dim).index_fill_(0, _padding(bucket, page_size, into), 0)
        rows = into.view(n, m * page_size, heads, dim).transpose(1, 2)
    else:
        into = into.view(n, heads, m, page_size, dim)
        into.copy_(pages[bucket.page_ids].view(n, m, heads, page_size, dim).transpose(1, 2))
        rows = into.flatten(2, 3)
        if bucket.lengths is not None:
            flat = rows.transpose(1, 2).flatten(0, 1)
            flat.index_fill_(0, _padding(bucket, page_size, into), 0)
            rows = flat.unflatten(0, (n, -1)).transpose(1, 2)
    return rows[:, :, bucket.skip : bucket.skip + bucket.length]


def _padding(bucket: Bucket, page_size: int, like: Tensor) -> Tensor:
    if bucket.padding is None:
        assert bucket.lengths is not None
        slot = np.arange(bucket.num_pages * page_size)
        beyond = slot >= bucket.skip + bucket.lengths[:, None]
        bucket.padding = torch.from_numpy(np.flatnonzero(beyond)).to(like.device)
    return bucket.padding


def _attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bucket: Bucket,
    scale: float,
    window: int | None,
    softcap: float | None,
    return_lse: bool,
) -> tuple[Tensor, Tensor | None]:
    """Attention over plain tensors: `[n, H, new, D]`, and `[n, H, new]` if asked for."""
    plain = softcap is None and not return_lse
    limits = window is not None and bucket.new > 1 and bucket.length > window
    if plain and bucket.new == 1:
        # The H / G queries of a KV head as rows of one product: K and V are read once for them.
        n, heads, _, dim = q.shape
        rows = q.reshape(n, k.shape[1], heads // k.shape[1], dim)
        mask = None if bucket.lengths is None else _mask(bucket, 0, 1, window, q)
        out = F.scaled_dot_product_attention(rows, k, v, attn_mask=mask, scale=scale)
        return out.reshape(q.shape), None
    if plain and bucket.new == bucket.length and not limits:
        return F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=scale, enable_gqa=True
        ), None
    elements = bucket.length if plain else bucket.length * q.shape[0] * q.shape[1]
    block = max(1, MASK_ELEMENTS // elements)
    parts: list[tuple[Tensor, Tensor | None]] = []
    for start in range(0, bucket.new, block):
        stop = min(start + block, bucket.new)
        mask = _mask(bucket, start, stop, window, q)
        queries = q[:, :, start:stop]
        if plain:
            part = F.scaled_dot_product_attention(
                queries, k, v, attn_mask=mask, scale=scale, enable_gqa=True
            )
            parts.append((part, None))
        else:
            parts.append(_products(queries, k, v, mask, scale, softcap))
    out = parts[0][0] if len(parts) == 1 else torch.cat([part for part, _ in parts], dim=2)
    sums = [lse for _, lse in parts if lse is not None]
    return out, torch.cat(sums, dim=2) if sums else None


def _products(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor, scale: float, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """Attention by explicit products in float32, where SDPA has no softcap and no LSE."""
    n, heads, new, dim = q.shape
    groups = k.shape[1]
    rows = q.float().reshape(n, groups, heads // groups * new, dim)
    scores = rows @ k.float().transpose(2, 3) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.view(n, groups, heads // groups, new, -1) + mask.float().unsqueeze(2)
    lse = scores.logsumexp(-1)
    weights = scores.softmax(-1).view(n, groups, heads // groups * new, -1)
    out = (weights @ v.float()).view(n, heads, new, dim).to(q.dtype)
    return out, lse.view(n, heads, new)


def _mask(bucket: Bucket, start: int, stop: int, window: int | None, q: Tensor) -> Tensor:
    """What queries `start..stop` of a bucket must not see, as an additive mask.

    Returns:
        `[n or 1, 1, stop - start, length]`. A row with nothing to see cannot occur: every query
        sees at least itself.
    """
    mask = bucket.masks.get((start, q.dtype))
    if mask is None:
        slot = torch.arange(bucket.length, device=q.device)
        if bucket.lengths is not None:
            lengths = torch.from_numpy(bucket.lengths).to(q.device)
            hidden = (slot >= lengths[:, None])[:, None, None]
        else:
            query = bucket.length - bucket.new + torch.arange(start, stop, device=q.device)[:, None]
            hidden = slot > query
            if window is not None:
                hidden |= slot <= query - window
            hidden = hidden[None, None]
        mask = torch.zeros(hidden.shape, dtype=q.dtype, device=q.device)
        mask.masked_fill_(hidden, -math.inf)
        if start == 0 and stop == bucket.new:  # one block: worth keeping for the next layer
            bucket.masks[(start, q.dtype)] = mask
    return mask
