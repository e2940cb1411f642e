"""The host tier of a cache: sequences and prefixes that leave the device and come back.

`host_pages.py` decides, `host_storage.py` copies pages, `host_states.py` keeps recurrent states;
this file joins them. A restored sequence has the same bits in its pages as before: it shares a page
on the device only if its host page is a copy of that page.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import torch

from pagedkv.arrays import Ints, Tokens
from pagedkv.config import CacheConfig
from pagedkv.errors import BudgetExceeded
from pagedkv.interrupt import Uninterrupted
from pagedkv.pages import restore, sequences
from pagedkv.pages.pool import PagePool
from pagedkv.pages.prefix import PrefixIndex
from pagedkv.pages.restore import Incoming, Restored
from pagedkv.pages.tables import PageTables
from pagedkv.storage import Storage
from pagedkv.storage.memory import available_memory, memory_errors
from pagedkv.storage.page_statistics import Marks, PageStatistics
from pagedkv.storage.states import StateStorage

from .host_pages import HostPages, Recycled
from .host_states import HostStates
from .host_storage import HostStorage


class HostTier:
    """Moves pages between a cache's device and host memory."""

    def __init__(
        self,
        tables: PageTables,
        storage: Storage,
        statistics: PageStatistics,
        config: CacheConfig,
        states: StateStorage | None = None,
    ) -> None:
        self._tables, self._statistics = tables, statistics
        self.states: HostStates | None = None
        if tables.states is not None and states is not None:
            self.states = HostStates(tables.states, states)
        self._marks: dict[int, Marks | None] = {}  # by row, for all its pages
        groups = range(len(config.groups))
        counts = [config.num_host_pages(group) for group in groups]
        self.storage = HostStorage(storage, counts)
        needed, available = self.storage.nbytes, available_memory(torch.device("cpu"))
        if needed > available:
            raise BudgetExceeded(
                f"host_tokens: {config.host_tokens} tokens need {needed:,} bytes of host memory, "
                f"{available:,} are available",
                needed=needed,
                available=available,
            )
        self._state_bytes = config.bytes_per_state
        self.pages = HostPages(tables, [count for both in counts for count in both])
        self._reused: list[Recycled] = []  # device pages whose prefix is about to be lost
        if self.states is None:
            # No reference to this tier: a cycle would keep the memory of a cache that is dropped.
            tables.pool.before_reuse = partial(_note_reused, self._reused, tables.index)
        self._may_lose: Any = MemoryError

    def take_memory(self) -> None:
        """Takes all host memory now; from then on a lack of memory raises and loses no prefix.

        Raises:
            MemoryError: there is too little.
        """
        self.storage.take()
        self._may_lose = ()

    # ------------------------------------------------------------------ sequences

    def offload(self, rows: Sequence[int]) -> None:
        """Moves all pages of some sequences to the host.

        Raises:
            HostMemoryError: not all of them fit; nothing was changed.
        """
        tables = self._tables
        with Uninterrupted():
            leaving, records, hosts = self.pages.plan(rows)
            groups, marks = range(len(tables.windows)), {}
            try:
                self._copy_out(records, hosts)
                for row in rows:
                    pages = np.concatenate([restore.stored(tables, g, row) for g in groups])
                    marks[row] = self._statistics.export(pages)
                if self.states is not None:
                    self.states.leave(rows)
                self.pages.fill(records, hosts)
            except BaseException:
                for sequence in leaving:
                    self.pages.release(sequence)
                raise
            if tables.states is not None:
                tables.states.leave(np.asarray(rows))
            for row, sequence in zip(rows, leaving):
                restore.release(tables, row)
                self._marks[row], tables.offloaded[row] = marks[row], sequence

    def restore(self, rows: Sequence[int], max_tokens: int | None = None) -> None:
        """Brings sequences back, bit for bit.

        Args:
            max_tokens: for how many tokens each sequence gets reserved pages; by default for as
                many as before it left.

        Raises:
            OutOfPagesError: not all of them fit; nothing was changed.
        """
        tables = self._tables
        offloaded = [tables.offloaded[row] for row in rows]
        if max_tokens is not None:
            for i, text in enumerate(offloaded):
                limit = sequences.limit_of(tables, max_tokens, tables.size_of(rows[i]))
                offloaded[i] = text._replace(limit=limit)
                tables.lasting[rows[i]] = sequences.lasting_of(tables, max_tokens)
        texts = [self.pages.incoming(row, sequence) for row, sequence in zip(rows, offloaded)]
        hosts = [sequence.pages for sequence in offloaded]
        if self.states is not None:
            self.states.require_room(rows, max_tokens is not None)
        self._bring_back(texts, hosts, "restore", max_tokens is not None)
        for row in rows:
            self._end(row)

    def counts(self) -> tuple[int, int, int]:
        """Counts pages of offloaded sequences, their bytes with states, and pages of prefixes."""
        owned, kinds = self.pages.count_owned(), self._tables.kinds
        sizes = [self.storage.page_bytes(*divmod(s, kinds)) for s in range(owned.size)]
        nbytes = int(owned @ sizes) + (0 if self.states is None else self.states.nbytes)
        return int(owned.sum()), nbytes, int(self.pages.pool.num_cached.sum())

    def page_counts(self) -> list[int]:
        """Counts pages of offloaded sequences, and pages of prefixes."""
        return [int(self.pages.count_owned().sum()), int(self.pages.pool.num_cached.sum())]

    def check(self) -> None:
        """Raises `CorruptCacheError` if the records of the tier contradict each other."""
        self.pages.check(self._tables.offloaded.values())
        if self.states is not None:
            self.states.check(list(self._tables.offloaded))

    def seconds(self, row: int) -> float | None:
        """Estimates how long copying a sequence out and in takes; None before the first copy."""
        tables, size = self._tables, self._state_bytes
        for group in range(len(tables.windows)):
            pages = restore.stored(tables, group, row)
            for kind, count in enumerate(np.bincount(tables.kinds_of(group, pages)).tolist()):
                size += count * self.storage.page_bytes(group, kind)
        there, back = self.storage.out.seconds(size), self.storage.into.seconds(size)
        return None if there is None else there + (there if back is None else back)

    def forget(self, rows: Sequence[int]) -> None:
        """Releases the host pages of sequences that are freed."""
        for row in rows:
            if row in self._tables.offloaded:
                self._end(row)

    def _end(self, row: int) -> None:
        self.pages.release(self._tables.offloaded.pop(row))
        del self._marks[row]
        if self.states is not None:
            self.states.forget(row)

    def _bring_back(
        self, texts: list[Incoming], hosts: list[list[Ints]], what: str, promise: bool = False
    ) -> None:
        """Gives texts their pages, filled from the host.

        Args:
            hosts: by text and group, the host page of each stored page; read if the page is no
                longer on the device.
            what: the call, for the error.
            promise: whether all texts get a promised state slot, or only those that had one.
        """
        tables = self._tables
        restored = restore.take_pages(tables, texts, what)
        try:
            self.rescue()
            places = self._copy_in(restored, hosts)
            self._mark(restored)
            if self.states is not None:
                self.states.come_back([text.row for text in texts], promise)
        except BaseException:
            restore.undo(tables, restored)
            raise
        restore.publish(tables, restored)
        for fresh, host in zip(restored.fresh, places):
            self.pages.came_back(fresh.page, host)

    def _mark(self, restored: Restored) -> None:
        """Gives fresh pages the statistics of the pages that left."""
        for i, text in enumerate(restored.texts):
            begins = np.cumsum([0, *(columns.size for columns in text.columns)])
            mine = [fresh for fresh in restored.fresh if fresh.text == i]
            pages = np.array([fresh.page for fresh in mine], dtype=np.int64)
            chosen = np.array([begins[fresh.group] + fresh.which for fresh in mine], dtype=np.int64)
            self._statistics.import_(pages, self._marks.get(text.row), chosen)

    # ------------------------------------------------------------------ prefixes

    def rescue(self) -> None:
        """Copies the contents of cached pages that are about to be reused, before the next write.

        If there is no memory for a prefix, it is lost. Prefixes of models with states are always
        lost, because a prompt would find them without their state.
        """
        reused = self._reused[:]
        self._reused.clear()
        if not reused:
            return
        records, hosts = self.pages.rescue(reused)
        try:
            with suppress(self._may_lose), memory_errors():
                self._copy_out(records, hosts)
                self.pages.fill(records, hosts)
        finally:
            self.pages.pool.drop(hosts)  # filled ones are cached now, the others free

    def extend(self, row: int, tokens: Tokens) -> bool:
        """Brings back pages of a new sequence's prompt that follow the pages found on the device.

        Returns:
            Whether there were any; always False for models with states, which are not kept here.
        """
        if self.states is not None:
            return False
        tables, size = self._tables, self._tables.page_size
        found = int(tables.lengths[row])
        full = found // size
        chain = tables.chain(row).behind(tables.prefix_keys[row][full], full)
        match = self.pages.match(chain, tokens[full * size : -1])
        pinned = np.unique(match.pages)
        self.pages.pool.share(pinned)  # so that none of these host pages is reused
        try:
            columns = match.pages.shape[1]
            length = full * size + match.length
            while length > found and not self._fits(row, length, match.pages[:, :columns]):
                columns -= 1
                length = (full + columns) * size
            if length > found:
                text, hosts = self._incoming(row, tokens[:length], full, match.pages[:, :columns])
                restore.release(tables, row)
                tables.prefix_keys[row] = tables.prefix_keys[row][: full + 1] + match.keys[:columns]
                self._bring_back([text], [hosts], "add")
                tables.pending[row] = tokens[length:].copy()
                tables.tokens_reused += length - found
            return length > found
        finally:
            self.pages.pool.drop(pinned)

    def _fits(self, row: int, length: int, hosts: Ints) -> bool:
        """Whether a text of `length` tokens fits into pages not promised to other sequences."""
        tables, reserved = self._tables, self._tables.reservations
        rest = reserved.owed(reserved.limit[row], tables.counted(length))
        covered = max(0, int(reserved.promise[row] - rest)) * reserved.binding
        short = self.pages.pool.count(hosts.reshape(-1)) - covered - reserved.available()
        return bool((short <= 0).all()) or tables.grow(short)

    def _incoming(
        self, row: int, tokens: Tokens, full: int, match: Ints
    ) -> tuple[Incoming, list[Ints]]:
        """Joins a sequence's complete pages on the device and the host pages behind them.

        Returns:
            The sequence for `restore.take_pages`, and its host pages by group.
        """
        tables, columns, kinds, shared, hosts = self._tables, [], [], [], []
        end = -(-tokens.size // tables.page_size)
        for group, window in enumerate(tables.windows):
            kept = 0 if window is None else max(0, tokens.size - window - tables.rollback)
            first = max(int(tables.first_kept[group, row]), kept // tables.page_size)
            here = tables.tables[group, row, first:full]
            behind = match[group, max(0, first - full) :]
            columns.append(np.arange(first, end))
            hosts.append(np.concatenate([np.full(here.size, -1), behind]))
            shared.append(np.concatenate([here, np.full(behind.size, -1)]))
            there = self.pages.pool.group_of[behind] % tables.kinds
            kinds.append(np.concatenate([tables.kinds_of(group, here), there]))
        alone = [np.full(pages.size, -1) for pages in shared]
        limit = int(tables.reservations.limit[row])
        return Incoming(row, tokens, limit, columns, kinds, shared, alone), hosts

    # ------------------------------------------------------------------ bytes

    def _copy_out(self, records: list[Recycled], hosts: Ints) -> None:
        pages = np.array([page.page for page in records], dtype=np.int64)
        segments = np.array([page.segment for page in records], dtype=np.int64)
        self._copy(self.storage.keep, segments, pages, hosts)

    def _copy_in(self, restored: Restored, hosts: list[list[Ints]]) -> list[int]:
        """Fills fresh pages; returns the host page of each."""
        places = [int(hosts[i][group][which]) for group, i, which, _ in restored.fresh]
        pages = np.array([fresh.page for fresh in restored.fresh], dtype=np.int64)
        segments = self._tables.pool.group_of[pages]
        self._copy(self.storage.bring, segments, pages, np.array(places, dtype=np.int64))
        return places

    def _copy(self, copy: Callable[..., None], segments: Ints, pages: Ints, hosts: Ints) -> None:
        """Calls a copy of `HostStorage` for the pages of each segment, and their host pages."""
        for segment in np.unique(segments).tolist():
            group, kind = divmod(segment, self._tables.kinds)
            mine = segments == segment
            places = hosts[mine] - self.pages.pool.base[segment]
            copy(group, kind, pages[mine] - self._tables.base[group], places)


def _note_reused(
    reused: list[Recycled], index: PrefixIndex, pool: PagePool, pages: list[int]
) -> None:
    reused += [Recycled.of(index, pool, page) for page in pages]
