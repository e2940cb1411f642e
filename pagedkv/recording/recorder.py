"""Writes an event at the end of every call of a cache: its arguments, and what it changed.

No caller tells the recorder what it changed. The page tables note what they touch
(`pages/notes.py`), and the recorder compares rows with the rows before. So it misses no change,
and a trace is true even if a call failed or was interrupted. An event holds pages, lengths and
counts, no token and no text.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np

from pagedkv.arrays import Ints
from pagedkv.config import CacheConfig
from pagedkv.interrupt import Uninterrupted
from pagedkv.pages.plan import PagePlan
from pagedkv.pages.tables import PageTables

from .lines import TraceFile

SEQS, LENGTHS, PAGES, EVICTED, FIRST = range(5)  # indices into `_rows`
FEW = 32  # up to so many numbers, a Python loop is faster than numpy


class Unrecorded:
    """Stands in for a `Recorder` if there is no trace."""

    def note(self, op: str, **asked: object) -> None:
        """Writes nothing."""

    def prepared(self, seqs: Ints, plan: PagePlan) -> None:
        """Writes nothing."""

    def committed(self, plan: PagePlan, kept: Ints | None) -> None:
        """Writes nothing."""


class Recorder(Unrecorded):
    """Records one cache, which has no sequences yet, until that cache is gone.

    Args:
        tables: the cache's page tables, which note what they touch.
        on_host: counts pages of offloaded sequences and of prefixes in host memory.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        config: CacheConfig,
        tables: PageTables,
        on_host: Callable[[], list[int]] | None,
    ) -> None:
        assert tables.notes is not None, "the cache makes such tables where it is recorded"
        self._tables, self._notes, self._on_host = tables, tables.notes, on_host
        self._rows, self._was = _rows(tables), [x.copy() for x in _rows(tables)]
        self._slots = b"" if tables.states is None else tables.states.slot.tobytes()
        self._counts = self._counted()
        self._stepped = b""  # sequences of the step before
        self.file = TraceFile(path, describe(config, tables) | self._counts)
        weakref.finalize(self, self.file.close)

    def note(self, op: str, **asked: object) -> None:
        """Writes the event of a call that has ended, with the call's arguments."""
        if self.file.stopped:
            self._notes.drain()
            return
        with Uninterrupted():
            try:
                event = {"op": op, **{k: v for k, v in asked.items() if v is not None}}
                self.file.write(event | self._changes())
            except Exception as error:  # a failed trace does not end the job
                self.file.stop(f"{type(error).__name__}: {error}")

    def prepared(self, seqs: Ints, plan: PagePlan) -> None:
        """Writes that a step was opened, its sequences and how many tokens each gets."""
        if plan.grown_rows.size:  # a reader sees the growth in the entries
            self._was[PAGES][plan.grown_rows] = self._rows[PAGES][plan.grown_rows]
        stepped, self._stepped = self._stepped, seqs.tobytes()
        names = None if stepped == self._stepped else seqs.tolist()
        owned = [pages.reshape(-1) for pages in plan.owned()]
        held = np.concatenate(owned).tolist() if owned else None
        new = 1 if plan.most == 1 else _one_or_all(plan.new)
        self.note("prepare", new=new, seqs=names, held=held)

    def committed(self, plan: PagePlan, kept: Ints | None) -> None:
        """Writes that a step was committed; lengths follow from `kept`, or else from `new`."""
        self._was[LENGTHS][plan.rows] += plan.new if kept is None else kept
        if plan.codings is not None:  # pages that `prepare` took have tokens now
            self._notes.pages.append(plan.codings.target.reshape(-1))
        self.note("commit", kept=None if kept is None else _one_or_all(kept))

    # ------------------------------------------------------------------ what changed

    def _changes(self) -> dict[str, object]:
        """Returns the differences from the event before, as `docs/trace.md` describes them."""
        event: dict[str, object] = {}
        entries, pages, evicted = self._notes.drain()
        if any(now.tobytes() != was.tobytes() for now, was in zip(self._rows, self._was)):
            self._compare_rows(event)
        if entries.size:
            self._write_entries(event, entries)
        if pages.size:
            pool = self._tables.pool
            event["pages"] = _runs([pages], [pool.refcount[pages], pool.filled[pages]])
        if evicted.size:
            event["evicted"] = evicted.tolist()
        if self._tables.states is not None:
            self._compare_slots(event, self._tables.states.slot)
        counts = self._counted()
        if counts != self._counts:
            event |= {name: now for name, now in counts.items() if now != self._counts[name]}
            self._counts = counts
        return event

    def _compare_rows(self, event: dict[str, object]) -> None:
        tables, before = self._tables, self._was[SEQS]
        changed = [(now != was).reshape(-1, before.size) for now, was in zip(self._rows, self._was)]
        rows = np.flatnonzero(np.concatenate(changed).any(0))
        ended = before[rows]
        if (ended := ended[(ended >= 0) & (ended != tables.seqs[rows])]).size:
            event["ended"] = ended.tolist()
        if (rows := rows[tables.seqs[rows] >= 0]).size:
            ends = np.stack([tables.first_kept, tables.num_pages - tables.evicted], 1)
            told = tables.seqs[rows], tables.lengths[rows], ends.reshape(-1, before.size)[:, rows]
            event["rows"] = np.vstack(told).T.reshape(-1).tolist()
        self._was = [x.copy() for x in self._rows]

    def _compare_slots(self, event: dict[str, object], slots: Ints) -> None:
        before, self._slots = self._slots, slots.tobytes()
        if before != self._slots:
            seqs = self._tables.seqs
            rows = np.flatnonzero((slots != np.frombuffer(before, np.int64)) & (seqs >= 0))
            event["slots"] = np.stack([seqs[rows], slots[rows]], 1).reshape(-1).tolist()

    def _write_entries(self, event: dict[str, object], places: Ints) -> None:
        tables = self._tables
        _, height, width = tables.tables.shape
        lines, at = np.divmod(places, width)
        groups, rows = np.divmod(lines, height)
        found = [at, tables.tables.reshape(-1)[places], tables.seqs[rows], groups]
        held = (found[1] >= 0) & (found[2] >= 0)
        if not held.all():
            found = [column[held] for column in found]
        if found[0].size:
            event["entries"] = _runs(found[:2], found[2:])

    def _counted(self) -> dict[str, list[int]]:
        """Returns counts of the pool by segment, of the host tier, and of states."""
        pool, states = self._tables.pool, self._tables.states
        counts = {
            "existing": pool.existing.tolist(),
            "free": pool.num_free.tolist(),
            "cached": pool.num_cached.tolist(),
        }
        if self._on_host is not None:
            counts["host"] = self._on_host()
        if states is not None:
            counts["states"] = [states.in_use, len(states.checkpoints)]
        return counts


