"""A pool that grows by increments of pages and gives memory back.

The pool is laid out for its largest size, so ids, tables and arrays never change; only the number
of each group's first pages that exist grows. A step that finds no free page first reuses cached
prefixes and then grows the pool. If it grew first, every pool would reach its limit in time,
because pages of ended sequences stay findable; and memory that was never taken serves others.
A reservation counts only existing pages, so the pool grows at once when a reservation is made.
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
        resize: takes how many pages of each group shall exist; called before new pages are handed
            out and after pages were withdrawn. It raises MemoryError and changes nothing if they
            do not fit.
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
        self.refused: MemoryError | None = None  # why the last attempt to grow failed
        self._increment = pool.num_pages.copy()
        self._increment[::kinds] = increment
        self._kinds = kinds
        self._pool = pool
        self._reservations = reservations
        self._resize = resize
        pool.resize(self._increment)

    def cover(self, short: Ints) -> bool:
        """Grows each segment by at least the pages it lacks, or grows none and returns False.

        Args:
            short: `[segments]`, missing pages; 0 or less if a segment has enough.
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
            pool.resize(existing)  # first: if `resize` fails, no sequence gets pages without memory
            self._resize(existing[:: self._kinds].tolist())

    def absent(self) -> list[tuple[int, int]]:
        """Returns, by group, the first id of pages that do not exist and the id behind the last."""
        pool, kinds = self._pool, self._kinds
        first = pool.base[:-1:kinds] + pool.existing[::kinds]
        return list(zip(first.tolist(), pool.base[1::kinds].tolist()))

    def free_pages(self) -> list[Ints]:
        """Returns the free pages of each group, as ids within the group, ascending."""
        segments = range(0, len(self._pool.num_pages), self._kinds)
        return [self._pool.free_pages(s) - self._pool.base[s] for s in segments]
