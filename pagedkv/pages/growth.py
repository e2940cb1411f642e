"""A pool that grows by increments and gives memory back: when pages exist and when they do not.

The pool is laid out for its largest size, so ids, tables and arrays never change; what grows is how
many of the first pages of each group exist. A step that finds no page free first reuses cached
prefixes and then grows the pool: growing first would take every pool to its limit in time, because
the pages of every sequence that ends stay findable, and memory that was never taken serves others.
A reservation counts existing pages only, and the pool grows at once when it is made, so that it can
be kept.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from pagedkv.arrays import Ints

from .pool import PagePool
from .reservations import Reservations


class PoolGrowth:
    """Grows a pool by whole increments of pages, and shrinks it to what is used.

    Args:
        pool: begins with one increment of pages; its staging pages are there from the start.
        increment: pages that each group grows by.
        kinds: segments of the pool that a group has; the first one grows.
        resize: called with the number of pages of each group that are to exist, before new ones
            are handed out or after some were withdrawn. It raises MemoryError, changing nothing, if
            they do not fit.
    """

    def __init__(
        self,
        pool: PagePool,
        reservations: Reservations,
        increment: Sequence[int],
        kinds: int,
        resize: Callable[[list[int]], None],
    ) -> None:
        self.count = 0  # how often the pool grew
        self.refused: MemoryError | None = None  # why it did not when it was last asked to
        self._increment = pool.num_pages.copy()
        self._increment[::kinds] = increment
        self._kinds = kinds
        self._pool = pool
        self._reservations = reservations
        self._resize = resize
        pool.resize(self._increment)

    def cover(self, short: Ints) -> bool:
        """Grows each segment by at least the pages it is short of, or grows none and says False.

        Args:
            short: `[segments]`, 0 or less where there are enough.
        """
        pool = self._pool
        steps = -(-np.maximum(short, 0) // self._increment)
        existing = np.minimum(pool.existing + steps * self._increment, pool.num_pages)
        self.refused = None
        if (existing < pool.existing + short).any():
            return False
        try:
            self._resize(existing[:: self._kinds].tolist())
        except MemoryError as error:
            self.refused = error
            return False
        pool.resize(existing)
        self.count += 1
        return True

    def shrink(self) -> None:
        """Withdraws free pages from the pool's end; at least one increment of pages stays."""
        pool, reserved = self._pool, self._reservations
        spare = np.where(reserved.binding, reserved.available(), pool.num_free)
        least = np.maximum(pool.last_used(), pool.existing - spare)
        steps = np.maximum(-(-least // self._increment), 1)
        existing = np.minimum(steps * self._increment, pool.existing)
        if (existing < pool.existing).any():
            pool.resize(existing)  # first: if memory fails, no sequence gets pages that lost theirs
            self._resize(existing[:: self._kinds].tolist())

    def absent(self) -> list[tuple[int, int]]:
        """The first id of each group's pages that do not exist yet, and the id behind the last."""
        pool, kinds = self._pool, self._kinds
        first = pool.base[:-1:kinds] + pool.existing[::kinds]
        return list(zip(first.tolist(), pool.base[1::kinds].tolist()))

    def free_pages(self) -> list[Ints]:
        """Free pages of each group, as ids within it, ascending."""
        segments = range(0, len(self._pool.num_pages), self._kinds)
        return [self._pool.free_pages(s) - self._pool.base[s] for s in segments]
