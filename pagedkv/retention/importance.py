"""Evicts the pages that got least attention over their life.

Source: Zhang et al. 2023, H2O: Heavy-Hitter Oracle, with one sum for each page instead of one for
each token and head.
"""

from __future__ import annotations

from dataclasses import dataclass

from pagedkv.arrays import Floats

from .policy import PageRecords, Policy


@dataclass(frozen=True)
class Importance(Policy):
    """Keeps pages by their attention mass."""

    recent: int = 64
    needs = ("mass",)

    def keep_scores(self, pages: PageRecords) -> Floats:
        return pages.mass
