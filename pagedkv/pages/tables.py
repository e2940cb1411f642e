"""The books of sequences and their pages: ids, lengths, page tables, reservations.

All state is in numpy arrays with one row per sequence; page tables have a leading group axis.
`tables[group, row, column]` is the page that holds positions `column * P ...` of the sequence, or
-1 if there is none (beyond the end, or dropped behind a window). If a policy evicts pages
(`evict.py`), the pages behind them move up: `at` says where a column of the text is now, and
`column_of` which column of its text a page holds. Functions that change ownership between steps
are in `sequences.py`, the functions of a step in `step.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from pagedkv.arrays import Ints, Tokens
from pagedkv.config import CacheConfig
from pagedkv.errors import OffloadedError, UnknownSequenceError

from .checkpoints import PrefixKey
from .dirty import DirtyEntries
from .growth import PoolGrowth
from .notes import NotedEntries, NotedPool, Notes
from .pool import PagePool
from .prefix import PrefixIndex
from .reservations import Reservations
from .salts import UNMIXED, Chain
from .states import StateSlots


class PageTables:
    """Sequences and their pages.

    Args:
        config: the cache's configuration: groups and their pools, rows, lengths.
        notes: every change is noted there, for a trace; None for none.
    """

    def __init__(self, config: CacheConfig, notes: Notes | None = None) -> None:
        self.page_size = page_size = config.page_size
        self.max_sequences = max_sequences = config.max_sequences
        self.max_length = max_length = config.max_sequence_length
        self.windows = [group.window for group in config.groups]
        self.rollback, self.kept, self.staged = config.rollback, config.kept, config.staged
        groups = range(len(self.windows))
        num_pages = [config.num_pages(group) for group in groups]
        staging = [config.num_staging_pages(group) for group in groups if self.staged]
        # A group has one segment of the pool, or one of coded pages and one of staging pages.
        segments = [n for both in zip(num_pages, staging) for n in both] or list(num_pages)
        self.kinds = len(segments) // len(num_pages)
        self.index = PrefixIndex(self.windows, sum(segments), page_size, config.fingerprint)
        pool = segments, self.index, self.kinds
        self.pool = PagePool(*pool) if notes is None else NotedPool(*pool, notes)
        self.notes = notes
        self.base = self.pool.base[:: self.kinds]  # `[groups + 1]`, each group's first page
        self.first_staging = self.pool.base[1 :: self.kinds]  # its end, if it has none

        width = -(-max_length // page_size)
        if not any(self.windows):  # a row's entries are distinct pages
            width = min(width, max(num_pages) + max(staging, default=0))
        self.tables = np.full((len(num_pages), max_sequences, width), -1, dtype=np.int64)
        by_group = len(num_pages), max_sequences
        self.first_kept = np.zeros(by_group, dtype=np.int64)  # columns dropped behind a window
        self.evicted = np.zeros(by_group, dtype=np.int64)  # pages evicted by a policy
        self.num_pages = np.zeros(max_sequences, dtype=np.int64)  # columns of the text
        self.column_of = np.zeros(sum(segments) + 1, dtype=np.int64)  # of each page, in its text
        self.lengths = np.zeros(max_sequences, dtype=np.int64)  # committed tokens
        self.ids_known = np.zeros(max_sequences, dtype=bool)  # the ids of all tokens are known
        # Whether another sequence may own the tail page as well, or findable tokens may lie past
        # this text's end: then the next step checks before it writes in place. Checking in every
        # step took a third of its bookkeeping. May be set needlessly, never missing (`check.py`).
        self.check_tail = np.zeros(max_sequences, dtype=bool)
        self.prefix_keys: list[list[bytes]] = [[] for _ in range(max_sequences)]
        # Pages that a sequence with a reservation needs at most once its prompt is computed.
        self.lasting = np.zeros(max_sequences, dtype=np.int64)
        self.pending: dict[int, Tokens] = {}  # prompt ids not committed yet, by row
        self.mixed: dict[int, Mapping[int, bytes]] = {}  # by row with regions: see `Chain`
        self.models: dict[int, bytes] = {}  # fingerprints, by marked row

        # Complete pages behind the first, of each sequence: they are coded, or about to be.
        self.num_coded = np.zeros_like(self.num_pages) if self.staged else self.num_pages
        self.evicted_coded = np.zeros_like(self.evicted) if self.staged else self.evicted
        binding = np.zeros(len(segments), dtype=bool)
        binding[:: self.kinds] = [config.reserves(group) for group in groups]
        held = self.num_coded, self.evicted_coded
        self.reservations = Reservations(self.pool, binding, *held, not self.staged)
        self.growth: PoolGrowth | None = None  # None for a pool of fixed size
        states = config.max_states, max_sequences
        self.states = StateSlots(*states) if config.states else None
        self.seqs = np.full(max_sequences, -1, dtype=np.int64)
        self._next_id = np.arange(max_sequences)
        self.free_rows = list(range(max_sequences - 1, -1, -1))
        self._mark = np.zeros(max_sequences, dtype=np.int64)
        shape = self.tables.shape
        self.changed = DirtyEntries(shape) if notes is None else NotedEntries(shape, notes)
        self.tokens_computed = 0
        self.tokens_reused = 0
        self.offloaded: dict[int, Any] = {}  # sequences whose pages are in host memory, by row
        self.pages_evicted = 0
        self.compacted = False  # pages were evicted from some sequence, in this cache or before

    def at(self, rows: int | Ints, columns: Ints) -> tuple[Any, ...]:
        """Returns the index into `tables` where columns of texts are now: `[groups, n]`."""
        if not self.compacted:
            return slice(None), rows, columns
        evicted = self.evicted[:, rows]
        groups = np.arange(len(evicted))[:, None]
        return groups, rows, columns - (evicted if evicted.ndim == 2 else evicted[:, None])

    # ------------------------------------------------------------------ sequences and rows

    def rows_of(self, seqs: Any) -> Ints:
        """Rows of distinct live sequences: `[B]`."""
        if not hasattr(seqs, "__iter__"):
            raise TypeError(f"seqs: expected a list of sequence ids, got {seqs!r}")
        ids = np.asarray(seqs if hasattr(seqs, "dtype") else list(seqs))
        if ids.ndim != 1 or not ids.size:
            raise ValueError(f"seqs: expected a list of sequence ids, got {seqs!r}")
        if ids.dtype.kind not in "iu":
            raise TypeError(f"seqs: expected integer ids, got {ids.dtype}")
        rows: Ints = ids % self.max_sequences
        if not (self.seqs[rows] == ids).all() or ids.min() < 0:  # a free row has id -1
            stranger = next(int(s) for s, r in zip(ids, rows) if self.seqs[r] != s or s < 0)
            raise UnknownSequenceError(f"seqs: {stranger} is not a live sequence of this cache")
        order = np.arange(ids.size)
        self._mark[rows] = order
        if not (self._mark[rows] == order).all():
            twice = next(int(s) for s, r, i in zip(ids, rows, order) if self._mark[r] != i)
            raise ValueError(f"seqs: expected distinct sequences, got {twice} twice")
        return rows

    def row_of(self, seq: int) -> int:
        """Row of one live sequence."""
        if isinstance(seq, bool) or not isinstance(seq, (int, np.integer)):
            raise TypeError(f"seq: expected an integer id, got {type(seq).__name__}")
        row = int(seq) % self.max_sequences
        if self.seqs[row] != seq or seq < 0:
            raise UnknownSequenceError(f"seq: {seq} is not a live sequence of this cache")
        return row

    def is_live(self, seq: int) -> bool:
        """Whether an id that was given out is still in use."""
        return seq >= 0 and bool(self.seqs[seq % self.max_sequences] == seq)

    def live_rows(self) -> Ints:
        """Rows in use."""
        return np.flatnonzero(self.seqs >= 0)

    # ------------------------------------------------------------------ rows that begin and end

    def name(self, rows: Ints) -> list[int]:
        """Gives rows sequence ids that were never used before, and returns them."""
        ids = self._next_id[rows]
        self.seqs[rows] = ids
        self._next_id[rows] = ids + self.max_sequences
        return ids.tolist()

    def take_back_name(self, seq: int) -> None:
        """Lets the next sequence have the id of one that ended before its caller knew it."""
        self._next_id[seq % self.max_sequences] = seq

    def set_table(self, row: int, pages: Ints) -> None:
        """Gives these pages to a row without any.

        Args:
            pages: `[groups, columns]`, -1 where a window dropped them.
        """
        columns = pages.shape[1]
        self.tables[:, row, :columns] = pages
        self.num_pages[row] = columns
        self.first_kept[:, row] = (pages < 0).sum(1)
        self.changed.mark(slice(None), np.asarray([row]), np.arange(columns))

    def reset(self, rows: Ints) -> None:
        """Clears the page counts and reservations of rows. The caller has dropped the pages."""
        self.num_pages[rows] = self.num_coded[rows] = 0
        self.first_kept[:, rows] = self.evicted[:, rows] = self.evicted_coded[:, rows] = 0
        self.check_tail[rows] = False
        self.reservations.end(rows)

    def bound_promises(self, rows: Ints) -> None:
        """Lowers promises after an eviction.

        After its prompt a sequence needs no more pages than the policy lets it keep.
        """
        if not self.reservations.count:
            return
        for row in rows.tolist():
            if self.kept is not None and row not in self.pending:
                self.reservations.cap(row, int(self.lasting[row]))
        self.reservations.update(rows)
        # Groups may have given up different numbers of pages. Then one of them may have too few
        # pages for a promise, which is made in all groups.
        self.reservations.settle(rows.tolist())

    # ------------------------------------------------------------------ shared helpers

    def coded_of(self, length: Any) -> Any:
        """Counts complete pages behind the first, of texts of `length` tokens."""
        return np.maximum(length // self.page_size - 1, 0)

    def counted(self, length: Any) -> Any:
        """Counts the pages that texts of `length` tokens have towards a reservation's limit."""
        return self.coded_of(length) if self.staged else -(-length // self.page_size)

    def kinds_of(self, group: int, pages: Ints) -> Ints:
        """Returns the kinds of some pages of a group: 1 for a staging page, else 0."""
        return (pages >= self.first_staging[group]).astype(np.int64)

    def require_here(self, rows: Iterable[int]) -> None:
        """Raises `OffloadedError` if the pages of one of these sequences are in host memory."""
        for row in rows if self.offloaded else ():
            if row in self.offloaded:
                raise OffloadedError(f"seq: {self.seqs[row]} is offloaded, `restore` it first")

    def chain(self, row: int) -> Chain:
        """Returns the chain of a sequence's keys."""
        return Chain(self.prefix_keys[row][0], self.mixed.get(row, UNMIXED))

    def prefix_key(self, row: int) -> PrefixKey | None:
        """The key of a sequence's committed text; None if not all of its ids are known."""
        if not self.ids_known[row]:
            return None
        columns, behind = divmod(int(self.lengths[row]), self.page_size)
        tail = b""
        if behind:
            (page, *_), *_ = self.tables[self.at(row, np.asarray([columns]))]
            tail = self.index.tokens[page, :behind].tobytes()
        return PrefixKey.of(self.chain(row), self.prefix_keys[row][columns], columns, tail)

    def forget_behind(self, group: int, page: int, keep: int) -> None:
        """Makes a page's tokens from `keep` > 0 on unfindable: its only owner will write there."""
        self.pool.filled[page] = keep
        self.pool.renew(page)
        self.index.forget_full(group, page)

    def size_of(self, row: int) -> int:
        """Counts the tokens of a sequence's text, with prompt tokens not committed yet."""
        pending = self.pending.get(row)
        return int(self.lengths[row]) + (0 if pending is None else pending.size)

    def uncached(self, seq: int) -> Tokens:
        """Prompt ids of a sequence that are not committed yet."""
        return self.pending.get(self.row_of(seq), np.empty(0, dtype=np.int32))

    def let_grow(self, increment: Sequence[int], resize: Callable[[list[int]], None]) -> None:
        """Makes this a pool that grows: it begins with one increment of pages of each group.

        Args:
            increment: pages that each group grows by.
            resize: as in `PoolGrowth`.
        """
        self.growth = PoolGrowth(self.pool, self.reservations, increment, self.kinds, resize)

    def grow(self, short: Ints) -> bool:
        """Grows the pool if it can; whether each segment got the pages that it lacked."""
        return self.growth is not None and self.growth.cover(short)
