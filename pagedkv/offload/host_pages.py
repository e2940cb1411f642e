"""Pages in host memory: which of them hold what, for whom, and which go when it is full.

The same books as on the device, kept by the same two classes: a pool of host pages with owners and
an order of reuse, and an index that finds them by tokens. Pages of offloaded sequences are *owned*;
the others are prefixes that would have been lost on the device, least recently used first to go.
A host page knows which device page it is a copy of, so that nothing is copied twice, and nothing
copied back that is still there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from pagedkv.arrays import Bools, Ints, Tokens
from pagedkv.errors import CorruptCacheError, HostMemoryError
from pagedkv.pages.pool import PagePool, Recycled
from pagedkv.pages.prefix import Match, PrefixIndex
from pagedkv.pages.restore import Incoming, stored, text_of
from pagedkv.pages.tables import PageTables


class Away(NamedTuple):
    """A sequence whose pages are in host memory.

    Attributes:
        tokens: `[length]` ids, -1 where unknown.
        limit: pages that were reserved for it.
        columns: by group, which pages of its text are stored. Of each of them:
        kinds: 1 for a staging page, else 0.
        pages: its host page.
    """

    tokens: Tokens
    limit: int
    columns: list[Ints]
    kinds: list[Ints]
    pages: list[Ints]


class HostPages:
    """The host pages of one cache.

    Args:
        num_pages: of every stretch, as on the device.
    """

    def __init__(self, tables: PageTables, num_pages: Sequence[int]) -> None:
        # Without windows: a prefix is found here if every group has all of it.
        windows: list[int | None] = [None] * len(tables.windows)
        total = sum(num_pages)
        self.index = PrefixIndex(windows, total, tables.page_size, b"")
        self.pool = PagePool(num_pages, self.index, tables.kinds)
        self._tables = tables
        # The device page each is a copy of, as long as that page is as `born` says.
        self._twin = np.full(total + 1, -1, dtype=np.int64)
        self._born = np.full(total + 1, -1, dtype=np.int64)
        self._copy_of = np.full(tables.pool.refcount.size, -1, dtype=np.int64)  # the latest

    # ------------------------------------------------------------------ sequences leave

    def plan(self, rows: Sequence[int]) -> tuple[list[Away], list[Recycled], Ints]:
        """Gives every page of some sequences a host page, and each host page its owners.

        Returns:
            The sequences; the pages to copy, and their host pages.

        Raises:
            HostMemoryError: not all of them fit; nothing was changed.
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
        away = [self._away(row, places[i * len(groups) :]) for i, row in enumerate(rows)]
        return away, [tables.pool.record(page) for page in device[new].tolist()], hosts[new]

    def _away(self, row: int, places: list[Ints]) -> Away:
        tables, groups = self._tables, range(len(self._tables.windows))
        pages = [stored(tables, group, row) for group in groups]
        kinds = [tables.kinds_of(group, pages[group]) for group in groups]
        columns, limit = [tables.column_of[x] for x in pages], int(tables.reservations.limit[row])
        return Away(text_of(tables, row), limit, columns, kinds, places[: len(groups)])

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

    def _copies(self, device: Ints, born: Ints, filled: Any) -> Ints:
        """The host page that is a copy of each of some device pages, or -1."""
        hosts = self._copy_of[device]
        alike = (self._twin[hosts] == device) & (self._born[hosts] == born)
        alike &= self.pool.is_kept(hosts) & (self.pool.filled[hosts] >= filled)
        return np.where((hosts >= 0) & alike, hosts, -1)

    def _take(self, stretches: Ints) -> Ints:
        """A host page for each of some stretches."""
        taken = np.empty_like(stretches)
        asked = [(s, int(n)) for s, n in enumerate(np.bincount(stretches)) if n]
        for (stretch, _), pages in zip(asked, self.pool.take(0, asked)[1]):
            taken[stretches == stretch] = pages
        return taken

    def fill(self, records: Iterable[Recycled], hosts: Ints) -> None:
        """Books what was copied to new host pages."""
        for page, host in zip(records, hosts.tolist()):
            self._bind(host, page.page, page.born)
            self.pool.filled[host] = page.filled
            self.index.tokens[host] = page.tokens
            group = page.stretch // self._tables.kinds
            self.index.publish(group, host, page.key, page.head)

    def _bind(self, host: int, page: int, born: int) -> None:
        self._twin[host], self._born[host], self._copy_of[page] = page, born, host

    def release(self, away: Away) -> None:
        """A sequence needs its host pages no more; what is findable stays while there is room."""
        self.pool.drop(np.concatenate(away.pages)[::-1])

    # ------------------------------------------------------------------ and come back

    def text(self, row: int, away: Away) -> Incoming:
        """What to ask `arrive` for: device pages that are still there, and fresh ones."""
        tables, complete = self._tables, away.tokens.size // self._tables.page_size
        shared, content = [], []
        for columns, hosts in zip(away.columns, away.pages):
            twins = self._twin[hosts]
            good = (twins >= 0) & (tables.pool.version[twins] == self._born[hosts])
            good &= tables.pool.is_kept(twins) & (columns < complete)
            shared.append(np.where(good, twins, -1))
            content.append(np.where(columns < complete, hosts, -1))
        return Incoming(row, away.tokens, away.limit, away.columns, away.kinds, shared, content)

    def came_back(self, page: int, host: int) -> None:
        """A device page was filled from a host page: whoever comes next shares it."""
        # Of a page that got only the beginning, the rest will be something else.
        if self._tables.pool.filled[page] >= self.pool.filled[host]:
            self._bind(host, page, int(self._tables.pool.version[page]))

    # ------------------------------------------------------------------ prefixes

    def rescue(self, pages: Sequence[Recycled]) -> tuple[list[Recycled], Ints]:
        """Host pages for cached device pages that are about to be reused, if they are worth it.

        Returns:
            Those to copy, and where. They are owned until `let_go`.
        """
        born = np.array([page.born for page in pages])
        filled = np.array([page.filled for page in pages])
        copies = self._copies(np.array([page.page for page in pages]), born, filled)
        for i, page in enumerate(pages):
            found = self.index.find(page.stretch // self._tables.kinds, page.key)
            if copies[i] < 0 and found >= 0:
                copies[i] = found
        known = np.unique(copies[copies >= 0])
        self.pool.share(known)
        self.pool.drop(known)  # used just now: last to go
        chosen: list[Recycled] = []
        room = self.pool.num_free + self.pool.num_cached
        for i in reversed(range(len(pages))):  # the beginning of a text is reused last
            if copies[i] < 0 and room[pages[i].stretch] > 0:
                room[pages[i].stretch] -= 1
                chosen.append(pages[i])
        chosen.reverse()
        return chosen, self._take(np.array([page.stretch for page in chosen], dtype=np.int64))

    def let_go(self, hosts: Ints) -> None:
        """Ends the ownership of rescued pages: they are prefixes now, or free if not filled."""
        self.pool.drop(hosts)

    def match(self, key: bytes, tokens: Tokens) -> Match:
        """The longest prefix of `tokens` found here, behind a text that ends with a chain key."""
        return self.index.match(key, tokens, self.pool.filled)

    def clear(self) -> None:
        """Forgets every prefix; offloaded sequences stay."""
        self.index.clear()
        self.pool.release_cached()

    # ------------------------------------------------------------------ explain

    def count_owned(self) -> Ints:
        """Pages of offloaded sequences, of every stretch."""
        return self.pool.num_pages - self.pool.num_free - self.pool.num_cached

    def check(self, away: Iterable[Away]) -> None:
        """Raises `CorruptCacheError` if owners, books or contents contradict each other."""
        pool, owners = self.pool, np.zeros(self.pool.refcount.size, dtype=np.int64)
        for sequence in away:
            size = self._tables.page_size
            for columns, pages in zip(sequence.columns, sequence.pages):
                np.add.at(owners, pages, 1)
                ends = sequence.tokens.size - columns * size
                if (pool.filled[pages] < np.minimum(ends, size)).any():
                    raise CorruptCacheError("a host page has fewer slots than its sequence needs")
        _require(owners == pool.refcount, "references differ from offloaded sequences at")
        kept = pool.is_kept(np.arange(owners.size - 1))
        cached = kept & (pool.refcount[:-1] == 0)
        _require(~cached | pool.findable[:-1], "cached but not findable:")
        _require(kept | ~pool.findable[:-1], "free but findable:")
        if (pool.count(np.flatnonzero(kept)) + pool.num_free != pool.num_pages).any():
            raise CorruptCacheError("owned, cached and free host pages do not add up")
        if (pool.count(np.flatnonzero(cached)) != pool.num_cached).any():
            raise CorruptCacheError("cached host pages are miscounted")


def _require(good: Bools, what: str) -> None:
    if not good.all():
        raise CorruptCacheError(f"{what} host page {int(good.argmin())}")
