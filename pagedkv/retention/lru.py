"""Pages that were attended to least recently go."""

from __future__ import annotations

from dataclasses import dataclass

from pagedkv.arrays import Floats

from .policy import PageRecords, Policy


@dataclass(frozen=True)
class LeastRecentlyAttended(Policy):
    """Keeps pages by the last step in which they got more attention than an equal share.

    Asked for often, and measured to recall no more than a window: what is needed again was not
    needed a moment ago.
    """

    recent: int = 64
    needs = ("attended",)

    def keep_scores(self, pages: PageRecords) -> Floats:
        assert pages.attended is not None
        return pages.attended
