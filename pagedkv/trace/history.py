"""The history of every page of a trace, as runs of steps in which nothing changed."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from pagedkv.arrays import Ints
from pagedkv.errors import CorruptFileError

from .books import Books
from .read import Event, Trace

# Kinds of pages. A page of the last two kinds lost its owner to the host tier or to a policy, not
# because the owner ended; it has this kind until it is taken again.
FREE, LIVE, CACHED, OFFLOADED, EVICTED = range(5)
MOST_RUNS = 1 << 24  # a gigabyte; one line can change every page, so small files may have many
TOLD = 12  # the page shows at most so many events before a step


@dataclass(slots=True)
class Step:
    """One step, and counts of pages at its end.

    Attributes:
        begin, end: microseconds since the recording began.
        rows, tokens: sequences in the step, and tokens that it kept.
        live, shared, cached, existing, host: counts of pages; `host` counts pages of offloaded
            sequences and of prefixes in host memory.
        spared: bytes that sharing spared: the page's bytes for each reference but the first.
        events: the first events since the step before, in words.
    """

    begin: int
    end: int
    rows: int = 0
    tokens: int = 0
    live: int = 0
    shared: int = 0
    cached: int = 0
    existing: int = 0
    host: int = 0
    spared: int = 0
    events: list[str] = field(default_factory=list)


@dataclass
class History:
    """All steps of a trace, and the kinds of pages in them.

    Attributes:
        runs: `[n, 8]` by page and time: page, first step, steps, kind, owner (an index into
            `seqs`, or -1), references, filled slots in the first step, and how many slots each
            further step adds (0 or 1).
        seqs: ids of sequences, in the order in which they began.
        spans: for each sequence its id, and its begin and end in microseconds.
        marks: calls between steps: the time, the sequence or -1, and the call in words.
    """

    trace: Trace
    steps: list[Step]
    runs: Ints
    seqs: list[int]
    segments: list[tuple[str, int]]  # name and pages of each segment of the pool
    spans: list[tuple[int, int, int]]
    marks: list[tuple[int, int, str]]


def history_of(trace: Trace, check: bool = False) -> History:
    """Follows a trace and collects the history of its pages.

    Args:
        check: verify all sums after every event.
    """
    books = Books(trace)
    pages, steps, before = _Pages(books), list[Step](), list[str]()
    spans: list[tuple[int, int, int]] = []
    marks: list[tuple[int, int, str]] = []
    begun: dict[int, int] = {}
    begin = last = rows = 0
    for event in books.follow(check):
        op, last = event["op"], int(event["us"])
        pages.note(event)
        ended = [seq for seq in begun if seq not in books.tables] if "ended" in event else []
        spans += [(seq, begun.pop(seq), last) for seq in ended]
        if "rows" in event:
            begun = {seq: begun.get(seq, last) for seq in books.tables}
        if op == "prepare":
            begin, rows = last, len(books.stepped)
        elif op in ("commit", "abort"):
            before += ["aborted"] * (op == "abort")
            tokens = books.kept if op == "commit" else 0
            steps.append(Step(begin, last, rows, tokens, events=before[:TOLD]))
            before.clear()
            pages.sample(steps)
        else:
            words = _in_words(event)
            before += [words][: TOLD - len(before)]
            if op not in ("add", "load", "fork", "free"):  # spans show these
                name = words if op == "failed" else op
                marks += [(last, seq, name) for seq in books.named.tolist() or [-1]]
    if before or not steps:  # events behind the last step
        steps.append(Step(last, last, events=before))
        pages.sample(steps)
    spans += [(seq, since, last) for seq, since in begun.items()]
    segments = [(name, count) for name, _, count, _ in books.segments]
    runs = pages.runs(len(steps))
    return History(trace, steps, runs, list(pages.numbers), segments, spans, marks)


class _Pages:
    """Follows the pages of a trace, and cuts their lives into runs.

    Attributes:
        numbers: by sequence id, how many sequences began before it.
    """

    def __init__(self, books: Books) -> None:
        self._books, total = books, books.refs.size
        self.numbers: dict[int, int] = {}
        self._left = np.zeros(total, dtype=np.int64)
        # By page: kind, owner, references, slots filled at first, slots added in each step.
        self._now = np.zeros((5, total), dtype=np.int64)
        self._now[1] = -1
        self._since = np.zeros(total, dtype=np.int64)
        self._ended: list[Ints] = []
        self._count = 0  # of runs in `_ended`
        self._bytes = np.array([size for *_, size in books.segments])[books.segment_of]
        self._held = self._left > 0  # pages that had an owner before this event

    def note(self, event: Event) -> None:
        """Notes one event: sequences that began, and pages that were offloaded or evicted."""
        for seq in self._books.tables if "rows" in event else ():
            self.numbers.setdefault(seq, len(self.numbers))
        if event["op"] in ("restore", "free"):  # they have no offloaded pages any more
            back = [self.numbers.get(seq, -2) for seq in self._books.named.tolist()]
            self._left[(self._left == OFFLOADED) & np.isin(self._now[1], back)] = 0
        if event["op"] == "offload":
            self._left[self._held & (self._books.refs == 0)] = OFFLOADED
        self._left[self._books.evicted] = EVICTED
        if "host" in self._books.counts:
            self._held = self._books.refs > 0

    def sample(self, steps: list[Step]) -> None:
        """Notes and counts all pages as they are in the latest step."""
        books, step = self._books, len(steps) - 1
        refs, filled, counts = books.refs, books.filled, books.counts
        self._left[refs > 0] = 0
        kind = np.where(refs > 0, LIVE, np.where(filled > 0, CACHED, FREE))
        kind = np.where(self._left > 0, self._left, kind)
        owner = np.where(kind == FREE, -1, np.where(refs > 0, self._owners(), self._now[1]))
        self._cut(step, kind, owner, refs, np.where(kind == FREE, 0, filled))
        now = steps[-1]
        now.live, now.shared = int((refs > 0).sum()), int((refs > 1).sum())
        now.cached, now.existing = int(counts["cached"].sum()), int(counts["existing"].sum())
        now.host = int(counts["host"].sum()) if "host" in counts else 0
        now.spared = int(np.maximum(refs - 1, 0) @ self._bytes)

    def _owners(self) -> Ints:
        """Returns, for every page, its owner that began first, or -1."""
        pages, which = self._books.entries()
        number = np.array([self.numbers[seq] for seq in self._books.tables], np.int64)
        owner = np.full(self._since.size, -1, dtype=np.int64)
        owner[pages[::-1]] = number[which[::-1]]  # the last write counts
        return owner

    def _cut(self, step: int, kind: Ints, owner: Ints, refs: Ints, filled: Ints) -> None:
        """Ends the runs of pages that have changed, and begins new ones."""
        now, length = self._now, step - self._since
        grown = filled - now[3]
        begins = (length == 1) & (grown == 1) & (kind == LIVE)
        now[4][begins] = 1
        same = (kind == now[0]) & (owner == now[1]) & (refs == now[2]) & (grown == now[4] * length)
        now[4][begins & ~same] = 0
        changed = np.flatnonzero(~same)
        self._end(changed, step)
        self._since[changed] = step
        for values, found in zip(now, (kind, owner, refs, filled, np.zeros_like(kind))):
            values[changed] = found[changed]

    def _end(self, pages: Ints, step: int) -> None:
        some = pages[step > self._since[pages]]
        self._count += some.size
        if self._count > MOST_RUNS:
            path = self._books.trace.path
            raise CorruptFileError(f"{path}: pages change more than {MOST_RUNS:,} times")
        run = np.stack([some, self._since[some], step - self._since[some], *self._now[:, some]], 1)
        self._ended.append(run)

    def runs(self, steps: int) -> Ints:
        """Ends all runs after the last step and returns them without runs of free pages."""
        self._end(np.arange(self._since.size), steps)
        runs = np.concatenate(self._ended)
        runs = runs[runs[:, 3] != FREE]
        return runs[np.lexsort((runs[:, 1], runs[:, 0]))]


def _in_words(event: Event) -> str:
    seqs = event.get("seqs", event.get("seq"))
    if event["op"] == "failed":
        return f"{event.get('call')}: {event.get('error')}"
    if event["op"] == "fork":
        return f"fork {event.get('seq')} to {_few(seqs)}"
    return f"{event['op']} {_few(seqs)}" if seqs is not None else str(event["op"])


def _few(seqs: object) -> str:
    listed = seqs if isinstance(seqs, list) else [seqs]
    more = f" and {len(listed) - 4} more" if len(listed) > 5 else ""
    return ", ".join(map(str, listed[: 4 if more else 5])) + more
