"""Rows that were put back, and whether their K and V wait in host memory or are computed again."""

from __future__ import annotations

from collections.abc import Iterable

from pagedkv.cache.cache import PagedKVCache
from pagedkv.errors import HostMemoryError
from pagedkv.offload.rate import Rate

from .rows import NOT_RUNNING, Row


class Preemption:
    """Chooses what takes less time, by how long both have taken so far.

    Attributes:
        computing: tokens in seconds, of the steps that compute prompts.
        count: rows that were offloaded.
    """

    def __init__(self, cache: PagedKVCache) -> None:
        self.cache = cache
        self.computing = Rate()
        self.count = 0

    def keep(self, row: Row) -> bool:
        """Offloads a row that leaves, if that pays and there is room; it does not run any more."""
        if not self.cache.config.host_tokens or not self._pays(row):
            return False
        try:
            self.cache.offload(row.seq)
        except HostMemoryError:
            return False
        row.aside, row.seq = row.seq, NOT_RUNNING
        self.count += 1
        return True

    def _pays(self, row: Row) -> bool:
        """What was never measured is tried."""
        copying = self.cache.copy_seconds(row.seq)
        computing = self.computing.seconds(self.cache.length(row.seq))
        return copying is None or computing is None or copying < computing

    def bring_back(self, row: Row, max_tokens: int | None) -> None:
        """Restores a row that waits here, with pages set aside for so many tokens.

        Raises:
            OutOfPagesError: not now.
        """
        self.cache.restore(row.aside, max_tokens=max_tokens)
        row.seq, row.aside = row.aside, NOT_RUNNING

    def give_up(self, rows: Iterable[Row]) -> None:
        """Frees what waits here of some rows."""
        for row in rows:
            if row.aside != NOT_RUNNING:
                self.cache.free(row.aside)
                row.aside = NOT_RUNNING
