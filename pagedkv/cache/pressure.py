"""Memory pressure: a callback of the user's may free pages before a call fails that lacks them.

A cache does not offload by itself: only its owner knows which sequence goes on next. The callback
is no field of `CacheConfig`, which describes pages, and no argument of a call, because under
`generate` the user does not make the call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from pagedkv.arrays import Ints
from pagedkv.errors import HostMemoryError, OutOfPagesError
from pagedkv.interrupt import uninterrupted
from pagedkv.pages.tables import PageTables

T = TypeVar("T")


@dataclass(frozen=True)
class Pressure:
    """A call that is short of pages.

    Attributes:
        call: the name of the call.
        pages_needed: pages that the call needs, as in `OutOfPagesError`.
        pages_free: pages that the call could have; cached prefixes count as free.
        seqs: sequences that the call is about.
        idle: sequences that have pages and are not in the call, nor in an open step, nor rows of a
            batch job; the sequence whose last step is longest ago comes first.
    """

    call: str
    pages_needed: int
    pages_free: int
    seqs: tuple[int, ...]
    idle: tuple[int, ...]


OnPressure = Callable[[Any, Pressure], bool]  # takes a PagedKVCache and the pressure


def offload_idle(cache: Any, pressure: Pressure) -> bool:
    """An `on_pressure` that offloads the sequence that has waited longest, one at a time.

    Examples:
        >>> from pagedkv import CacheConfig, PagedKVCache, offload_idle
        >>> config = CacheConfig(1, 2, 16, "float32", max_tokens=32, host_tokens=64)
        >>> cache = PagedKVCache(config, device="cpu", on_pressure=offload_idle)
    """
    for seq in pressure.idle:
        try:
            cache.offload(seq)
        except HostMemoryError:
            continue  # a shorter sequence may fit
        return True
    return False


class PressureHandler:
    """Asks the user's callback, and stops when asking it again cannot help."""

    def __init__(self, tables: PageTables, callback: OnPressure) -> None:
        self._tables, self._callback = tables, callback
        self._asking = False
        self._stepped = np.zeros((2, tables.max_sequences), dtype=np.int64)  # when, and who
        self._clock = 0

    def touch(self, rows: Ints) -> None:
        """Notes that rows have a step now, so that `idle` lists them last."""
        self._clock += 1
        self._stepped[0, rows], self._stepped[1, rows] = self._clock, self._tables.seqs[rows]

    def ask(self, cache: Any, call: str, seqs: Sequence[int], error: OutOfPagesError) -> bool:
        """Whether the call is worth another try."""
        if self._asking:  # the callback itself made this call
            return False
        tables, step = self._tables, cache.open_step
        busy = {*seqs, *cache.running, *(step.seqs.tolist() if step is not None else ())}
        rows = tables.live_rows()
        rows = rows[tables.num_pages[rows] > 0]
        when, who = self._stepped[:, rows]
        rows = rows[np.argsort(when * (who == tables.seqs[rows]), kind="stable")]
        idle = tuple(seq for seq in tables.seqs[rows].tolist() if seq not in busy)
        before = self._state()
        self._asking = True
        try:
            pages = error.pages_needed, error.pages_free
            again = self._callback(cache, Pressure(call, *pages, tuple(seqs), idle))
        finally:
            self._asking = False
        return bool(again) and self._state() != before

    def _state(self) -> list[list[int]]:
        """Returns numbers; another try can succeed only after one of them has changed."""
        tables = self._tables
        numbers = tables.seqs, tables.num_pages, tables.reservations.available()
        return [each.tolist() for each in numbers]


def retrying(
    handler: PressureHandler | None,
    cache: Any,
    call: str,
    seqs: Any,
    attempt: Callable[[], T],
    undo: Callable[[T], object] | None = None,
) -> T:
    """Tries a call that needs pages, and tries again each time the callback has made room.

    Args:
        undo: takes back an attempt's result if an interrupt keeps it from the caller.
    """
    while True:
        try:
            return uninterrupted(attempt, undo)
        except (OutOfPagesError, MemoryError) as error:
            cache._recorder.note("failed", call=call, error=type(error).__name__)
            if not isinstance(error, OutOfPagesError):
                raise
            names = [int(seq) for seq in seqs]
            if handler is None or not handler.ask(cache, call, names, error):
                raise
