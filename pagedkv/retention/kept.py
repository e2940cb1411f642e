"""The size of what stays of a text: a number of pages, a share, or the smaller of the two."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

ROUNDING = 1e-9  # 0.29 of 100 pages are 29, though their product in floating point is less


@dataclass(frozen=True)
class Kept:
    """How many pages of a text stay in each layer group.

    Attributes:
        least: whole pages that stay however small the share is.
        budget: whole pages that stay at most; None: any number.
        share: of the whole pages of a text; rounded down, so that no more stays.
    """

    least: int
    budget: int | None = None
    share: float = 1.0

    def pages(self, whole: Any) -> Any:
        """Returns how many of a text's `whole` pages may stay."""
        shared = np.floor(np.asarray(whole) * self.share + ROUNDING).astype(np.int64)
        most = np.maximum(shared, self.least)
        return most if self.budget is None else np.minimum(most, self.budget)
