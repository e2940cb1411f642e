"""Which sequence owns which pages: ids, lengths, page tables, reservations.

All state is in numpy arrays with one row per sequence, page tables with a leading group axis:
`tables[group, row, column]` is the page that holds positions `column * P ...` of the sequence, or
-1 where there is none (beyond the end, or dropped behind a window). Where a policy evicted pages
(`evict.py`) those behind them have moved up: `at` says where a column of the text is now, and
`column_of` where in its text a page belongs. The methods here change ownership between steps; a
step itself is in `step.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from pagedkv.arrays import Ints, Tokens
from pagedkv.errors import (
    OffloadedError,
    SequenceTooLongError,
    TooManySequencesError,
    UnknownSequenceError,
)

from .afford import affordable
from .dirty import Changes
from .growth import PoolGrowth
from .out_of_pages import out_of_pages
from .pool import PagePool
from .prefix import Match, PrefixIndex
from .reservations import Reservations
from .reuse import Reuse


class PageTables:
    """Sequences and their pages.

    Args:
        num_pages: pages of each group's pool.
        windows: window of each group, None for a group that keeps everything.
        reserves: which groups can run out (a window group with room for every window cannot).
        page_size: token slots per page.
        max_sequences: rows.
        max_length: tokens a sequence may reach.
        staging: staging pages of each group, behind the others; none if empty (`staging.py`).
        rollback: tokens kept behind a window so that they can be taken back.
        fingerprint: identity of the weights.
        budget: whole pages of a sequence that stay in each group; None: all.
    """

    def __init__(
        self,
        num_pages: Sequence[int],
        windows: Sequence[int | None],
        reserves: Sequence[bool],
        *,
        page_size: int,
        max_sequences: int,
        max_length: int,
        staging: Sequence[int] = (),
        rollback: int = 0,
        fingerprint: bytes = b"",
        budget: int | None = None,
    ) -> None:
        self.page_size = page_size
        self.max_sequences = max_sequences
        self.max_length = max_length
        self.windows = list(windows)
        self.rollback = rollback
        self.budget = budget
        self.staged = any(staging)
        # Stretches of the pool: one a group, or its coded pages and then its staging pages.
        stretches = [n for both in zip(num_pages, staging) for n in both] or list(num_pages)
        self.kinds = len(stretches) // len(num_pages)
        self.index = PrefixIndex(self.windows, sum(stretches), page_size, fingerprint)
        self.reuse = Reuse(self.index, self.kinds)
        self.pool = PagePool(stretches, self.index.findable, self.reuse)
        self.reuse.watch(self.pool)
        self.base = self.pool.base[:: self.kinds]  # `[groups + 1]`, first page of each
        self.first_staging = self.pool.base[1 :: self.kinds]  # beyond the group without any

        width = -(-max_length // page_size)
        if not any(self.windows):  # every entry is a page of its own
            width = min(width, max(num_pages) + max(staging, default=0))
        self.tables = np.full((len(num_pages), max_sequences, width), -1, dtype=np.int64)
        self.first = np.zeros((len(num_pages), max_sequences), dtype=np.int64)  # first kept column
        self.gone = np.zeros((len(num_pages), max_sequences), dtype=np.int64)  # evicted pages
        self.num_pages = np.zeros(max_sequences, dtype=np.int64)  # columns of the text
        self.column_of = np.zeros(sum(stretches) + 1, dtype=np.int64)  # of each page, in its text
        self.lengths = np.zeros(max_sequences, dtype=np.int64)  # committed tokens
        self.named = np.zeros(max_sequences, dtype=bool)  # the ids of all tokens are known
        # A tail page that another sequence may own as well, or that holds findable tokens past
        # this one's end: the next write has to look before it writes in place.
        self.look = np.zeros(max_sequences, dtype=bool)
        self.chains: list[list[bytes]] = [[] for _ in range(max_sequences)]
        self.pending: dict[int, Tokens] = {}  # prompt ids not committed yet, by row
        self.models: dict[int, bytes] = {}  # fingerprints that rows are marked with

        # Complete pages behind the first: what of a sequence is coded, or about to be.
        self.num_coded = np.zeros_like(self.num_pages) if self.staged else self.num_pages
        self.gone_coded = np.zeros_like(self.gone) if self.staged else self.gone
        binding = np.zeros(len(stretches), dtype=bool)
        binding[:: self.kinds] = reserves
        held = self.num_coded, self.gone_coded
        self.reservations = Reservations(self.pool, binding, *held, not self.staged)
        self.growth: PoolGrowth | None = None  # of a pool that is not fixed
        self.ids = np.full(max_sequences, -1, dtype=np.int64)
        self._next_id = np.arange(max_sequences)
        self._free_rows = list(range(max_sequences - 1, -1, -1))
        self._mark = np.zeros(max_sequences, dtype=np.int64)
        self.changed = Changes(self.tables.shape)
        self.tokens_computed = 0
        self.tokens_reused = 0
        self.away: dict[int, Any] = {}  # sequences whose pages are in host memory, by row
        self.pages_evicted = 0
        self.compacted = False  # pages were evicted from some sequence, here or elsewhere

    def at(self, rows: int | Ints, columns: Ints) -> tuple[Any, ...]:
        """Where in `tables` the entries of these columns of texts are now: of each group, `[n]`."""
        if not self.compacted:
            return slice(None), rows, columns
        gone = self.gone[:, rows]
        groups = np.arange(len(gone))[:, None]
        return groups, rows, columns - (gone if gone.ndim == 2 else gone[:, None])

    # ------------------------------------------------------------------ sequences and rows

    def rows_of(self, seqs: Any) -> Ints:
        """Rows of distinct live sequences: `[B]`."""
        ids = np.asarray(seqs if hasattr(seqs, "dtype") else list(seqs))
        if ids.ndim != 1 or not ids.size:
            raise ValueError(f"seqs: expected a list of sequence ids, got {seqs!r}")
        if ids.dtype.kind not in "iu":
            raise TypeError(f"seqs: expected integer ids, got {ids.dtype}")
        rows: Ints = ids % self.max_sequences
        if not (self.ids[rows] == ids).all() or ids.min() < 0:  # a free row has id -1
            stranger = next(int(s) for s, r in zip(ids, rows) if self.ids[r] != s or s < 0)
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
        if self.ids[row] != seq or seq < 0:
            raise UnknownSequenceError(f"seq: {seq} is not a live sequence of this cache")
        return row

    def is_live(self, seq: int) -> bool:
        """Whether an id that was given out is still in use."""
        return seq >= 0 and bool(self.ids[seq % self.max_sequences] == seq)

    def live_rows(self) -> Ints:
        """Rows in use."""
        return np.flatnonzero(self.ids >= 0)

    # ------------------------------------------------------------------ add, fork

    def add(
        self, tokens: Tokens | None = None, *, salt: bytes = b"", max_tokens: int | None = None
    ) -> int:
        """Starts a sequence, on the pages of the longest findable prefix of `tokens`."""
        root = self.index.root(salt)
        match = Match(0, [], np.empty((len(self.windows), 0), dtype=np.int64))
        size = 0 if tokens is None else tokens.size
        if tokens is not None and not size:
            raise ValueError("tokens: expected at least one id, got none")
        self.require_fits(size, max_tokens)
        if not self._free_rows:
            raise TooManySequencesError(
                f"max_sequences: all {self.max_sequences} are in use; free one or allow more"
            )
        if tokens is not None and size > 1:
            # The last token is always computed: its logits are what the caller is after.
            match = self.index.match(root, tokens[:-1], self.pool.filled)
        limit = self.limit_of(max_tokens, size)
        match, owners = affordable(self, match, limit)

        row = self._free_rows.pop()
        columns = match.pages.shape[1]
        for pages in match.pages:
            self.pool.share(pages[pages >= 0])
        self._set_table(row, match.pages)
        if self.staged:
            self.num_coded[row] = self.coded_of(match.length)
        self.lengths[row] = match.length
        self.named[row] = True
        self.chains[row] = [root, *match.keys]
        self.look[row] = match.length < columns * self.page_size
        self.look[owners] = True
        self.reservations.share_tail(owners)
        if limit:
            self.reservations.start(row, limit, bool(self.look[row]))
        if tokens is not None:
            self.pending[row] = tokens[match.length :].copy()
        self.tokens_reused += match.length
        return self._name(np.asarray([row]))[0]

    def limit_of(self, max_tokens: int | None, size: int) -> int:
        """Pages that a reservation of so many tokens sets aside for a text of `size` tokens."""
        limit = 0 if max_tokens is None else -(-max_tokens // self.page_size) - self.staged
        if self.budget is not None:  # what is evicted in between need not be there at the end
            limit = min(limit, max(self.budget + 1, -(-size // self.page_size)))
        return limit

    def require_fits(self, size: int, max_tokens: int | None) -> None:
        if max_tokens is not None and max_tokens < max(size, 1):
            raise ValueError(f"max_tokens: expected at least the text's {size}, got {max_tokens}")
        longest = max(size, max_tokens or 0)
        if longest > self.max_length:
            what = "tokens" if longest == size else "max_tokens"
            raise SequenceTooLongError(
                f"{what}: a sequence can have {self.max_length} tokens in this cache, "
                f"got {longest}; this can never fit"
            )

    def fork(self, seq: int, n: int = 1) -> list[int]:
        """Starts n sequences on all pages of `seq`."""
        source = self.row_of(seq)
        self.require_here([source])
        if isinstance(n, bool) or not isinstance(n, (int, np.integer)):
            raise TypeError(f"n: expected an int, got {type(n).__name__}")
        if n < 1:
            raise ValueError(f"n: expected at least 1, got {n}")
        if len(self._free_rows) < n:
            raise TooManySequencesError(
                f"max_sequences: {n} forks asked, {len(self._free_rows)} of "
                f"{self.max_sequences} rows are free"
            )
        columns = int(self.num_pages[source])
        partial = bool(self.lengths[source] < columns * self.page_size)
        if partial:
            if self.reservations.limit[source] and not self.staged:
                self._reserve_extra(source)
            self.look[source] = True
        forks = [self._free_rows.pop() for _ in range(n)]
        rows = np.asarray(forks)
        pages = self.tables[:, source, :columns]  # fewer, and -1, where pages were evicted
        self.pool.add_owners(pages, n)
        self.tables[:, rows, :columns] = pages[:, None]
        most = columns - int(self.gone[:, source].min()) if self.compacted else columns
        self.changed.note(slice(None), rows[:, None], np.arange(most))
        self.num_pages[rows] = columns
        self.num_coded[rows] = self.num_coded[source]
        self.first[:, rows] = self.first[:, source, None]
        self.gone[:, rows] = self.gone[:, source, None]
        self.gone_coded[:, rows] = self.gone_coded[:, source, None]
        self.lengths[rows] = self.lengths[source]
        self.named[rows] = self.named[source]
        self.look[rows] = self.look[source]
        for row in forks:
            self.chains[row] = self.chains[source].copy()
            if source in self.pending:
                self.pending[row] = self.pending[source]
            if source in self.models:
                self.models[row] = self.models[source]
        self.tokens_reused += n * int(self.lengths[source])
        return self._name(rows)

    def _reserve_extra(self, row: int) -> None:
        """Sets a page aside for a reserved sequence whose tail is about to be shared."""
        rows = np.asarray([row])
        short = self.reservations.missing_extra(rows) - self.reservations.available()
        short[~self.reservations.binding] = 0
        if short.max() > 0 and not self.grow(short):
            group = int(short.argmax())
            raise out_of_pages(self, "fork of a reserved sequence", group, 1, 0)
        self.reservations.share_tail(rows)

    def _name(self, rows: Ints) -> list[int]:
        ids = self._next_id[rows]
        self.ids[rows] = ids
        self._next_id[rows] = ids + self.max_sequences
        return ids.tolist()

    def _set_table(self, row: int, pages: Ints) -> None:
        columns = pages.shape[1]
        self.tables[:, row, :columns] = pages
        self.num_pages[row] = columns
        self.first[:, row] = (pages < 0).sum(1)
        self.changed.note(slice(None), np.asarray([row]), np.arange(columns))

    def bound_promises(self, rows: Ints) -> None:
        """After an eviction: a sequence whose prompt is computed needs no more than its budget."""
        if not self.reservations.count:
            return
        for row in rows.tolist():
            if self.budget is not None and row not in self.pending:
                self.reservations.cap(row, self.budget + 1)
        self.reservations.update(rows)
        # Where groups gave different pages up, one may have no room for what all are promised.
        self.reservations.settle(rows.tolist())

    # ------------------------------------------------------------------ truncate, free

    def require_truncatable(self, seq: int, length: int) -> int:
        """The row of a sequence that can be shortened to `length` tokens, else raises."""
        row = self.row_of(seq)
        self.require_here([row])
        if isinstance(length, bool) or not isinstance(length, (int, np.integer)):
            raise TypeError(f"n: expected an int, got {type(length).__name__}")
        if not 0 <= length <= self.lengths[row]:
            raise ValueError(f"n: expected 0..{self.lengths[row]} for {seq}, got {length}")
        for first, window in zip(self.first[:, row], self.windows):
            if window is not None and 0 < length < self.lengths[row]:
                needed = max(0, length - window)
                if first > needed // self.page_size:
                    raise ValueError(
                        f"n: {length} tokens of {seq} need positions from {needed}, its window of "
                        f"{window} has dropped those before {first * self.page_size}; set "
                        "`rollback` to keep more"
                    )
        if 0 < length < self.lengths[row] and length < (kept_from := self._intact_from(row)):
            raise ValueError(
                f"n: expected {kept_from}..{self.lengths[row]} or 0 for {seq}, got {length}: of "
                "the tokens before, some were evicted"
            )
        return row

    def _intact_from(self, row: int) -> int:
        """The position behind the last token that was evicted."""
        columns = int(self.num_pages[row])
        ends = [0]
        for group in np.flatnonzero(self.gone[:, row]).tolist():
            pages = self.tables[group, row, : columns - int(self.gone[group, row])]
            held = np.zeros(columns, dtype=bool)
            held[self.column_of[pages]] = True
            ends.append(int(np.flatnonzero(~held)[-1]) + 1)
        return max(ends) * self.page_size

    def truncate(self, seq: int, length: int) -> None:
        """Shortens a sequence to `length` tokens, dropping its references to later pages."""
        row = self.require_truncatable(seq, length)
        if length == self.lengths[row]:
            return
        columns = -(-length // self.page_size)
        most = int(self.num_pages[row] - self.gone[:, row].min())
        if length == 0:
            self.gone[:, row] = self.gone_coded[:, row] = 0
        where = self.at(row, np.arange(columns, int(self.num_pages[row]) if columns else most))
        gone = self.tables[where]
        self.tables[where] = -1
        # What others keep, or a window dropped long ago, does not come back to the pool now.
        windowed = np.asarray([window is not None for window in self.windows])[:, None]
        absent = (self.pool.refcount[gone] > 1) | ((gone < 0) & windowed)
        absent &= gone < self.first_staging[:, None]
        lost = int(absent[self.reservations.binding[:: self.kinds]].sum(1).max(initial=0))
        self.pool.drop(gone[:, ::-1].reshape(-1))
        self.num_pages[row] = columns
        if self.staged:
            self.num_coded[row] = self.coded_of(length)
        self.first[:, row] = np.minimum(self.first[:, row], columns)
        self.lengths[row] = length
        del self.chains[row][length // self.page_size + 1 :]
        self.pending.pop(row, None)
        self.look[row] = True
        tail = self.tables[self.at(row, np.arange(max(0, columns - 1), columns))]
        shared = bool(length % self.page_size and (self.pool.refcount[tail] > 1).any())
        self.reservations.shorten(row, lost, shared)

    def free(self, seqs: Any) -> None:
        """Ends sequences; their committed prefixes stay findable until the pages are reused."""
        rows = self.rows_of(seqs)
        for row in rows.tolist():
            columns = int(self.num_pages[row])
            pages = self.tables[:, row, :columns]
            self.pool.drop(pages[:, ::-1].reshape(-1))  # the end of a text is reused first
            pages[:] = -1
            self.pending.pop(row, None)
            self.models.pop(row, None)
            self.chains[row] = []
            self._free_rows.append(row)
        self.num_pages[rows] = self.num_coded[rows] = self.lengths[rows] = 0
        self.first[:, rows] = self.gone[:, rows] = self.gone_coded[:, rows] = 0
        self.look[rows] = False
        self.reservations.end(rows)
        self.ids[rows] = -1
        if self.changed.many:
            self.changed.forget_ended(self.ids >= 0, self.num_pages - self.gone.min(0))

    def clear_prefixes(self) -> None:
        """Forgets every findable prefix; live sequences are never published again."""
        self.index.clear()
        self.pool.release_cached()
        self.named[self.live_rows()] = False

    # ------------------------------------------------------------------ shared helpers

    def coded_of(self, length: Any) -> Any:
        """Complete pages behind the first of a text, or texts, of so many tokens."""
        return np.maximum(length // self.page_size - 1, 0)

    def kinds_of(self, group: int, pages: Ints) -> Ints:
        """Of each page of a group: 1 if it is a staging page, else 0."""
        return (pages >= self.first_staging[group]).astype(np.int64)

    def require_here(self, rows: Iterable[int]) -> None:
        """Raises `OffloadedError` if the pages of one of some sequences are in host memory."""
        for row in rows if self.away else ():
            if row in self.away:
                raise OffloadedError(f"seq: {self.ids[row]} is offloaded, `restore` it first")

    def size_of(self, row: int) -> int:
        """Tokens of a sequence's text, those of a prompt that are not committed yet included."""
        pending = self.pending.get(row)
        return int(self.lengths[row]) + (0 if pending is None else pending.size)

    def uncached(self, seq: int) -> Tokens:
        """Prompt ids of a sequence that are not committed yet."""
        return self.pending.get(self.row_of(seq), np.empty(0, dtype=np.int32))

    def let_grow(self, step: Sequence[int], resize: Callable[[list[int]], None]) -> None:
        """Has the pool begin with one step of pages of each group and grow; see `PoolGrowth`."""
        self.growth = PoolGrowth(self.pool, self.reservations, step, self.kinds, resize)

    def grow(self, short: Ints) -> bool:
        """Whether each stretch now has the pages it is short of, because the pool grew."""
        return self.growth is not None and self.growth.cover(short)
