"""Finds the rows of a step that begin with the same pages, on the host: numpy only."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]

# Bytes of K and V that a layer must be spared for the second call to be worth its time, measured on
# 2 cores of an AMD EPYC, 9/3 heads of 64, fp32 (2026-11-21, docs/kernels.md).
WORTH_BYTES = 1 << 19


class Prefix(NamedTuple):
    """Leading pages that neighbouring rows have in common.

    Attributes:
        rows: neighbours, each with one new token.
        num_pages: full pages, none of which holds a new token.
    """

    rows: slice
    num_pages: int


def find_prefixes(
    new: Ints,
    kv_lens: Ints,
    page_table: Ints,
    page_size: int,
    token_bytes: int,
    worth_bytes: int | None = None,
) -> list[Prefix]:
    """Finds runs of decoding rows that share enough of their first pages, in order.

    Args:
        new: `[B]`, new tokens per row.
        kv_lens: `[B]`, tokens per row, the new ones included.
        page_table: `[B, max_pages]`, on the host.
        token_bytes: K and V bytes of one token in one layer.
        worth_bytes: bytes of K and V that a layer must be spared; default `WORTH_BYTES`.
    """
    # A page that a row may write to is no prefix, nor is any page of a row with more new tokens.
    full = np.where(new == 1, (kv_lens - 1) // page_size, 0)
    common = _common(page_table, np.minimum(full[1:], full[:-1])).tolist()
    worth_bytes = WORTH_BYTES if worth_bytes is None else worth_bytes
    worth = max(1, worth_bytes // (token_bytes * page_size))
    return _runs(common, worth)


def _common(page_table: Ints, most: Ints) -> Ints:
    """Counts leading pages that rows i and i + 1 share, for each i, up to `most[i]`.

    Only rows that were alike so far are compared further, so long tables cost what they share.
    """
    common = np.zeros(len(most), np.int64)
    pairs = np.flatnonzero((most > 0) & (page_table[1:, 0] == page_table[:-1, 0]))
    begin, width = 0, 32
    while len(pairs):
        end = begin + width
        alike = page_table[pairs + 1, begin:end] == page_table[pairs, begin:end]
        whole = alike.all(1)
        common[pairs] += np.where(whole, alike.shape[1], alike.argmin(1))
        pairs = pairs[whole & (most[pairs] > end)]
        begin, width = end, 4 * width
    return np.minimum(common, most)


def _runs(common: list[int], worth: int) -> list[Prefix]:
    """Finds the run that spares most, then others on both sides of it, until none is worth it.

    `common[i]` counts the pages that rows i and i + 1 share. A run is a rectangle under these
    counts: its width is the rows that need not gather, its height the pages.
    """
    # No run crosses a zero, so each range between two zeros is searched by itself.
    borders = [-1, *(i for i, pages in enumerate(common) if not pages), len(common)]
    left = [(a + 1, b) for a, b in pairwise(borders) if b > a + 1]
    found = []
    while left:
        start, stop = left.pop()
        first, last, pages = _largest(common, start, stop)
        if (last - first) * pages >= worth:
            found.append(Prefix(slice(first, last + 1), pages))
            # The rows at both ends of the run are taken, and with them the pairs beside it.
            left += [(start, max(start, first - 1)), (min(stop, last + 1), stop)]
    return sorted(found, key=lambda prefix: prefix.rows.start)


def _largest(common: list[int], start: int, stop: int) -> tuple[int, int, int]:
    """The largest rectangle under `common[start:stop]`: where it begins and ends, its height."""
    most, best = 0, (start, start, 0)
    rising: list[tuple[int, int]] = []  # begin and height of rectangles that may still grow
    for i in range(start, stop + 1):
        height, begin = common[i] if i < stop else 0, i
        while rising and rising[-1][1] >= height:
            begin, tall = rising.pop()
            if (i - begin) * tall > most:
                most, best = (i - begin) * tall, (begin, i, tall)
        rising.append((begin, height))
    return best
