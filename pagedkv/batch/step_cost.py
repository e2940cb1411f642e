"""Estimates how long a step takes from the steps that were computed."""

from __future__ import annotations

import numpy as np

FADE = 0.995  # weight of a step when another has followed: the last 140 have half of all weight
# While all steps have about equally many tokens, a step's constant is guessed to be the time of
# BASE tokens. The guess weighs as much as steps whose tokens differ by a tenth.
BASE, FIRM = 64, 0.1**2


class StepCost:
    """The time of a step: a constant, for example to read weights, plus a time for each token."""

    def __init__(self) -> None:
        self._sums = np.zeros(5)
        self._is_first = True

    def add(self, steps: int, tokens: int, seconds: float) -> None:
        """Takes in the time of `steps` with `tokens` in all; skips the first, which compiles."""
        if not steps:
            return
        if not self._is_first:
            x, y = tokens / steps, seconds / steps
            self._sums = FADE * self._sums + np.array([1, x, y, x * x, x * y])
        self._is_first = False

    def seconds(self, steps: float, tokens: float) -> float | None:
        """Returns the time of `steps` with `tokens` in all; None before any was measured."""
        n, x, y, xx, xy = self._sums.tolist()
        if not n:
            return None
        x, y, firm = x / n, y / n, FIRM * (x / n) ** 2
        slope = (xy / n - x * y + firm * y / (x + BASE)) / (xx / n - x * x + firm)
        slope = min(max(slope, 0.0), y / x)
        return (y - slope * x) * steps + slope * tokens
