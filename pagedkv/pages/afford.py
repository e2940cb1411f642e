"""How much of a found prefix a new sequence can have, where pages are few or promised to others."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from pagedkv.arrays import Ints

from .out_of_pages import out_of_pages
from .prefix import Match

if TYPE_CHECKING:
    from .tables import PageTables


def affordable(tables: PageTables, match: Match, limit: int) -> tuple[Match, Ints]:
    """Shortens a match where promises made to others leave no room for all of it.

    Returns:
        The match, and the sequences whose last page it shares.
    """
    while True:
        columns = match.pages.shape[1]
        partial = match.length < columns * tables.page_size
        owners = _owners_of_tail(tables, match) if partial else np.empty(0, dtype=np.int64)
        asked = tables.reservations.missing_extra(owners)
        if limit:
            held = tables.coded_of(match.length) if tables.staged else columns - partial
            asked += max(0, limit - held)
        found = match.pages[match.pages >= 0]
        revived = tables.pool.count(found[tables.pool.refcount[found] == 0])
        room = tables.reservations.available()
        short = revived + asked - room
        short[~tables.reservations.binding] = 0
        if short.max() <= 0 or not (asked or revived.any()) or tables.grow(short):
            return match, owners
        if partial:
            match = _cut(tables, match, columns - 1)
        elif not limit and columns:
            match = _cut(tables, match, _columns_that_fit(tables, match, room))
        else:
            worst = int(short.argmax())
            needed = asked + int(revived[worst])
            raise out_of_pages(tables, "add", worst, needed, int(room[worst]))


def _columns_that_fit(tables: PageTables, match: Match, room: Ints) -> int:
    """How many leading pages of a match can be brought back to life: fewer than it has."""
    revived = (tables.pool.refcount[match.pages] == 0) & (match.pages >= 0)
    revived &= match.pages < tables.first_staging[:, None]
    taken = revived.cumsum(1)
    taken[~tables.reservations.binding[:: tables.kinds]] = 0
    fits = (taken <= room[:: tables.kinds, None]).all(0)
    return min(int(fits.sum()), match.pages.shape[1] - 1)


def _cut(tables: PageTables, match: Match, columns: int) -> Match:
    """The match's first pages, if they are all a window needs."""
    length, pages = columns * tables.page_size, match.pages[:, :columns]
    for group, window in enumerate(tables.windows):
        start = 0 if window is None else max(0, length - window) // tables.page_size
        if (pages[group, start:] < 0).any():  # the shorter text would need dropped pages
            return Match(0, [], match.pages[:, :0])
    return Match(length, match.keys[:columns], pages)


def _owners_of_tail(tables: PageTables, match: Match) -> Ints:
    """Live sequences whose committed text ends in the page that a match ends in."""
    rows = tables.live_rows()
    rows = rows[(tables.lengths[rows] % tables.page_size > 0) & (tables.num_pages[rows] > 0)]
    ends = tables.tables[tables.at(rows, tables.lengths[rows] // tables.page_size)]
    return rows[(ends == match.pages[:, -1:]).any(0)]
