"""What every page was in every step of a trace, as runs of steps in which nothing changed."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pagedkv.arrays import Ints

from .read import Event, Trace
from .replay import Replay

# What a page may be. The last two lost their owner otherwise than by its end, until they are taken
# again: to the host, or to a policy.
FREE, LIVE, CACHED, OFFLOADED, EVICTED = range(5)
KINDS = {"offloaded": OFFLOADED, "evicted": EVICTED}


@dataclass
class Step:
    """One step, and the pages as they were when it had ended.

    Attributes:
        begin, end: microseconds since the recording began.
        rows, tokens: sequences in the step, and tokens that it kept.
        live, shared, cached, existing, host: counts of pages; `host` are those of offloaded
            sequences and of prefixes in host memory.
        spared: bytes that sharing spared: of all references to a page but the first.
        events: what happened since the step before, in words.
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
    """All steps of a trace, and what pages were in them.

    Attributes:
        runs: `[n, 8]` by page and time: page, first step, steps, kind, owner (an index into
            `seqs`, or -1), references, filled slots in the first step, and slots more in each
            further step (0 or 1).
        seqs: ids of sequences, in the order they began.
    """

    trace: Trace
    steps: list[Step]
    runs: Ints
    seqs: list[int]
    segments: list[tuple[str, int]]  # name and pages of each segment of the pool


def history_of(trace: Trace, check: bool = False) -> History:
    """Replays a trace and collects what pages were.

    Args:
        check: verify every invariant after every event.
    """
    run = Replay(trace, check)
    with trace.configuration():
        pages, segments = _Pages(run), _segments(run)
    steps, before = list[Step](), list[str]()
    begun, last = 0, 0
    rows = tokens = 0
    for event in run:
        pages.note(event)
        op, last = event["op"], event.get("us", last)
        if op == "prepare":
            begun, rows = last, len(run.step.seqs)
        elif op in ("commit", "abort"):
            plan = run.step._plan
            kept = event.get("kept", plan.new) if op == "commit" else 0
            tokens = int(np.broadcast_to(kept, rows).sum())
            before += ["aborted"] * (op == "abort")
            steps.append(Step(begun, last, rows, tokens, events=before))
            before = []
            pages.sample(steps)
        else:
            before.append(_in_words(event))
    if before or not steps:  # what happened behind the last step
        steps.append(Step(last, last, events=before))
        pages.sample(steps)
    return History(trace, steps, pages.runs(len(steps)), pages.seqs, segments)


class _Pages:
    """Follows the pages of a replay, and cuts their lives into runs."""

    def __init__(self, run: Replay) -> None:
        self._tables, self._run = run.cache._tables, run
        total = self._tables.pool.refcount.size - 1
        self.seqs: list[int] = []
        self._number: dict[int, int] = {}  # of each sequence, by its id
        self._left = np.zeros(total, dtype=np.int64)
        # By page: kind, owner, references, filled at first, more in each step.
        self._now = np.zeros((5, total), dtype=np.int64)
        self._now[1] = -1
        self._since = np.zeros(total, dtype=np.int64)
        self._ended: list[Ints] = []
        bytes_of = np.asarray(run.trace.config["bytes_per_page"], dtype=np.int64)
        self._bytes = bytes_of[self._tables.pool.group_of[:-1]]

    def note(self, event: Event) -> None:
        """Takes in one event: sequences that it began, and pages that it took from them."""
        if event["op"] in ("add", "load", "fork"):
            for seq in event["seqs"] if event["op"] == "fork" else [event["seq"]]:
                self._number[seq] = len(self.seqs)
                self.seqs.append(seq)
        if event["op"] in ("restore", "free"):  # nothing of them is elsewhere any more
            back = [self._number[seq] for seq in event["seqs"]]
            self._left[(self._left == OFFLOADED) & np.isin(self._now[1], back)] = 0
        for how, pages in self._run.left:
            self._left[pages] = KINDS[how]

    def sample(self, steps: list[Step]) -> None:
        """Looks at all pages as they are in the latest step, and counts them."""
        pool, step = self._tables.pool, len(steps) - 1
        refs, filled = pool.refcount[:-1].astype(np.int64), pool.filled[:-1].astype(np.int64)
        cached = pool._stamp[:-1] >= 0
        self._left[refs > 0] = 0
        kind = np.where(refs > 0, LIVE, np.where(cached, CACHED, FREE))
        kind = np.where(self._left > 0, self._left, kind)
        owner = np.where(kind == FREE, -1, np.where(refs > 0, self._owners(), self._now[1]))
        self._cut(step, kind, owner, refs, np.where(kind == FREE, 0, filled))
        now, host = steps[-1], self._run.cache._tier
        now.live, now.shared = int((refs > 0).sum()), int((refs > 1).sum())
        now.cached, now.existing = int(cached.sum()), int(pool.existing.sum())
        now.host = sum(host.counts()[::2]) if host is not None else 0
        now.spared = int(np.maximum(refs - 1, 0) @ self._bytes)

    def _owners(self) -> Ints:
        """The sequence that began first of those that own a page, for every page."""
        tables = self._tables
        rows = tables.live_rows()
        number = np.array([self._number[seq] for seq in tables.seqs[rows].tolist()], np.int64)
        order = np.argsort(-number)  # the last to be written stays
        rows, number = rows[order], number[order]
        columns = int(tables.num_pages[rows].max(initial=0))
        owner = np.full(self._since.size + 1, -1, dtype=np.int64)
        for held in tables.tables[:, rows, :columns]:
            owner[held] = number[:, None]  # -1, of no page, is the element behind the pages
        return owner[:-1]

    def _cut(self, step: int, kind: Ints, owner: Ints, refs: Ints, filled: Ints) -> None:
        """Ends the runs of pages that are not what they were, and begins others."""
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
        run = np.stack([some, self._since[some], step - self._since[some], *self._now[:, some]], 1)
        self._ended.append(run)

    def runs(self, steps: int) -> Ints:
        """All runs, ended after the last step; those of free pages are left out."""
        self._end(np.arange(self._since.size), steps)
        runs = np.concatenate(self._ended)
        runs = runs[runs[:, 3] != FREE]
        return runs[np.lexsort((runs[:, 1], runs[:, 0]))]


def _segments(run: Replay) -> list[tuple[str, int]]:
    config, named = run.trace.config, []
    counts = iter(run.cache._tables.pool.num_pages.tolist())
    for group in config["groups"]:
        layers, window = group["layers"], group["window"]
        name = f"layer {layers[0]}" if len(layers) == 1 else f"{len(layers)} layers"
        name += f", window {window}" if window else ""
        named.append((name, next(counts)))
        if config["staged"]:
            named.append((f"{name}, staging", next(counts)))
    return named


def _in_words(event: Event) -> str:
    seqs: Any = event.get("seqs", event.get("seq"))
    if event["op"] == "failed":
        return f"{event['call']}: {event['error']}"
    if event["op"] == "fork":
        return f"fork {event['seq']} to {_few(seqs)}"
    return f"{event['op']} {_few(seqs)}" if seqs is not None else str(event["op"])


def _few(seqs: Any) -> str:
    listed = seqs if isinstance(seqs, list) else [seqs]
    more = f" and {len(listed) - 4} more" if len(listed) > 5 else ""
    return ", ".join(map(str, listed[: 4 if more else 5])) + more