def _rows(tables: PageTables) -> list[Ints]:
    """Returns the arrays by row that a trace holds, in the order of `SEQS` to `FIRST`."""
    return [tables.seqs, tables.lengths, tables.num_pages, tables.evicted, tables.first_kept]


def _runs(ascending: list[Ints], alike: list[Any]) -> list[int]:
    """Cuts columns of numbers into runs, in which some columns rise by one and others are constant.

    Returns:
        For each run, one after the other: its first numbers, its length, and the constant numbers.
    """
    count = len(ascending)
    if alike[0].size > FEW:
        breaks = np.zeros(alike[0].size, dtype=bool)
        for column, by in [(x, 1) for x in ascending] + [(x, 0) for x in alike]:
            breaks[1:] |= column[1:] - column[:-1] != by
        breaks[0] = True
        begin = np.flatnonzero(breaks)
        begun = [column[begin] for column in (*ascending, *alike)]
        begun.insert(count, np.diff(begin, append=breaks.size))
        listed: list[int] = np.stack(begun, 1).reshape(-1).tolist()
        return listed
    runs: list[int] = []
    steady = [[x - i for i, x in enumerate(column.tolist())] for column in ascending]
    at, before = 0, None
    for i, now in enumerate(zip(*steady, *(column.tolist() for column in alike))):
        if now == before:
            runs[at] += 1
        else:
            at, before = len(runs) + count, now
            runs += [*(x + i for x in now[:count]), 1, *now[count:]]
    return runs


def _one_or_all(counts: Ints) -> int | list[int]:
    """Returns one number if all are equal, else the list."""
    listed: list[int] = counts.tolist()
    return listed[0] if listed.count(listed[0]) == len(listed) else listed


def describe(config: CacheConfig, tables: PageTables) -> dict[str, object]:
    """Describes the recorded cache: the segments of its pool, and sizes."""
    segments = []
    for number, pages in enumerate(tables.pool.num_pages.tolist()):
        group, staging = divmod(number, tables.kinds)
        layers, window = config.groups[group].layers, config.groups[group].window
        name = f"layer {layers[0]}" if len(layers) == 1 else f"{len(layers)} layers"
        name += f", window {window}" if window else ""
        size = config.bytes_per_staging_page if staging else config.bytes_per_page
        segments.append([name + ", staging" * staging, group, pages, size(group)])
    told = "max_tokens", "max_sequences", "kv_format", "dtype"
    return {
        "page_size": config.page_size,
        "segments": segments,
        "config": {name: getattr(config, name) for name in told}
        | {"retention": str(config.policy) if config.policy else None},
    }
