"""Evicts the oldest pages: a window over the newest tokens."""

from __future__ import annotations

from dataclasses import dataclass

from pagedkv.arrays import Ints

from .policy import PageRecords, Policy


@dataclass(frozen=True)
class Fifo(Policy):
    """First in, first out.

    A model that was not trained with a window needs the first tokens of its text: see `Sinks`.
    """

    recent: int = 0  # the newest score highest anyway
    window: bool = True

    def keep_scores(self, pages: PageRecords) -> Ints:
        return pages.position
