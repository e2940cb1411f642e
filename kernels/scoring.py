"""How a score is made of a query and a key: the terms, as data, for every backend.

`reference.paged_attention` says what each term means. What kernels are compiled for, and what they
are given at run time, follows from the terms alone, so it stands beside them.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

NO_WINDOW = 1 << 30  # wider than any text
LOG2E = math.log2(math.e)


class Scoring(NamedTuple):
    """How scores are made, as in `reference.paged_attention`."""

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None

    def arguments(self) -> tuple[int, float, float]:
        """Window, scale and softcap as kernels take them; weights are powers of two there.

        Their types are what a kernel was compiled for.
        """
        window = NO_WINDOW if self.window is None else min(self.window, NO_WINDOW)
        if self.softcap is None:
            return window, float(self.scale) * LOG2E, 0.0
        return window, float(self.scale), float(self.softcap)

    @property
    def kind(self) -> ScoringKind:
        """What of it a kernel is compiled for."""
        dtype = None if self.sinks is None else self.sinks.dtype
        return ScoringKind(self.window is not None, self.softcap is not None, dtype)


class ScoringKind(NamedTuple):
    """Which terms scores have; of sinks the dtype."""

    window: bool
    softcap: bool
    sinks: torch.dtype | None

    def static(self) -> dict[str, bool]:
        """The constexpr arguments that attention kernels take of it."""
        return {
            "HAS_WINDOW": self.window,
            "HAS_SOFTCAP": self.softcap,
            "HAS_SINKS": self.sinks is not None,
        }
