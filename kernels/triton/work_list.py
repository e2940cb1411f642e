"""The work of a step, cut on the device: which programs attend to what.

Lengths live on the device and change while a captured graph is replayed, so the list is made
there: an item is a tile of queries of one row and a split of the tokens they may see. Where a row
is cut depends on its own lengths alone. What the host knows only bounds buffers and grids; larger
bounds cost time and never change a result.

Bytes moved: 32 an item, and 8 a row for every row.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from pagedkv.kernels.scoring import NO_WINDOW

from .geometry import Target
from .launch import Launcher, target_of

FIELDS: tl.constexpr = tl.constexpr(8)
# Fields of an item, in this order:
#   row       of the page table
#   token     of the packed queries, the tile's first
#   count     queries of the tile
#   position  of the first query in its text; negative for rows without keys. Of the row's last
#             token where attention is not causal, so that all queries see all
#   begin     first token attended
#   end       one past the last
#   part      which of the parts that the tile's queries are merged from
#   partial   where these queries' parts lie, in queries


class Bounds(NamedTuple):
    """Bounds of the rows that take part, known on the host; they need not be reached.

    Attributes:
        rows: how many rows.
        tokens: new tokens of all of them.
        max_new, max_kv: new tokens, and length, of one row.
    """

    rows: int
    tokens: int
    max_new: int
    max_kv: int


class Cut(NamedTuple):
    """How rows are cut.

    Attributes:
        fewest, most: new tokens of the rows that take part.
        queries: queries of a tile.
        split: fewest tokens of a split.
        splits: most splits of a row.
        block: splits begin at multiples of this many tokens.
        longest: tokens up to which a split grows with its row; longer rows have more splits, and
            once these are `splits`, longer ones again.
        shares: splits of a row while they grow.
        uncut: tokens up to which a row is one split, whatever else is said.
    """

    fewest: int
    most: int
    queries: int
    split: int
    splits: int
    block: int
    longest: int = 0
    shares: int = 16
    uncut: int = 0

    def tiles(self, bounds: Bounds) -> int:
        """Most tiles of queries."""
        each = bounds.rows * -(-bounds.max_new // self.queries)
        return min(each, bounds.tokens // self.queries + bounds.rows)

    def parts(self, visible: int) -> int:
        """Returns the most splits of a row that attends to `visible` tokens or fewer."""
        if visible <= self.uncut:
            return 1
        growing = min(self.shares, -(-visible // self.split))
        return max(1, min(self.splits, max(growing, -(-visible // max(self.split, self.longest)))))

    def into(self, length: int) -> tuple[int, int]:
        """Returns splits of `length` tokens, and tokens of each, as the device's `_splits_of`."""
        fewest = max(self.split, min(-(-length // self.shares), self.longest))
        splits = min(max(-(-length // fewest), 1), self.splits) if length > self.uncut else 1
        size = max(-(-length // (splits * self.block)), 1) * self.block
        return max(-(-length // size), 1), size


class Work(NamedTuple):
    """The work that `cut_rows` made.

    Attributes:
        items: `[most items, 8]` int32.
        total: `[3]` int32, items there are, and two counters by which programs take turns; those
            are 0 whenever no kernel runs.
        parts: `[B]` int32, splits of each row; 0 for rows that take no part.
    """

    items: Tensor
    total: Tensor
    parts: Tensor


@triton.jit
def _splits_of(length, CUT: tl.constexpr):
    """Returns the splits of a row of `length` tokens, and the tokens of each."""
    share = (length + CUT.shares - 1) // CUT.shares
    fewest = tl.maximum(tl.minimum(share, CUT.longest), CUT.split)
    splits = tl.minimum(tl.maximum((length + fewest - 1) // fewest, 1), CUT.splits)
    splits = tl.where(length > CUT.uncut, splits, 1)
    size = tl.maximum((length + splits * CUT.block - 1) // (splits * CUT.block), 1) * CUT.block
    return tl.maximum((length + size - 1) // size, 1), size


@triton.jit
def _items_of(kv_len, new, skip, window, fewest, most, queries, CUT: tl.constexpr):
    """First visible token, tokens a split, splits and items of rows."""
    first = tl.maximum(skip, kv_len - new - window + 1)
    aligned = first // CUT.block * CUT.block
    length = tl.maximum(kv_len - aligned, 0)
    splits, size = _splits_of(length, CUT)
    takes_part = (new >= fewest) & (new <= most)
    items = tl.where(takes_part, (new + queries - 1) // queries * splits, 0)
    return first, aligned, size, splits, items


@triton.jit(do_not_specialize=["num_rows", "window", "fewest", "most", "queries", "most_new"])
def _cut_rows(
    kv_lens_ptr,
    query_start_ptr,
    skips_ptr,
    items_ptr,
    total_ptr,
    parts_ptr,
    num_rows,
    window,
    fewest,
    most,
    queries,
    most_new,
    CUT: tl.constexpr,  # without `fewest`, `most` and `queries`
    HAS_SKIPS: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    """One program for a row counts the items before its own, then writes its own.

    A row's tiles come last first: under a causal mask the last sees most.
    """
    row = tl.program_id(0)
    before = 0
    for start in range(0, row, 128):
        rows = start + tl.arange(0, 128)
        there = rows < row
        kv_lens = tl.load(kv_lens_ptr + rows, mask=there, other=0)
        begins = tl.load(query_start_ptr + rows, mask=there, other=0)
        ends = tl.load(query_start_ptr + rows + 1, mask=there, other=0)
        skips = tl.zeros([128], tl.int32)
        if HAS_SKIPS:
            skips = tl.load(skips_ptr + rows * 2, mask=there, other=0)
        _, _, _, _, items = _items_of(
            kv_lens, ends - begins, skips, window, fewest, most, queries, CUT
        )
        before += tl.sum(tl.where(there, items, 0))
    kv_len = tl.load(kv_lens_ptr + row)
    begin = tl.load(query_start_ptr + row)
    new = tl.load(query_start_ptr + row + 1) - begin
    skip = 0
    shared = 0  # parts that attention to a shared prefix adds in front of the row's own
    if HAS_SKIPS:
        skip = tl.load(skips_ptr + row * 2)
        shared = tl.load(skips_ptr + row * 2 + 1)
    _, aligned, size, splits, items = _items_of(
        kv_len, new, skip, window, fewest, most, queries, CUT
    )
    for start in range(0, items, 32):
        index = start + tl.arange(0, 32)
        mask = index < items
        tile = (items - 1 - index) // splits
        split = (items - 1 - index) % splits
        to = items_ptr + (before + index) * FIELDS
        count = tl.minimum(new - tile * queries, queries)
        position = kv_len - new + tile * queries if CAUSAL else tile * 0 + (kv_len - 1)
        # What the tile may see, which is less than what the row may.
        low = tl.maximum(aligned + split * size, tl.maximum(skip, position - window + 1))
        high = tl.minimum(aligned + (split + 1) * size, position + (count if CAUSAL else 1))
        tl.store(to, row, mask=mask)
        tl.store(to + 1, begin + tile * queries, mask=mask)
        tl.store(to + 2, count, mask=mask)
        tl.store(to + 3, position, mask=mask)
        tl.store(to + 4, low, mask=mask)
        tl.store(to + 5, high, mask=mask)
        tl.store(to + 6, shared + split, mask=mask)
        tl.store(to + 7, row * most_new + tile * queries, mask=mask)
    tl.store(parts_ptr + row, tl.where(items > 0, splits + shared, 0))
    if row == num_rows - 1:
        tl.store(total_ptr, before + items)
        tl.store(total_ptr + 1, 0)
        tl.store(total_ptr + 2, 0)


def cut_rows(
    kv_lens: Tensor,
    query_start_loc: Tensor,
    cut: Cut,
    most_items: int,
    *,
    max_new: int,
    window: int | None = None,
    causal: bool = True,
    skips: Tensor | None = None,
) -> Work:
    """Lists the work of the rows that bring `cut.fewest .. cut.most` new tokens.

    Args:
        kv_lens: `[B]` int32.
        query_start_loc: `[B + 1]` int32.
        most_items: items there can be.
        max_new: new tokens that such a row can have.
        causal: if not, there is no window.
        skips: `[B, 2]` int32: leading tokens that are attended elsewhere, and in how many parts.
    """
    rows, device = kv_lens.numel(), kv_lens.device
    items = torch.empty(most_items, FIELDS.value, dtype=torch.int32, device=device)
    parts = torch.empty(rows, dtype=torch.int32, device=device)
    total = torch.empty(3, dtype=torch.int32, device=device)
    work = Work(items, total, parts)
    launcher = _launcher(cut[3:], skips is not None, causal, target_of(device))
    launcher(
        (rows, 1, 1),
        kv_lens,
        query_start_loc,
        kv_lens if skips is None else skips,
        items,
        work.total,
        work.parts,
        rows,
        NO_WINDOW if window is None else min(window, NO_WINDOW),
        *cut[:3],
        max_new,
    )
    return work


@functools.cache
def _launcher(splits: tuple[int, ...], has_skips: bool, causal: bool, target: Target) -> Launcher:
    static = {"CUT": Cut(0, 0, 0, *splits), "HAS_SKIPS": has_skips, "CAUSAL": causal}
    return Launcher(_cut_rows, target, static, num_warps=1, num_stages=1)
