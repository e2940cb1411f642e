"""Decides how much of a findable prefix a new sequence starts with.

If a model has states, a match ends at a length whose state is kept. If pages are few, or promised
to other sequences, the sequence takes as much of the match as there is room for.
"""

from __future__ import annotations

import numpy as np

from pagedkv.arrays import Ints, Tokens

from .checkpoints import PrefixKey
from .out_of_pages import out_of_pages
from .prefix import Match
from .salts import Chain
from .tables import PageTables

Prompt = tuple[Chain, Tokens | None]  # the chain of its keys, and its ids


def at_state(tables: PageTables, match: Match, prompt: Prompt) -> Match:
    """Cuts a match to the longest beginning whose state is kept, if the model has states."""
    chain, tokens = prompt
    if tables.states is None or tokens is None:
        return match
    length = tables.states.checkpoints.find(chain, tokens, match, tables.page_size)
    cut = _cut(tables, match, length)
    if cut.length < length:  # its windows need pages before the pages of the whole match
        match = tables.index.match(chain, tokens[:length], tables.pool.filled)
        cut = match if match.length == length else cut
    return cut


def state_key(tables: PageTables, match: Match, prompt: Prompt) -> PrefixKey | None:
    """The key of a checkpoint at the end of a match; None if nothing was matched."""
    chain, tokens = prompt
    if tokens is None or not match.length:
        return None
    columns = match.length // tables.page_size
    tail = tokens[columns * tables.page_size : match.length].tobytes()
    return PrefixKey.of(chain, match.keys[columns - 1] if columns else chain.root, columns, tail)


def affordable(tables: PageTables, match: Match, limit: int, prompt: Prompt) -> tuple[Match, Ints]:
    """Shortens a match if promises to other sequences leave no room for all of it.

    Returns:
        The match, and the rows of the sequences whose last page it shares.
    """
    size = tables.page_size
    while True:
        columns = match.pages.shape[1]
        partial = match.length < columns * tables.page_size
        owners = _owners_of_tail(tables, match) if partial else np.empty(0, dtype=np.int64)
        asked = tables.reservations.missing_extra(owners)
        if limit:
            extra = partial and not tables.staged
            asked += int(tables.reservations.owed(limit, tables.counted(match.length), extra))
        found = match.pages[match.pages >= 0]
        revived = tables.pool.count(found[tables.pool.refcount[found] == 0])
        room = tables.reservations.available()
        short = (revived + asked - room) * tables.reservations.binding
        if max(short.tolist()) <= 0 or not (asked or revived.any()) or tables.grow(short):
            return match, owners
        if partial:
            match = at_state(tables, _cut(tables, match, (columns - 1) * size), prompt)
        elif not limit and columns:
            fits = _columns_that_fit(tables, match, room)
            match = at_state(tables, _cut(tables, match, fits * size), prompt)
        else:
            worst = int(short.argmax())
            needed = asked + int(revived[worst])
            raise out_of_pages(tables, "add", worst, needed, int(room[worst]))


def _columns_that_fit(tables: PageTables, match: Match, room: Ints) -> int:
    """Counts the leading pages of a match that fit: always fewer than it has."""
    revived = (tables.pool.refcount[match.pages] == 0) & (match.pages >= 0)
    revived &= match.pages < tables.first_staging[:, None]
    taken = revived.cumsum(1)
    taken[~tables.reservations.binding[:: tables.kinds]] = 0
    fits = (taken <= room[:: tables.kinds, None]).all(0)
    return min(int(fits.sum()), match.pages.shape[1] - 1)


def _cut(tables: PageTables, match: Match, length: int) -> Match:
    """Returns the first tokens of a match; nothing if a window needs pages that it lacks."""
    full, columns = length // tables.page_size, -(-length // tables.page_size)
    pages = match.pages[:, :columns]
    for group, window in enumerate(tables.windows):
        start = 0 if window is None else max(0, length - window) // tables.page_size
        if (pages[group, start:] < 0).any():  # the shorter text would need dropped pages
            return Match(0, [], match.pages[:, :0])
    return Match(length, match.keys[:full], pages)


def _owners_of_tail(tables: PageTables, match: Match) -> Ints:
    """Returns rows whose committed text ends in the last page of a match."""
    if not (tables.pool.refcount[match.pages[:, -1]] > 0).any():
        return np.empty(0, dtype=np.int64)
    rows = tables.live_rows()
    rows = rows[(tables.lengths[rows] % tables.page_size > 0) & (tables.num_pages[rows] > 0)]
    ends = tables.tables[tables.at(rows, tables.lengths[rows] // tables.page_size)]
    return rows[(ends == match.pages[:, -1:]).any(0)]
