"""Evicts pages that were attended to least recently."""

from __future__ import annotations

from dataclasses import dataclass

from pagedkv.arrays import Floats

from .policy import PageRecords, Policy


@dataclass(frozen=True)
class LeastRecentlyAttended(Policy):
    """Keeps pages by the last step in which they got more attention than an equal share.

    People often ask for this policy, but it was measured to recall no more than a window does: a
    text seldom needs again a page that it read a moment ago.
    """

    recent: int = 64
    needs = ("attended",)

    def keep_scores(self, pages: PageRecords) -> Floats:
        return pages.attended
