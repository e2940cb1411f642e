"""When pages come into being, and when they go: a pool whose memory follows its use.

The pool is laid out for its largest size, so ids, tables and arrays never change; what grows is how
many of the first pages of each group exist. A step that finds no page free first reuses cached
prefixes and then grows the pool: growing first would take every pool to its limit in time, because
whatever ends stays findable, and memory that was never taken serves others. A reservation counts
existing pages only, so growing for it when it is made is what keeps its promise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from pagedkv.arrays import Ints

from .pool import PagePool
from .reservations import Reservations


class PoolGrowth:
    """Grows a pool by whole steps of pages, and shrinks it to what is used.

    Args:
        pool: begins with one step of pages; its staging pages are there from the start.
        step: pages that each group grows by.
        kinds: stretches of the pool that a group has; the first one grows.
        resize: called with the pages of each group that are to exist, before they are handed out
            or after they were withdrawn. It raises MemoryError, changing nothing, if they do not
            fit.
    """

    def __init__(
        self,
        pool: PagePool,
        reservations: Reservations,
        step: Sequence[int],
        kinds: int,
        resize: Callable[[list[int]], None],
    ) -> None:
        self.count = 0  # how often the pool grew
        self.refused: MemoryError | None = None  # why it did not when it was last asked to
        self._step = pool.num_pages.copy()
        self._step[::kinds] = step
        self._kinds = kinds
        self._pool = pool
        self._reservations = reservations
        self._resize = resize
        pool.resize(self._step)

    def cover(self, short: Ints) -> bool:
        """Grows each stretch by the pages it is short of, or more; or, returning False, nothing.

        Args:
            short: `[stretches]`, 0 or less where there are enough.
        """
        pool = self._pool
        steps = -(-np.maximum(short, 0) // self._step)
        existing = np.minimum(pool.existing + steps * self._step, pool.num_pages)
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
        """Withdraws free pages from the end of the pool, down to whole steps and never to none."""
        pool, reserved = self._pool, self._reservations
        spare = np.where(reserved.binding, reserved.available(), pool.num_free)
        least = np.maximum(pool.last_used(), pool.existing - spare)
        steps = np.maximum(-(-least // self._step), 1)
        existing = np.minimum(steps * self._step, pool.existing)
        if (existing < pool.existing).any():
            pool.resize(existing)  # first: should memory fail, nobody gets pages that lost theirs
            self._resize(existing[:: self._kinds].tolist())

    def absent(self) -> list[tuple[int, int]]:
        """Ids that each group's pages yet to come have: first, and beyond the last."""
        pool, kinds = self._pool, self._kinds
        first = pool.base[:-1:kinds] + pool.existing[::kinds]
        return list(zip(first.tolist(), pool.base[1::kinds].tolist()))

    def free_pages(self) -> list[Ints]:
        """Free pages of each group, as ids within it, ascending."""
        stretches = range(0, len(self._pool.num_pages), self._kinds)
        return [self._pool.free_pages(s) - self._pool.base[s] for s in stretches]
