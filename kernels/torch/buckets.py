"""Cuts a step into buckets: rows that the torch backend gathers and attends in one call.

This is decided once a step, on the host, from lengths alone. Neighbouring rows share a bucket as
long as their keys together fit into the processor's cache and little of the bucket is padding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from pagedkv.kernels.prefixes import Ints, Prefix

# K and V of one bucket at most. On 2 x AMD EPYC (1 MB L2, 32 MB L3), 9/3 heads of 64, fp32, 16 rows
# of 1024 take 2.4 ms in buckets of 6 MB and 4.0 ms in one (2026-11-21, docs/kernels.md).
BUCKET_BYTES = 8 << 20
# So much padding, as a share of the real tokens, is still cheaper than one more call.
MAX_WASTE = 0.25


@dataclass(slots=True, eq=False)
class Bucket:
    """Neighbouring rows that are attended in one call.

    Attributes:
        rows: the rows.
        tokens: their range of packed tokens.
        new: new tokens per row.
        first_page, num_pages: table columns with the slots that the rows may see.
        skip: leading slots of the first page that no row may see.
        length: slots attended, counted from `skip`; the longest row's if they differ.
        lengths: each row's length, if they differ.
        fresh: whether the rows have no committed tokens, so that the call has all of their K and V.
        prefix: pages in front, which the rows share with others and which are attended separately.
        read: how many pages each row and KV head reads, chosen by `select_pages.py`; 0 for all.
        causal: whether a query sees no token behind itself.
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
    read: int = 0
    causal: bool = True
    page_ids: Tensor | None = None  # [rows * num_pages]
    padding: Tensor | None = None  # slots of the scratch that no row owns
    masks: dict[tuple[int, torch.dtype], Tensor] = field(default_factory=dict)

    @property
    def count(self) -> int:
        return self.rows.stop - self.rows.start


def cut_step(
    new: Ints,
    kv_lens: Ints,
    page_size: int,
    window: int | None,
    token_bytes: int,
    prefixes: Sequence[Prefix] = (),
    exact: bool = True,
    read: int = 0,
    causal: bool = True,
) -> list[Bucket]:
    """Cuts a step into buckets.

    Args:
        new: `[B]`, new tokens per row, at least 1.
        kv_lens: `[B]`, tokens per row including the new ones.
        token_bytes: K and V bytes of one token in one layer.
        prefixes: the result of `prefixes.find_prefixes`, for rows without a window.
        exact: whether pages hold K and V as computed, so that a step's own need not be read back.
        read: pages that a row of one new token reads, if it has more; 0 for all. Without windows.
        causal: if not, every query sees all tokens of its row; without a window.
    """
    seen = kv_lens if window is None else np.minimum(kv_lens, new + (window - 1))
    begin = kv_lens - seen
    for prefix in prefixes:
        begin[prefix.rows] = prefix.num_pages * page_size
    first_page = begin // page_size
    skip = begin - first_page * page_size  # cut off, not masked: these slots may be unwritten
    length = kv_lens - begin
    budget = max(1, BUCKET_BYTES // token_bytes)
    stops = np.cumsum(new).tolist()
    fronts: list[Bucket | None] = [None] * len(stops)
    for rows, pages in prefixes:
        fronts[rows] = [_front(rows, pages, stops, page_size)] * (rows.stop - rows.start)
    chosen = (new == 1) & (kv_lens > read * page_size) & (read > 0)
    kinds = zip(new.tolist(), skip.tolist(), fronts, chosen.tolist())
    shape = list(zip(kinds, length.tolist(), (kv_lens == new).tolist()))
    buckets = []
    start = 0
    while start < len(shape):
        most = read * page_size if chosen[start] else None
        stop, ragged, longest = _extend(shape, start, budget, most)
        (size, cut, front, few), _, fresh = shape[start]
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
                fresh=exact and fresh and not ragged,
                prefix=front,
                read=read * few,
                causal=causal,
            )
        )
        start = stop
    return buckets


def _front(rows: slice, num_pages: int, stops: list[int], page_size: int) -> Bucket:
    """Makes the bucket of a prefix: the pages of its first row, for the queries of all rows."""
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


# New tokens, slots skipped, pages in front, whether pages are chosen.
Kind = tuple[int, int, Bucket | None, bool]


def _extend(
    shape: list[tuple[Kind, int, bool]], start: int, budget: int, read: int | None
) -> tuple[int, bool, int]:
    """Returns where a bucket that begins at `start` ends, whether it is ragged, its longest row.

    Args:
        read: how many tokens a row reads at most; None for all.
    """
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
        held = most if read is None else min(most, read)
        if rows * held > budget or rows * most > (1 + MAX_WASTE) * (total + other):
            break
        longest, total, ragged, stop = most, total + other, ragged or differs, stop + 1
    return stop, ragged, longest


def scratch_elements(buckets: list[Bucket], token_elements: int, page_size: int) -> int:
    """Counts the elements of K (or V) that the largest bucket, or prefix, gathers."""
    slots = [b.count * b.num_pages * page_size for b in buckets if not (b.fresh or b.read)]
    slots += [b.prefix.length for b in buckets if b.prefix is not None]
    return token_elements * max(slots, default=0)
