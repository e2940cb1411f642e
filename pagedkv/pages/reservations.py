"""Pages promised to sequences, and how many are left for others.

A sequence added with `max_tokens` has a `limit` of pages that it gets in any case. The part that it
has not taken yet is its promise; promised pages are unavailable to all other sequences. If its
half-filled last page is shared, its next write needs a page to copy it into: `extra`. There are
enough staging pages for every sequence: with them, limits and promises count coded pages.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from pagedkv.arrays import Bools, Ints

from .pool import PagePool


class Reservations:
    """Limits and promises, one per row of the page tables.

    Args:
        binding: which groups can run out; the others need no promises.
        num_pages: `[rows]`, pages of each sequence's text; only read here, the tables write it.
        evicted: `[groups, rows]`, how many pages of each text were evicted; only read here, too.
        copies: whether the next write to a shared page takes a promised one.
    """

    def __init__(
        self, pool: PagePool, binding: Bools, num_pages: Ints, evicted: Ints, copies: bool = True
    ) -> None:
        self.limit = np.zeros_like(num_pages)
        self.extra = np.zeros(num_pages.size, dtype=bool)
        self.promise = np.zeros_like(num_pages)
        self.total = 0  # sum of `promise`
        self.count = 0  # sequences with a limit; if 0, a step skips all updates
        self.binding = binding
        self._pool = pool
        self._num_pages, self._evicted = num_pages, evicted
        self._copies = copies

    def fewest_pages(self, rows: int | Ints) -> Any:
        """Counts each sequence's pages in the group where it has fewest; ignores windows."""
        return self._num_pages[rows] - self._evicted[:, rows].max(0)

    def owed(self, limit: Any, held: Any, extra: Any = False) -> Any:
        """Counts the pages that are promised beyond the held ones.

        Args:
            limit: pages that a sequence, or each of several, gets in any case; 0 if nothing is
                promised.
            held: pages that count towards the limit, as `fewest_pages` and
                `PageTables.counted` count them.
            extra: whether the next write copies the last page.
        """
        return np.maximum(limit - held, 0) + extra

    def available(self) -> Ints:
        """Counts the pages of each group that are not promised: `[groups]`."""
        return self._pool.num_free + self._pool.num_cached - self.total * self.binding

    def start(self, row: int, limit: int, shared_tail: bool) -> None:
        """Reserves pages for a new sequence; the caller has made sure that there is room."""
        self.limit[row], self.extra[row] = limit, shared_tail and self._copies
        self.count += limit > 0
        self.update(row)

    def end(self, rows: Ints) -> None:
        """Forgets the reservations of sequences that are gone."""
        self.count -= int(np.count_nonzero(self.limit[rows]))
        self.limit[rows], self.extra[rows] = 0, False
        self.update(rows)

    def share_tail(self, rows: Ints) -> None:
        """Notes that the last pages of these sequences got another owner."""
        if self._copies and rows.size:
            self.extra[rows] |= self.limit[rows] > 0
            self.update(rows)

    def missing_extra(self, rows: Ints) -> int:
        """Counts the pages that `share_tail` would set aside."""
        if not rows.size:
            return 0
        return int(np.count_nonzero((self.limit[rows] > 0) & ~self.extra[rows])) * self._copies

    def covered(self, rows: Ints, pages: Ints, grow: Ints, copied: Bools) -> int:
        """Counts the pages of a step that were promised to the sequences that take them.

        Args:
            pages: `[B]`, pages that each sequence held before the step.
            grow, copied: `[B]`, how many each takes, and whether it also copies its tail.
        """
        owed = self.owed(self.limit[rows], pages)
        return int((np.minimum(grow, owed) + (copied & self.extra[rows])).sum())

    def shorten(self, row: int, lost: int, shared_tail: bool) -> None:
        """Notes, after a truncate, that the `lost` pages are no longer promised."""
        if not self.limit[row]:
            return
        self.extra[row] = False
        self._lower(row, lost)
        if not self._copies:
            self.settle([row])
        elif shared_tail and self.limit[row]:
            # The next write copies the tail: promise a page more for it, or lower the limit by one.
            if (self.available()[self.binding] > 0).all():
                self.extra[row] = True
                self.update(row)
            else:
                self._lower(row, 1)

    def settle(self, rows: list[int]) -> None:
        """Lowers limits that cannot be kept after sequences were cut within a coded page.

        This page becomes free only when the next step of its sequence is committed.
        """
        for row in rows:
            missing = -int(self.available()[self.binding].min(initial=0))
            if missing > 0 and self.limit[row]:
                self._lower(row, missing)

    def cap(self, row: int, limit: int) -> None:
        """Lowers a sequence's limit to at most `limit` pages."""
        if self.limit[row] > limit:
            self._lower(row, int(self.limit[row]) - limit)

    def _lower(self, row: int, pages: int) -> None:
        self.limit[row] = max(0, int(self.limit[row]) - pages)
        self.count -= int(self.limit[row] == 0)
        self.update(row)

    def update(self, rows: int | Ints) -> None:
        """Brings promises up to date with limits, `extra`, and the pages sequences have."""
        owed = self.owed(self.limit[rows], self.fewest_pages(rows), self.extra[rows])
        self.total += int((owed - self.promise[rows]).sum())
        self.promise[rows] = owed
