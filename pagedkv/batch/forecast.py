"""How long a job will take: how many steps and tokens are to come, and what these cost.

Short rows end first, so the lengths of rows that have ended are no measure for the others. Instead,
a row is expected to go on as all rows of its age did, those that ended and those that still run (a
Kaplan-Meier estimate). Nobody knows what lies beyond the oldest row seen, so there are two answers:
one as if all rows ended there, and one as if few of them ended before their limits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from pagedkv.arrays import Floats

if TYPE_CHECKING:
    from .results import GenerationStats, Running

LONGEST = 2**16  # tokens of a row that are looked ahead
POINTS = 256  # times at which it is asked whether all rows have ended
SLOWER = 3  # by the second answer, rows older than any seen end so many times less often
NEVER = 1e-13  # stands for a chance of 0, which has no logarithm


class Span(NamedTuple):
    """Seconds that a job may still take: `least` and `most`."""

    least: float
    most: float


class Forecast:
    """Estimates what is left of a job of rows that generate.

    Args:
        stats: the generator's `stats` of the call.
        rows: returns the rows that run; called once for each forecast.
        limits: tokens that each prompt's rows may get.
        prompts: tokens of each prompt that have to be computed, without those that it shares with
            another; None for a prompt that was not read yet.
        samples: rows of each prompt.
    """

    def __init__(
        self,
        stats: GenerationStats,
        rows: Callable[[], list[Running]],
        limits: Sequence[int],
        prompts: Sequence[int | None],
        samples: int = 1,
    ) -> None:
        self._stats, self._rows, self._prompts = stats, rows, prompts
        self._limits = [min(limit, LONGEST) for limit in limits]
        self._coming = np.bincount(np.array(self._limits, int), minlength=1) * samples  # by limit
        self._stopped, self._cut = np.zeros((2, len(self._coming)))  # rows that ended, by length
        self._tokens = sum(n for n in prompts if n is not None)  # of prompts to be computed
        self._unread = sum(n is None for n in prompts)
        self._ended = 0

    def ended(self, index: int, sample: int, length: int, stopped: bool) -> None:
        """Takes in a row that ended: by itself, or by its limit or an error."""
        self._coming[self._limits[index]] -= 1
        (self._stopped if stopped else self._cut)[min(length, len(self._cut) - 1)] += 1
        self._ended += 1
        if not sample:
            tokens = self._prompts[index]
            self._unread -= tokens is None
            self._tokens -= tokens or 0

    def left(self) -> Span | None:
        """Returns how long the job may still take; None until there is something to tell it by."""
        running, waiting = self._rows(), self._coming.copy()
        tokens, unread = self._tokens, self._unread
        for row in running:
            waiting[self._limits[row.index]] -= 1
            tokens += row.uncomputed
            if not row.sample:
                unread -= self._prompts[row.index] is None
                tokens -= self._prompts[row.index] or 0
        if not self._coming.sum():
            return Span(0.0, 0.0)
        waits = max(0, int(waiting.sum()))
        if waits and not (self._stopped + self._cut)[1:].any():
            return None  # only when a row has made room is it known how many run at once
        begun = self._ended + len(running)
        read = max(0, self._stats.computed - self._stats.new_tokens + begun)
        prompts = tokens + (unread * read / begun if unread and begun else 0)
        ages = np.array([[len(row.tokens), self._limits[row.index]] for row in running], int)
        ages = ages.reshape(-1, 2).T
        found = []
        for curve in self._curves(ages[0]):
            steps, new = _to_come(curve, ages, np.maximum(waiting, 0))
            seconds = self._stats.step_cost.seconds(steps, prompts + new)
            if seconds is None:
                return None
            found.append(seconds)
        return Span(*sorted(found))

    def _curves(self, ages: Floats) -> tuple[Floats, Floats]:
        """Returns the least and the greatest chance that a row outgrows each length."""
        size = len(self._coming)
        cut = self._cut + np.bincount(np.minimum(ages, size - 1), minlength=size)
        seen = (self._stopped + cut)[::-1].cumsum()[::-1]  # rows that were seen at each length
        oldest = int(np.flatnonzero(seen).max(initial=0))
        least = np.cumprod(1 - self._stopped / np.maximum(seen, 1))
        least[oldest + 1 :] = 0
        # Assume one more row that outgrew all, and beyond them a third of the usual share of ends.
        share = self._stopped.sum() / max(1, seen[1:].sum()) / SLOWER
        ends = np.where(np.arange(size) > oldest, share, self._stopped / (seen + 1))
        return least, np.cumprod(1 - ends)


def _to_come(curve: Floats, running: Floats, waiting: Floats) -> tuple[float, float]:
    """Returns the steps and tokens that are expected of the rows of a job.

    Args:
        curve: for each length, the chance that a row outgrows it.
        running: `[2, n]`, the tokens that running rows have got, and those they may get.
        waiting: how many rows wait, by the tokens they may get.
    """
    longest, waits = len(curve) - 1, waiting.sum()
    ages, limits = running
    here = np.maximum(curve[np.minimum(ages, longest)], NEVER)
    ahead = np.append(0, curve.cumsum())  # tokens up to each length
    rest = (ahead[np.maximum(limits, ages)] - ahead[ages]) / here
    tokens = np.maximum(rest, 1).sum()
    # The chance that a waiting row goes on at each length, its limit considered.
    above = waiting[::-1].cumsum()[::-1]
    goes_on = curve * np.append(above[1:], 0) / max(waits, 1)
    mean = max(goes_on.sum(), 1.0)
    tokens += waits * mean
    # Each row that ends makes room for another, so the last one begins at the step `begin`.
    between = mean / max(1, len(ages))
    begin = waits * between
    # The chance that all rows have ended at a time is the product of their chances.
    times = np.unique(np.linspace(0, longest, min(POINTS, longest + 1), dtype=int))
    then = ages + times[:, None] + int(begin)
    over = curve[np.minimum(then, longest)] * (then < limits) / here
    chances = np.log(np.maximum(1 - over, NEVER)).sum(axis=1)
    if waits:
        each = np.log(np.maximum(1 - goes_on, NEVER))
        since = np.append(0, each.cumsum())
        to = np.minimum(times + int(begin), longest + 1)
        chances += each[times] + (since[to] - since[times]) / between
    steps = begin + np.sum((1 - np.exp(chances)) * np.diff(times, append=times[-1] + 1))
    return max(1.0, float(steps)), float(tokens)
