"""Makes the tokens of a step findable: stores their ids and lists their pages in the index."""

from __future__ import annotations

import numpy as np

from pagedkv.arrays import Bools, Ints, Tokens

from .plan import PagePlan
from .pool import within
from .prefix import UNKNOWN_TOKEN
from .tables import PageTables


def store_tokens(
    tables: PageTables, plan: PagePlan, count: Ints, one_each: bool, tokens: Tokens | None
) -> None:
    """Records ids and committed slots of the pages that were written."""
    size, index, pool = tables.page_size, tables.index, tables.pool
    rows, column, offset = plan.rows, plan.column, plan.offset
    if not one_each:
        order = np.repeat(np.arange(rows.size), count)
        position = plan.start[order] + within(count)
        rows, column = rows[order], position // size
        offset = position - column * size
    pages = tables.tables[tables.at(rows, column)]
    index.tokens[pages, offset] = UNKNOWN_TOKEN if tokens is None else tokens
    # If a page occurs repeatedly, its offsets ascend, so its last entry is the highest and counts.
    pool.filled[pages] = np.maximum(pool.filled[pages], offset + 1)


def publish(tables: PageTables, plan: PagePlan, end: Ints, one_each: bool) -> None:
    """Makes new committed pages findable if all ids of their sequence are known."""
    index, size, known = tables.index, tables.page_size, tables.ids_known[plan.rows]
    column, opened = plan.column, plan.offset == 0
    for copy in plan.copies:
        opened[copy.order] = True
    if plan.codings is not None:
        opened[plan.codings.order] = True
    # Full pages come first: they append the keys with which partial keys begin.
    if one_each:
        rows, columns = _chosen(plan, known & (plan.offset == size - 1))
    else:
        rows, columns = _pages_between(plan.rows, column, end // size, known)
    if rows.size:
        pages = tables.tables[:, rows, columns]
        raw = index.tokens[pages[0]].tobytes()
        tokens = [raw[i : i + 4 * size] for i in range(0, len(raw), 4 * size)]
        if tables.mixed:
            tokens = [
                tables.chain(row).before(b"", c) + own
                for row, c, own in zip(rows.tolist(), columns.tolist(), tokens)
            ]
        prefix_keys = [tables.prefix_keys[row] for row in rows.tolist()]
        for group, i in index.publish_full(pages, prefix_keys, tokens):
            _share_published(tables, group, int(rows[i]), int(columns[i]))
    # A page that was begun in an earlier step has its partial key listed already.
    if one_each:
        rows, columns = _chosen(plan, known & opened)
    else:
        last, some = -(-end // size), end > plan.start
        rows, columns = _pages_between(plan.rows, column + ~opened, last, known & some)
    if rows.size:
        pages = tables.tables[:, rows, columns]
        first = index.tokens[pages[0], 0].tobytes()
        places = list(zip(rows.tolist(), columns.tolist()))
        keys = [tables.prefix_keys[row][c] for row, c in places]
        if tables.mixed:
            keys = [tables.chain(row).before(key, c) for key, (row, c) in zip(keys, places)]
        keys = [key + first[4 * i : 4 * i + 4] for i, key in enumerate(keys)]
        index.publish_partial(pages, keys)


def completed(tables: PageTables, plan: PagePlan, kept: Ints) -> Ints:
    """Returns the pages of each group that a step completes with `kept` tokens, `[groups, n]`."""
    end = (plan.start + kept) // tables.page_size
    everyone = np.ones(plan.rows.size, dtype=bool)
    return tables.tables[tables.at(*_pages_between(plan.rows, plan.column, end, everyone))]


def _chosen(plan: PagePlan, chosen: Bools) -> tuple[Ints, Ints]:
    """Returns the row and the first written column of each chosen sequence."""
    some = np.flatnonzero(chosen)
    return plan.rows[some], plan.column[some]


def _pages_between(rows: Ints, first: Ints, stop: Ints, chosen: Bools) -> tuple[Ints, Ints]:
    """Returns rows and columns of the pages `first .. stop` of each chosen row, in order."""
    some = np.flatnonzero(chosen & (stop > first))
    rows, first, count = rows[some], first[some], stop[some] - first[some]
    if (count == 1).all():
        return rows, first
    return np.repeat(rows, count), np.repeat(first, count) + within(count)


def _share_published(tables: PageTables, group: int, row: int, column: int) -> None:
    """Moves a sequence to the page that was published earlier with the same tokens."""
    pool, page = tables.pool, int(tables.tables[group, row, column])
    published = tables.index.find(group, tables.prefix_keys[row][column + 1])
    # If other sequences own the page as well, it would not become free, so nothing would be gained.
    if published != page and pool.refcount[page] == 1:
        pool.share(np.asarray([published]))
        tables.index.forget(group, [page])
        tables.tables[group, row, column] = published
        pool.drop(np.asarray([page]))
        tables.changed.mark(group, np.asarray([row]), np.asarray([column]))
