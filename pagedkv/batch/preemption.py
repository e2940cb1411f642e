"""Rows that were put back, and whether their K and V wait in host memory or are computed again."""

from __future__ import annotations

from collections.abc import Iterable

from pagedkv.cache.cache import PagedKVCache
from pagedkv.errors import HostMemoryError
from pagedkv.offload.rate import Rate

from .rows import NOT_RUNNING, Row


class Preemption:
    """Chooses between copying and computing again, by how long each has taken so far.

    Attributes:
        computing: how many tokens a second steps with prompts compute.
    """

    def __init__(self, cache: PagedKVCache) -> None:
        self.cache = cache
        self.computing = Rate()

    def offload_if_cheaper(self, row: Row) -> bool:
        """Offloads a leaving row if that is faster and there is room; returns whether it did."""
        if not self.cache.config.host_tokens or not self._pays(row):
            return False
        try:
            self.cache.offload(row.seq)
        except HostMemoryError as error:
            if error.__cause__ is not None and self.cache.ranks.size > 1:
                raise  # only this machine's memory is short, so other ranks go on
            return False
        row.offloaded_seq, row.seq = row.seq, NOT_RUNNING
        return True

    def _pays(self, row: Row) -> bool:
        """Whether a copy is faster than computing; rank 0 decides, and tries an unmeasured one."""
        copying = self.cache.copy_seconds(row.seq)
        computing = self.computing.seconds(self.cache.length(row.seq))
        pays = copying is None or computing is None or copying < computing
        return bool(self.cache.ranks.share(pays))

    def restore(self, row: Row, max_tokens: int | None) -> None:
        """Restores an offloaded row, with pages set aside for `max_tokens`.

        Raises:
            OutOfPagesError: there are too few pages now.
        """
        self.cache.restore(row.offloaded_seq, max_tokens=max_tokens)
        row.seq, row.offloaded_seq = row.offloaded_seq, NOT_RUNNING

    def free(self, rows: Iterable[Row]) -> None:
        """Frees the offloaded sequences of some rows."""
        for row in rows:
            if row.offloaded_seq != NOT_RUNNING:
                self.cache.free(row.offloaded_seq)
                row.offloaded_seq = NOT_RUNNING
