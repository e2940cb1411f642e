"""Measures how fast work is done, while it is done: the bytes of copies, the tokens of a pass."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import torch

# The weight of older measurements beside a new one. With 0.8 the last three make half of a rate:
# one slow copy does not turn a decision, and a few show a change of load. The number was chosen,
# not tuned.
FADE = 0.8


class Rate:
    """Work and the time it took; older measurements fade.

    Args:
        on_card: whether the current CUDA stream does the work, after the call that launches it.
    """

    def __init__(self, on_card: bool = False) -> None:
        self._work = self._seconds = 0.0
        self._on_card = on_card
        self._under_way: deque[tuple[float, Any, Any]] = deque()

    def add(self, work: float, seconds: float) -> None:
        """Counts a measurement."""
        self._work = FADE * self._work + work
        self._seconds = FADE * self._seconds + seconds

    @contextmanager
    def __call__(self, work: float) -> Iterator[None]:
        """Measures the time of a region that does `work`."""
        if not self._on_card:
            since = perf_counter()
            yield
            return self.add(work, perf_counter() - since)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        yield
        end.record()
        self._under_way.append((work, begin, end))

    def seconds(self, work: float) -> float | None:
        """Estimates how long `work` takes; None if nothing was measured yet."""
        while self._under_way and self._under_way[0][2].query():
            work_done, begin, end = self._under_way.popleft()
            self.add(work_done, begin.elapsed_time(end) / 1000)
        return work * self._seconds / self._work if self._work else None
