"""The error of a call that is short of pages: which sequences hold them, and what would help."""

from __future__ import annotations

import numpy as np

from pagedkv.errors import OutOfPagesError

from .tables import PageTables


def out_of_pages(
    tables: PageTables, what: str, segment: int, needed: int, room: int
) -> OutOfPagesError:
    """An error that says which sequences hold the pages of a segment and what would help."""
    pool = tables.pool
    rows = tables.live_rows()
    pages = tables.tables[segment // tables.kinds, rows]
    mine = (pages >= pool.base[segment]) & (pages < pool.base[segment + 1])
    returned = ((pool.refcount[pages] == 1) & mine).sum(1)
    if tables.reservations.binding[segment]:
        returned += tables.reservations.promise[rows]
    order = np.argsort(-returned, kind="stable")[:3]
    holders = ", ".join(f"{tables.seqs[rows[i]]} ({returned[i]})" for i in order)
    total = int(pool.existing[segment])
    promised = tables.reservations.total if tables.reservations.binding[segment] else 0
    short = needed - room
    # A pool that can grow still has some of the missing pages.
    beyond = max(1, short - int(pool.num_pages[segment] - total))
    more = f", or build the cache with max_tokens larger by {beyond * tables.page_size}"
    kind = "pages"
    if segment % tables.kinds:  # two sequences have five staging pages
        more = f", or build the cache with max_sequences larger by {-(-2 * short // 5)}"
        kind = "staging pages"
    refused = tables.growth.refused if tables.growth else None
    if refused:
        more = f". The pool could not grow: {refused}"
    error = OutOfPagesError(
        f"{what} needs {needed} more {kind}, {max(room, 0)} can be had: of {total}, "
        f"{total - pool.num_free[segment] - pool.num_cached[segment]} are held by {rows.size} "
        f"sequences, {promised} are promised to reservations. Freeing a sequence returns the "
        f"pages only it holds or was promised, most for: {holders or 'none'}. Free or truncate "
        f"sequences until {short} more pages are back"
        f"{', step fewer sequences at once' if what == 'prepare' else ''}{more}.",
        pages_needed=needed,
        pages_free=max(room, 0),
    )
    error.__cause__ = refused
    return error
