"""Tells how far a job of generated rows is, and how long it still takes."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any

from pagedkv.batch.forecast import Forecast
from pagedkv.batch.results import GenerationStats, Result

from .screen import Progress

APART, NEAR = 1.6, 5.0  # how far the two ends of a forecast may be apart: a ratio, or seconds


class Pace(Progress):
    """Progress of a job, and the time left once that is known well enough.

    Args:
        stats: the generator's statistics, which change as it runs.
        forecast: the forecast of the same call.
        rows: how many rows there are.
        layers: progress of a streamed model's pass, with `done` and `total`.

    Attributes:
        ended: how many rows have ended.
    """

    def __init__(
        self,
        stats: GenerationStats,
        forecast: Forecast,
        rows: int,
        layers: Any = None,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        super().__init__(clock)
        self.ended, self._rows = 0, rows
        self._stats, self._forecast, self._layers = stats, forecast, layers

    def end(self, result: Result) -> None:
        """Takes in a row that ended."""
        self.ended += 1
        stopped = result.finish_reason == "stop"
        self._forecast.ended(result.index, result.sample, len(result.tokens), stopped)

    @property
    def share(self) -> float:
        left = self._forecast.left()
        if left is None or self._stats.seconds == 0:
            return 0.0
        return self._stats.seconds / (self._stats.seconds + sum(left) / 2)

    @property
    def seconds_left(self) -> float | None:
        """The middle of the time that may be left; None if that is unknown, or nothing runs."""
        left = self._forecast.left()
        if left is None or self.ended == self._rows:
            return None
        known = left.most <= APART * left.least or left.most - left.least <= NEAR
        return sum(left) / 2 if known else None

    def done(self) -> list[str]:
        rate = self._stats.new_tokens / self.passed if self.passed else 0.0
        return [f"{self.ended:,}/{self._rows:,} rows", f"{rate:,.1f} tokens/s"]

    def beside(self) -> list[str]:
        layers = self._layers
        return [] if layers is None else [f"layer {layers.done} of {layers.total}"]
