"""Decides which host page holds what, who owns it, and which is reused when none is free.

`PagePool` and `PrefixIndex` keep host pages as they keep device pages: a pool with owners and an
order of reuse, and an index that finds pages by tokens. Pages of offloaded sequences are *owned*;
the others hold prefixes that would have been lost on the device, and the least recently used one is
reused first. A host page knows which device page it is a copy of, so that no page is copied twice,
and no page is copied back that is still on the device. Pages are compared by version, not by
tokens: K and V of equal tokens from another batch may differ in their last bits.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from pagedkv.arrays import Ints, Tokens
from pagedkv.errors import CorruptCacheError, HostMemoryError
from pagedkv.pages.check import check_pool
from pagedkv.pages.pool import PagePool
from pagedkv.pages.prefix import Match, PrefixIndex
from pagedkv.pages.restore import Incoming, stored, text_of
from pagedkv.pages.salts import Chain
from pagedkv.pages.tables import PageTables


class Recycled(NamedTuple):
    """The record of a device page; kept of cached pages when they are reused.

    Attributes:
        page: the page's id.
        segment: the segment of the pool that the page is in.
        version: the version of its contents, as in `PagePool.version`.
        filled: committed slots.
        tokens: the ids in these slots.
        key: the key under which the page is found if it is full, else None.
        partial: the partial key under which it is found, or None.
    """

    page: int
    segment: int
    version: int
    filled: int
    tokens: Tokens
    key: bytes | None
    partial: bytes | None

    @classmethod
    def of(cls, index: PrefixIndex, pool: PagePool, page: int) -> Recycled:
        """Makes the record of a page as it is now."""
        place = int(pool.group_of[page]), int(pool.version[page]), int(pool.filled[page])
        return cls(page, *place, index.tokens[page].copy(), *index.keys_of(page))


class OffloadedSequence(NamedTuple):
    """A sequence whose pages are in host memory.

    Attributes:
        tokens: `[length]`, the ids of its text, -1 where unknown.
        limit: pages that were reserved for the sequence.
        columns: by group, the columns of the text whose pages are stored.
        kinds: by group and stored page, 1 for a staging page, else 0.
        pages: by group and stored page, the host page that holds its bytes.
    """

    tokens: Tokens
    limit: int
    columns: list[Ints]
    kinds: list[Ints]
    pages: list[Ints]


class HostPages:
    """The host pages of one cache.

    Args:
        num_pages: host pages of every segment; the segments are those of the device's pool.
    """

    def __init__(self, tables: PageTables, num_pages: Sequence[int]) -> None:
        # The index ignores windows: it finds a prefix if every group has all of it.
        windows: list[int | None] = [None] * len(tables.windows)
        total = sum(num_pages)
        self.index = PrefixIndex(windows, total, tables.page_size, b"")
        self.pool = PagePool(num_pages, self.index, tables.kinds)
        self._tables = tables
        # The device page that each host page was copied from; equal while that has this version.
        self._source = np.full(total + 1, -1, dtype=np.int64)
        self._versions = np.full(total + 1, -1, dtype=np.int64)
        # The host page that each device page was last copied to.
        self._copy_on_host = np.full(tables.pool.refcount.size, -1, dtype=np.int64)

    # ------------------------------------------------------------------ sequences leave

    def plan(self, rows: Sequence[int]) -> tuple[list[OffloadedSequence], list[Recycled], Ints]:
        """Gives every page of some sequences a host page, and each host page its owners.

        Returns:
            The sequences; the pages to copy, and their host pages.

        Raises:
            HostMemoryError: not all sequences fit; nothing was changed.
        """
        tables, pool, groups = self._tables, self.pool, range(len(self._tables.windows))
        pages = [stored(tables, group, row) for row in rows for group in groups]
        device, which, uses = np.unique(
            np.concatenate(pages), return_inverse=True, return_counts=True
        )
        hosts = self._copies(device, tables.pool.version[device], tables.pool.filled[device])
        new = np.flatnonzero(hosts < 0)
        known = hosts[hosts >= 0]
        self._require_room(device[new], known)
        pool.share(known)  # at once, so that none of them is reused
        try:
            hosts[new] = self._take(tables.pool.group_of[device[new]])
        except BaseException:
            pool.drop(known)
            raise
        pool.refcount[hosts] += (uses - 1).astype(np.int32)
        places = np.split(hosts[which], np.cumsum([part.size for part in pages])[:-1])
        sequences = [self._offloaded(row, places[i * len(groups) :]) for i, row in enumerate(rows)]
        parts = tables.index, tables.pool
        records = [Recycled.of(*parts, page) for page in device[new].tolist()]
        return sequences, records, hosts[new]

    def _offloaded(self, row: int, places: list[Ints]) -> OffloadedSequence:
        tables, groups = self._tables, range(len(self._tables.windows))
        pages = [stored(tables, group, row) for group in groups]
        kinds = [tables.kinds_of(group, pages[group]) for group in groups]
        columns, limit = [tables.column_of[x] for x in pages], int(tables.reservations.limit[row])
        return OffloadedSequence(text_of(tables, row), limit, columns, kinds, places[: len(groups)])

    def _require_room(self, new: Ints, known: Ints) -> None:
        pool = self.pool
        needed = np.bincount(self._tables.pool.group_of[new], minlength=pool.num_pages.size)
        room = pool.num_free + pool.num_cached - pool.count(known[pool.refcount[known] == 0])
        if (needed > room).any():
            worst = int((needed - room).argmax())
            size = self._tables.page_size
            raise HostMemoryError(
                f"offload needs {needed[worst]} pages of host memory, {room[worst]} of "
                f"{pool.num_pages[worst]} can be had: restore or free offloaded sequences, or "
                f"build the cache with host_tokens larger by {(needed - room)[worst] * size}"
            )

    def _copies(self, device: Ints, versions: Ints, filled: Any) -> Ints:
        """Returns, for each of some device pages, the host page that is a copy of it, or -1."""
        hosts = self._copy_on_host[device]
        alike = (self._source[hosts] == device) & (self._versions[hosts] == versions)
        alike &= self.pool.is_kept(hosts) & (self.pool.filled[hosts] >= filled)
        return np.where((hosts >= 0) & alike, hosts, -1)

    def _take(self, segments: Ints) -> Ints:
        """Takes a host page from each of these segments."""
        taken = np.empty_like(segments)
        asked = [(s, int(n)) for s, n in enumerate(np.bincount(segments)) if n]
        for (segment, _), pages in zip(asked, self.pool.take(0, asked)[1]):
            taken[segments == segment] = pages
        return taken

    def fill(self, records: Iterable[Recycled], hosts: Ints) -> None:
        """Keeps the records of pages that were copied to host pages, and makes these findable."""
        for page, host in zip(records, hosts.tolist()):
            self._bind(host, page.page, page.version)
            self.pool.filled[host] = page.filled
            self.index.tokens[host] = page.tokens
            group = page.segment // self._tables.kinds
            self.index.publish(group, host, page.key, page.partial)

    def _bind(self, host: int, page: int, version: int) -> None:
        """Remembers that a host page is a copy of this version of a device page."""
        self._source[host], self._versions[host], self._copy_on_host[page] = page, version, host

    def release(self, offloaded: OffloadedSequence) -> None:
        """Ends a sequence's ownership of its host pages; findable ones stay while there is room."""
        self.pool.drop(np.concatenate(offloaded.pages)[::-1])

    # ------------------------------------------------------------------ and come back

    def incoming(self, row: int, offloaded: OffloadedSequence) -> Incoming:
        """Returns the sequence for `restore.take_pages`, with the pages that the device has."""
        tables, complete = self._tables, offloaded.tokens.size // self._tables.page_size
        shared, content = [], []
        for columns, hosts in zip(offloaded.columns, offloaded.pages):
            sources = self._source[hosts]
            good = (sources >= 0) & (tables.pool.version[sources] == self._versions[hosts])
            good &= tables.pool.is_kept(sources) & (columns < complete)
            shared.append(np.where(good, sources, -1))
            content.append(np.where(columns < complete, hosts, -1))
        stored = offloaded.columns, offloaded.kinds
        return Incoming(row, offloaded.tokens, offloaded.limit, *stored, shared, content)

    def came_back(self, page: int, host: int) -> None:
        """Remembers that a device page was filled from a host page, so that others share it."""
        # A page that got only the beginning of a host page will differ from it later.
        if self._tables.pool.filled[page] >= self.pool.filled[host]:
            self._bind(host, page, int(self._tables.pool.version[page]))

    # ------------------------------------------------------------------ prefixes

    def rescue(self, pages: Sequence[Recycled]) -> tuple[list[Recycled], Ints]:
        """Takes host pages for cached device pages that are about to be reused.

        Pages with a copy on the host need none. If there is too little room, the beginning of a
        text is rescued rather than its end.

        Returns:
            The pages to copy, and their host pages, which are owned until the caller drops them.
        """
        versions = np.array([page.version for page in pages])
        filled = np.array([page.filled for page in pages])
        copies = self._copies(np.array([page.page for page in pages]), versions, filled)
        for i, page in enumerate(pages):
            found = self.index.find(page.segment // self._tables.kinds, page.key)
            if copies[i] < 0 and found >= 0:
                copies[i] = found
        known = np.unique(copies[copies >= 0])
        self.pool.share(known)
        self.pool.drop(known)  # most recently used, so reused last
        chosen: list[Recycled] = []
        room = self.pool.num_free + self.pool.num_cached
        for i in reversed(range(len(pages))):  # the beginning of a text is reused last
            if copies[i] < 0 and room[pages[i].segment] > 0:
                room[pages[i].segment] -= 1
                chosen.append(pages[i])
        chosen.reverse()
        return chosen, self._take(np.array([page.segment for page in chosen], dtype=np.int64))

    def match(self, chain: Chain, tokens: Tokens) -> Match:
        """Finds the longest prefix of `tokens` in host pages."""
        return self.index.match(chain, tokens, self.pool.filled)

    def clear(self) -> None:
        """Forgets every prefix; offloaded sequences stay."""
        self.index.clear()
        self.pool.release_cached()

    # ------------------------------------------------------------------ explain

    def count_owned(self) -> Ints:
        """Counts the pages of every segment that offloaded sequences own."""
        return self.pool.num_pages - self.pool.num_free - self.pool.num_cached

    def check(self, offloaded: Iterable[OffloadedSequence]) -> None:
        """Raises `CorruptCacheError` if owners, counts or contents contradict each other."""
        pool, owners = self.pool, np.zeros(self.pool.refcount.size, dtype=np.int64)
        for sequence in offloaded:
            size = self._tables.page_size
            for columns, pages in zip(sequence.columns, sequence.pages):
                np.add.at(owners, pages, 1)
                ends = sequence.tokens.size - columns * size
                if (pool.filled[pages] < np.minimum(ends, size)).any():
                    raise CorruptCacheError("a host page has fewer slots than its sequence needs")
        check_pool(pool, owners[:-1], "host page")
