"""Every invariant of the page tables, stated once and checked on request."""

from __future__ import annotations

import numpy as np

from pagedkv.errors import CorruptCacheError

from .plan import PagePlan
from .pool import PagePool
from .prefix import UNKNOWN_TOKEN
from .tables import PageTables


def check(tables: PageTables, plan: PagePlan | None = None) -> None:
    """Raises `CorruptCacheError` naming the first page or sequence that breaks an invariant.

    Args:
        plan: the open step, which holds references of its own.
    """
    pool, index, rows = tables.pool, tables.index, tables.live_rows()
    total = len(pool.refcount) - 1
    owners = np.zeros(total + 1, dtype=np.int64)
    held = tables.tables[:, rows]
    np.add.at(owners, held[held >= 0], 1)
    for pages in plan.owned() if plan else []:
        np.add.at(owners, pages, 1)
    check_pool(pool, owners[:-1], "page")
    free = (pool.refcount == 0) & ~pool.findable
    _all((pool.filled == 0) | ~free, "free but filled: page")

    known = pool.findable[:-1] & (pool.filled[:-1] == 0)
    _all(~known, "findable without a committed slot: page")
    for page, partial in index._partial_of.items():
        first = index.tokens[page, 0]
        if first.tobytes() != partial[-4:] or first == UNKNOWN_TOKEN:
            raise CorruptCacheError(f"listed under a token it does not start with: page {page}")
    for page in index._key_of:
        if pool.filled[page] != tables.page_size:
            raise CorruptCacheError(f"has a full page's key but free slots: page {page}")
    listed = np.zeros(total, dtype=bool)
    listed[[*index._partial_of, *index._key_of]] = True
    _all(listed == pool.findable[:-1], "findable differs from the index at page")
    _check_rows(tables, rows, plan)
    if tables.states is not None:
        check_pool(tables.states.pool, tables.states.owners(), "state slot")
        here = np.asarray([row for row in rows if row not in tables.offloaded], np.int64)
        tables.states.check(here, tables.lengths)


def check_pool(pool: PagePool, owners: np.ndarray, what: str) -> None:
    """Raises unless the pages of a pool have these owners, and each is live, cached or free.

    Args:
        what: the word for a page of this pool in errors.
    """
    total = len(pool.refcount) - 1
    _all(owners == pool.refcount[:-1], f"references differ from owners: {what}")
    cached = pool._stamp[:-1] >= 0
    live = pool.refcount[:-1] > 0
    free = np.zeros(total, dtype=np.int64)
    absent = np.zeros(total, dtype=bool)
    for group, start in enumerate(pool.base[:-1].tolist()):
        np.add.at(free, pool._stack[start : start + int(pool.num_free[group])], 1)
        stop = int(pool.base[group + 1])
        absent[start + int(pool.existing[group]) : stop] = True
        if int(cached[start:stop].sum()) != pool.num_cached[group]:
            raise CorruptCacheError(f"group {group} miscounts its cached pages")
    states = live.astype(int) + cached + free
    _all((states == 1) | absent, f"not exactly one of live, cached, free: {what}")
    _all(states == ~absent, f"live, cached or free before it exists: {what}")
    _all(~cached | pool.findable[:-1], f"cached but not findable: {what}")
    _all((free == 0) | ~pool.findable[:-1], f"free but findable: {what}")


def _check_rows(tables: PageTables, rows: np.ndarray, plan: PagePlan | None) -> None:
    pool, size = tables.pool, tables.page_size
    open_rows = set(plan.rows.tolist()) if plan else set()
    for row in rows.tolist():
        seq = tables.seqs[row]
        length, columns = int(tables.lengths[row]), int(tables.num_pages[row])
        if row in tables.offloaded:
            if columns or (tables.tables[:, row] >= 0).any():
                raise CorruptCacheError(f"sequence {seq} is offloaded and has pages")
            continue
        if row not in open_rows and columns != -(-length // size):
            raise CorruptCacheError(f"sequence {seq} has {columns} pages for {length} tokens")
        for group, table in enumerate(tables.tables[:, row]):
            first = int(tables.first_kept[group, row])
            held = columns - int(tables.evicted[group, row])
            if (table[held:] >= 0).any():
                raise CorruptCacheError(f"sequence {seq} has pages beyond its end")
            table = table[:held]
            if (table[:first] >= 0).any() or (table[first:] < 0).any():
                raise CorruptCacheError(f"sequence {seq} has a hole in group {group}")
            table = table[first:]
            texts = tables.column_of[table]
            moved = held == columns and (texts != np.arange(first, columns)).any()
            if moved or (np.diff(texts) < 1).any():
                raise CorruptCacheError(f"sequence {seq} has pages out of order in group {group}")
            if texts.size and texts[-1] >= columns:
                raise CorruptCacheError(f"page {table[-1]} lies beyond the end of sequence {seq}")
            low = table[pool.filled[table] < np.minimum(length - texts * size, size)]
            if low.size:
                raise CorruptCacheError(f"page {low[0]} has fewer slots than sequence {seq} needs")
            if tables.staged:
                _check_coded(tables, row, group, table, texts)
        if tables.evicted[:, row].any() and tables.ids_known[row]:
            raise CorruptCacheError(f"sequence {seq} lost pages and would be published")
        if length % size and row not in open_rows and not tables.check_tail[row]:
            tail = tables.tables[tables.at(row, np.asarray([columns - 1]))][:, 0]
            coded = (tail < tables.first_staging).any() and tables.staged
            shared = (pool.refcount[tail] > 1).any()
            if shared or coded or (pool.filled[tail] > length % size).any():
                raise CorruptCacheError(f"sequence {seq} would write to page {tail} unasked")
    reserved = tables.reservations
    every = np.arange(tables.max_sequences)
    owed = reserved.owed(reserved.limit, reserved.fewest_pages(every), reserved.extra)
    if (owed != reserved.promise).any() or reserved.total != owed.sum():
        raise CorruptCacheError("reservations do not add up")
    if (reserved.available()[reserved.binding] < 0).any():
        raise CorruptCacheError("more pages are promised than there are")


def _check_coded(
    tables: PageTables, row: int, group: int, table: np.ndarray, texts: np.ndarray
) -> None:
    """Raises unless a row's first page is a staging page and its other complete pages are coded.

    Args:
        table: the row's pages in a group.
        texts: the column of its text that each page holds.
    """
    complete = texts < int(tables.lengths[row]) // tables.page_size
    staging = table >= tables.first_staging[group]
    wrong = np.flatnonzero(complete & (staging != (texts == 0)))
    if wrong.size:
        kind = "staging" if staging[wrong[0]] else "coded"
        raise CorruptCacheError(
            f"sequence {tables.seqs[row]} has the {kind} page {table[wrong[0]]} in column "
            f"{texts[wrong[0]]}"
        )


def _all(good: np.ndarray, what: str) -> None:
    if not good.all():
        raise CorruptCacheError(f"{what} {int(good.argmin())}")
