"""Follows which sequence owns which page after each event of a trace, and checks the sums.

A trace says twice who owns a page: by the tables of sequences, and by the references that the pool
counts. The check compares both, and compares live, cached and free pages with all existing pages.
"""

from __future__ import annotations

import os
from array import array
from collections import deque
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

import numpy as np

from pagedkv.arrays import Ints
from pagedkv.errors import CorruptCacheError, CorruptFileError

from .read import Event, Trace

# Limits on what a file may claim. Larger tables would take gigabytes in the cache itself.
MOST_PAGES, MOST_ENTRIES, MOST_TABLES = 1 << 22, 1 << 26, 1 << 21
FAR = 1 << 40
BESIDE = {"host", "states"}  # counts of two kinds; the others have a number for each segment
COUNTS = BESIDE | {"existing", "free", "cached"}


class Counts(NamedTuple):
    """Counts of pages, sequences and tokens, as in `CacheStats`."""

    pages: int
    live: int
    shared: int
    cached: int
    free: int
    sequences: int
    tokens: int


class Table:
    """The pages that a sequence has in a layer group, from the place `first` of its table on."""

    __slots__ = ("first", "pages")

    def __init__(self) -> None:
        self.first, self.pages = 0, array("i")

    def cut(self, first: int, end: int) -> None:
        """Keeps the pages at places `first .. end`; a text that begins anew keeps none."""
        kept = slice(first - self.first, max(end - self.first, 0))
        self.pages = self.pages[kept] if first >= self.first else array("i")
        self.first = first

    def put(self, place: int, page: int, count: int) -> None:
        """Puts consecutive pages at places within the table, or at its end."""
        at = place - self.first
        if not 0 <= at <= len(self.pages):
            raise ValueError(f"a page at place {place}, the table has none before it")
        self.pages[at : at + count] = array("i", range(page, page + count))


