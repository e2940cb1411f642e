"""How many pages of a text stay: a number, a share, or the smaller of the two."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

ROUNDING = 1e-9  # 0.29 of 100 pages are 29, though their product in floating point is less


@dataclass(frozen=True)
class Kept:
    """How many pages of a text stay in each layer group.

    Attributes:
        least: how many whole pages stay with any share.
        budget: how many whole pages stay at most; None: any number.
        share: share of a text's whole pages that stays, rounded down.
    """

    least: int
    budget: int | None = None
    share: float = 1.0

    def pages(self, whole: Any) -> Any:
        """Returns how many of a text's `whole` pages may stay."""
        shared = np.floor(np.asarray(whole) * self.share + ROUNDING).astype(np.int64)
        most = np.maximum(shared, self.least)
        return most if self.budget is None else np.minimum(most, self.budget)
