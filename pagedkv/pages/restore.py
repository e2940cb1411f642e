"""Gives sequences their pages back, with bytes that are copied in instead of computed.

`take_pages` makes room for all sequences of a call or for none; the caller fills the fresh pages;
then `publish` makes them findable, or `undo` takes everything back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from pagedkv.arrays import Ints, Tokens

from .out_of_pages import out_of_pages
from .prefix import UNKNOWN_TOKEN
from .tables import PageTables


class Incoming(NamedTuple):
    """A sequence without pages, and the text and pages that it will hold.

    Attributes:
        row: the row of a live sequence that has no pages.
        tokens: `[length]`, the ids of the text, -1 where unknown.
        limit: pages reserved for the sequence; 0 for none.
        columns: by group, the columns of the text whose pages are stored, ascending.
        kinds: by group and stored page, 1 for a staging page, else 0.
        shared: by group and stored page, a live or cached page with the same bytes to share, or
            -1. A partly filled last page is never shared.
        content: by group and stored page, a number for the bytes that are copied in: pages with
            equal numbers become one page that their texts share. A page with -1 is not shared.
    """

    row: int
    tokens: Tokens
    limit: int
    columns: list[Ints]
    kinds: list[Ints]
    shared: list[Ints]
    content: list[Ints]


class Unfilled(NamedTuple):
    """A page of one group that waits for its bytes.

    Attributes:
        group: the layer group of the page.
        text: the index of the text among the texts of the call.
        which: the index of the page among the text's stored pages in that group.
        page: the page's id.
    """

    group: int
    text: int
    which: int
    page: int


@dataclass
class Restored:
    """Texts that have their pages, and the fresh ones among these pages."""

    texts: Sequence[Incoming]
    fresh: list[Unfilled] = field(default_factory=list)


def take_pages(tables: PageTables, texts: Sequence[Incoming], what: str) -> Restored:
    """Gives sequences all their pages: shared ones, and fresh ones that wait for bytes.

    Args:
        what: the call, for the error.

    Raises:
        OutOfPagesError: not all of them fit; nothing was changed.
    """
    pool, reserved = tables.pool, tables.reservations
    kinds = range(tables.kinds)
    segments = [_places(texts, g, kind) for g in range(len(tables.windows)) for kind in kinds]
    found = np.concatenate([pages for text in texts for pages in text.shared])
    revived = np.unique(found[(found >= 0) & (pool.refcount[found] == 0)])
    needed = pool.count(revived) + np.array([len(places) for places in segments])
    needed += sum(reserved.owed(t.limit, _counted(tables, t)) for t in texts) * reserved.binding
    room = reserved.available()
    if (needed > room).any() and not tables.grow(needed - room):
        worst = int((needed - room).argmax())
        raise out_of_pages(tables, what, worst, int(needed[worst]), int(room[worst]))

    for text in texts:  # shared before any page is taken, so that these pages are not reused
        for pages in text.shared:
            pool.share(pages[pages >= 0])
    try:
        _, taken = pool.take(0, [(s, len(places)) for s, places in enumerate(segments)])
    except BaseException:
        pool.drop(found)
        raise
    restored = Restored(texts)
    rows = [[pages.copy() for pages in text.shared] for text in texts]  # by text and group
    for segment, places in enumerate(segments):
        group = segment // tables.kinds
        for owners, page in zip(places, taken[segment].tolist()):
            for i, index in owners:
                rows[i][group][index] = page
            pool.refcount[page] = len(owners)
            restored.fresh.append(Unfilled(group, *owners[0], page))
    for text, row in zip(texts, rows):
        _set_row(tables, text, row)
    return restored


def _set_row(tables: PageTables, text: Incoming, pages: list[Ints]) -> None:
    row, size = text.row, tables.page_size
    tables.num_pages[row] = columns = _num_columns(tables, text)
    if tables.staged:
        tables.num_coded[row] = tables.coded_of(text.tokens.size)
    for group, stored in enumerate(text.columns):
        windowed = tables.windows[group] is not None
        if windowed and stored.size:
            tables.first_kept[group, row] = stored[0]
        elif windowed:
            tables.first_kept[group, row] = columns
        else:
            tables.evicted[group, row] = gone = _evicted(tables, text, group)
            tables.compacted |= gone > 0
        if tables.staged:
            tables.evicted_coded[group, row] = _evicted_coded(tables, text, group)
        at = stored if windowed else np.arange(stored.size)
        tables.tables[group, row, at] = pages[group]
        tables.column_of[pages[group]] = stored
    tables.lengths[row] = text.tokens.size
    most = columns - int(tables.evicted[:, row].min())
    tables.changed.mark(slice(None), np.asarray([row]), np.arange(most))
    tables.reservations.start(row, text.limit, shared_tail=False)
    # Coded tails need no check: a coded page is never written in place.
    tails = [kinds[-1] == 0 for kinds in text.kinds if kinds.size]
    tables.check_tail[row] = tables.staged and text.tokens.size % size > 0 and any(tails)


def _num_columns(tables: PageTables, text: Incoming) -> int:
    return -(-text.tokens.size // tables.page_size)


def _evicted(tables: PageTables, text: Incoming, group: int) -> int:
    """Counts the pages that the text lost to eviction."""
    windowed = tables.windows[group] is not None
    return 0 if windowed else _num_columns(tables, text) - text.columns[group].size


def _evicted_coded(tables: PageTables, text: Incoming, group: int) -> int:
    """Counts the pages that the text lost to eviction, without its first page."""
    lost = _evicted(tables, text, group)
    return max(0, lost - int(0 not in text.columns[group][:1]))


def _counted(tables: PageTables, text: Incoming) -> int:
    """Counts the pages of a text towards its limit, as `Reservations.held` does."""
    lost = _evicted_coded if tables.staged else _evicted
    gone = max(lost(tables, text, group) for group in range(len(tables.windows)))
    return int(tables.counted(text.tokens.size)) - gone


def _places(texts: Sequence[Incoming], group: int, kind: int) -> list[list[tuple[int, int]]]:
    """Lists, for each fresh page of a kind, the texts that share it and its index in each."""
    places: list[list[tuple[int, int]]] = []
    seen: dict[int, list[tuple[int, int]]] = {}
    for i, text in enumerate(texts):
        content = text.content[group]
        fresh = (text.shared[group] < 0) & (text.kinds[group] == kind)
        for index in np.flatnonzero(fresh).tolist():
            number, place = int(content[index]), (i, index)
            if number >= 0 and number in seen:
                seen[number].append(place)
            else:
                places.append([place])
                if number >= 0:
                    seen[number] = places[-1]
    return places


def publish(tables: PageTables, restored: Restored) -> None:
    """Makes fresh pages findable; the caller has filled them."""
    pool, index, size = tables.pool, tables.index, tables.page_size
    for group, i, which, page in restored.fresh:
        text = restored.texts[i]
        column = int(text.columns[group][which])
        tokens = text.tokens[column * size : (column + 1) * size]
        index.tokens[page, : tokens.size] = tokens
        index.tokens[page, tokens.size :] = UNKNOWN_TOKEN
        pool.filled[page] = tokens.size
        if tables.ids_known[text.row]:
            keys, chain = tables.prefix_keys[text.row], tables.chain(text.row)
            key = keys[column + 1] if tokens.size == size else None
            before = chain.before(keys[column], column)
            index.publish(group, page, key, before + tokens[:1].tobytes())


def undo(tables: PageTables, restored: Restored) -> None:
    """Undoes `take_pages`; cached pages that were reused for it stay forgotten."""
    for text in restored.texts:
        release(tables, text.row)


def release(tables: PageTables, row: int) -> None:
    """Takes all pages and the reservation from a sequence; findable pages stay findable."""
    columns = int(tables.num_pages[row])
    pages = tables.tables[:, row, :columns]
    tables.pool.drop(pages[:, ::-1].reshape(-1))
    pages[:] = -1
    tables.reset(np.asarray([row]))


def stored(tables: PageTables, group: int, row: int) -> Ints:
    """Returns the pages that a sequence has in a group."""
    first = int(tables.first_kept[group, row])
    held = int(tables.num_pages[row] - tables.evicted[group, row])
    return tables.tables[group, row, first:held]


def text_of(tables: PageTables, row: int) -> Tokens:
    """Returns a sequence's committed ids, `[length]`; -1 if unknown or on no page any more."""
    tokens = np.full((int(tables.num_pages[row]), tables.page_size), UNKNOWN_TOKEN, dtype=np.int32)
    for group in range(len(tables.windows)):
        pages = stored(tables, group, row)
        tokens[tables.column_of[pages]] = tables.index.tokens[pages]
    return tokens.reshape(-1)[: int(tables.lengths[row])]