class Books:
    """The state of all pages after the events so far.

    Attributes:
        segments: for each segment of the pool: name, layer group, pages, bytes of a page.
        refs, filled: by page, its references and its committed slots.
        tables, lengths: by sequence, in the order in which they began.
        slots: by sequence, the slot of its recurrent state, or -1.
        stepped, new, kept: the sequences of the latest step, how many tokens it adds to each, and
            how many tokens the latest commit kept in all.
        named, evicted: sequences that the latest event names, and pages that a policy evicted.
        counts: the pool's counts after the latest event.
    """

    def __init__(self, trace: Trace) -> None:
        self.trace = trace
        try:
            self._read(trace.header)
        except (ValueError, LookupError, TypeError, OverflowError) as error:
            why = f"{type(error).__name__}: {error}"
            raise CorruptFileError(f"{trace.path}: line 1 describes no cache: {why}") from None

    def _read(self, header: Event) -> None:
        self.page_size = _whole(header["page_size"], 1, 1 << 30)
        last = len(header["segments"]) - 1  # each group has one
        self.segments = [
            (str(name), _whole(group, 0, last), _whole(pages, 0, MOST_PAGES), _bytes(size))
            for name, group, pages, size in header["segments"]
        ]
        sizes = [pages for _, _, pages, _ in self.segments]
        total = _whole(sum(sizes), 1, MOST_PAGES)
        self.segment_of = np.repeat(np.arange(len(sizes)), sizes)
        self._num_groups = 1 + max(group for _, group, _, _ in self.segments)
        self.refs, self.filled = np.zeros((2, total), dtype=np.int64)
        self.tables: dict[int, list[Table]] = {}
        self.lengths: dict[int, int] = {}
        self.slots: dict[int, int] = {}
        self.stepped: list[int] = []
        self.new = self.named = self.evicted = self._held = self.refs[:0]
        self.kept = 0
        self.counts: dict[str, Ints] = {}
        header["existing"], header["free"], header["cached"]  # raises if one is missing
        self._count(header)

    # ------------------------------------------------------------------ events

    def follow(self, check: bool = False) -> Iterator[Event]:
        """Applies each event of the trace, then yields it.

        Args:
            check: verify all sums after every event.
        """
        for line, event in self.trace:
            where = f"{self.trace.path}: line {line}, {event['op']}"
            try:
                self._apply(event)
            except (ValueError, LookupError, TypeError, OverflowError) as error:
                why = f"{type(error).__name__}: {error}"
                raise CorruptFileError(f"{where}, happened to no cache: {why}") from None
            if check and (wrong := self._wrong()):
                raise CorruptCacheError(f"{where}, does not add up: {wrong}")
            yield event

    def _apply(self, event: Event) -> None:
        self.named = _numbers(event, "seqs" if "seqs" in event else "seq")
        self.evicted = self._pages(_numbers(event, "evicted"))
        if event["op"] == "prepare":
            if "seqs" in event:
                self.stepped = self.named.tolist()
            self.new = np.broadcast_to(_numbers(event, "new"), len(self.stepped))
            self._held = self._pages(_numbers(event, "held"))
        elif event["op"] == "commit":
            kept = _numbers(event, "kept") if "kept" in event else self.new
            kept = np.broadcast_to(kept, len(self.stepped))
            self.kept = int(kept.sum())
            self._keep(kept.tolist())
        if event["op"] in ("commit", "abort"):
            self._held = self._held[:0]
        for seq in _numbers(event, "ended").tolist():
            del self.tables[seq], self.lengths[seq]
            self.slots.pop(seq, None)
        self._take_rows(event)
        self.slots.update(_numbers(event, "slots", 2, low=-1).tolist())
        for page, count, refs, filled in self._runs(event, "pages", 4, 0):
            self.refs[page : page + count], self.filled[page : page + count] = refs, filled
        self._count(event)

    def _keep(self, kept: list[int]) -> None:
        """Moves the lengths of a step's sequences, and fills the slots that it wrote."""
        pages, filled, size = array("i"), list[int](), self.page_size
        for seq, new, count in zip(self.stepped, self.new.tolist(), kept):
            if not count:
                continue
            start = self.lengths[seq]
            last, columns = start + count - 1, -(-(start + new) // size)
            for table in self.tables[seq]:  # it ends where the text ends, even if pages are missing
                begin = start // size - columns + len(table.pages)
                if begin < 0 or count > new:
                    raise ValueError(f"sequence {seq} has no pages for its new tokens")
                part = table.pages[begin : begin + last // size - start // size + 1]
                pages += part
                filled += [size] * (len(part) - 1) + [last % size + 1]
            self.lengths[seq] = last + 1
        np.maximum.at(self.filled, pages, filled)

    def _take_rows(self, event: Event) -> None:
        """Changes sequences: their lengths, where their tables begin and end, and entries."""
        rows = _numbers(event, "rows", 2 + 2 * self._num_groups).tolist()
        for seq, length, *ends in rows:
            self.lengths[seq] = length
            tables = self.tables.setdefault(seq, [Table() for _ in range(self._num_groups)])
            for table, first, end in zip(tables, ends[::2], ends[1::2]):
                table.cut(first, end)
        for place, page, count, seq, group in self._runs(event, "entries", 5, 1):
            self.tables[seq][group].put(place, page, count)
        for seq, _, *ends in rows:
            for table, first, end in zip(self.tables[seq], ends[::2], ends[1::2]):
                if len(table.pages) != max(end - first, 0):
                    raise ValueError(f"sequence {seq} has no page at places up to {end}")
        every = (table for tables in self.tables.values() for table in tables)
        if "entries" in event and sum(len(table.pages) for table in every) > MOST_ENTRIES:
            raise ValueError(f"tables have more than {MOST_ENTRIES:,} entries")
        if len(self.tables) * self._num_groups > MOST_TABLES:
            raise ValueError(f"sequences have more than {MOST_TABLES:,} tables")

    def _runs(self, event: Event, name: str, width: int, page: int) -> list[list[int]]:
        """Returns rows of numbers; number `page` is a page, the next a count of pages from it."""
        runs = _numbers(event, name, width)
        self._pages(runs[:, page : page + 2].sum(1) - 1)
        if runs[:, page + 1].sum() > MOST_ENTRIES:
            raise ValueError(f"{name}: more than {MOST_ENTRIES:,} of them")
        return runs.tolist()

    def _pages(self, pages: Ints) -> Ints:
        if pages.size and not 0 <= pages.min() <= pages.max() < self.refs.size:
            raise ValueError(f"page {pages.max()} of {self.refs.size}")
        return pages

    def _count(self, event: Event) -> None:
        for name in COUNTS.intersection(event):
            self.counts[name] = _numbers(event, name)
            if self.counts[name].size != (2 if name in BESIDE else len(self.segments)):
                raise ValueError(f"{name}: expected other numbers than {event[name]}")

    # ------------------------------------------------------------------ what they say

    def entries(self) -> tuple[Ints, Ints]:
        """Returns the pages of all tables, and the index in `tables` of each page's sequence."""
        parts = [np.array(t.pages) for tables in self.tables.values() for t in tables]
        owner = np.repeat(np.arange(len(self.tables)), self._num_groups)
        sizes = [part.size for part in parts]
        return np.concatenate([self.refs[:0], *parts]), np.repeat(owner, sizes)

    def _wrong(self) -> str:
        """Describes the first contradiction; empty if there is none."""
        owners = np.bincount(np.append(self.entries()[0], self._held), minlength=self.refs.size)
        if (owners != self.refs).any():
            page = int((owners != self.refs).argmax())
            return f"page {page} has {self.refs[page]} references and {owners[page]} owners"
        of = partial(np.bincount, minlength=len(self.segments))
        live, cached = self.refs > 0, (self.refs == 0) & (self.filled > 0)
        found = {"cached": of(self.segment_of[cached])}
        found["free"] = self.counts["existing"] - of(self.segment_of[live]) - found["cached"]
        for name, count in found.items():
            if (count != self.counts[name]).any():
                return f"of each segment {count} pages are {name}, counted were {self.counts[name]}"
        if (self.filled > self.page_size).any():
            return f"page {self.filled.argmax()} has {self.filled.max()} tokens"
        used = len({slot for slot in self.slots.values() if slot >= 0})
        if used > self.counts.get("states", [used])[0]:
            return f"{used} states of sequences, {self.counts['states'][0]} are in use"
        return ""

    def stats(self) -> Counts:
        """Returns the counts that `PagedKVCache.stats` had after the latest event."""
        return Counts(
            pages=int(self.counts["existing"].sum()),
            live=int((self.refs > 0).sum()),
            shared=int((self.refs > 1).sum()),
            cached=int(self.counts["cached"].sum()),
            free=int(self.counts["free"].sum()),
            sequences=len(self.tables),
            tokens=sum(self.lengths.values()),
        )


def _bytes(number: object) -> float:
    if not isinstance(number, (int, float)) or not 0 <= number < FAR:
        raise ValueError(f"expected bytes of a page, got {number}")
    return float(number)


def _whole(number: object, low: int, high: int) -> int:
    if not isinstance(number, int) or not low <= number <= high:
        raise ValueError(f"expected a number of {low:,} to {high:,}, got {number}")
    return number


def _numbers(event: Event, name: str, width: int = 1, low: int = 0) -> Ints:
    """Returns a field's whole numbers, `[n]` or `[n, width]`; none if the event lacks the field."""
    if name not in event:
        return np.zeros((0, width)[: 1 + (width > 1)], dtype=np.int64)
    found = np.asarray(event[name])
    if found.size and (found.dtype.kind not in "iu" or not low <= found.min() <= found.max() < FAR):
        raise ValueError(f"{name}: expected whole numbers")
    found = found.astype(np.int64)
    return found.reshape(-1) if width == 1 else found.reshape(-1, width)


def replay(path: str | os.PathLike[str], *, check: bool = True) -> Books:
    """Follows a trace to its end, and returns the state of the pages there.

    Args:
        check: verify after every event that each reference has an owner, and that live, cached and
            free pages add up to all existing pages.

    Raises:
        CorruptFileError: the file is damaged, or no cache wrote it.
        CorruptCacheError: the pages of the recorded cache do not add up.
    """
    books = Books(Trace(path))
    deque(books.follow(check), maxlen=0)
    return books
