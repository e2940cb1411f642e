"""Evicts whole pages from sequences: how many, which ones, and how the tables change.

How many pages leave follows from a budget or a share of the text, checked in `commit` whenever a
sequence has filled a page, and from the pools' watermarks, checked in `prepare` before pages are
taken. A policy chooses the pages; shared pages, the newest pages and pages that a reservation
promised are never offered to it. The pages behind an evicted one move up in the table, so that
attention sees no hole. A sequence that lost pages no longer holds a prefix of a text, so none of
its later pages become findable.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from pagedkv.arrays import Floats, Ints
from pagedkv.config import CacheConfig
from pagedkv.errors import PolicyError
from pagedkv.retention import PageRecords, Policy

from .out_of_pages import out_of_pages
from .pool import within
from .tables import PageTables

# Reads statistics from the device: takes their names, pages `[n]` and the owners `[n]` of these
# pages, and returns `[n]` numbers for each name.
Measure = Callable[[tuple[str, ...], Ints, Ints], dict[str, Floats]]
# Averages values of pages that leave a group into pages that stay: takes the group, the pages that
# leave and the pages that stay, computes the averages, and returns a function that writes them.
Merge = Callable[[int, Ints, Ints], Callable[[], None]]


class TableEntries(NamedTuple):
    """Entries of the tables: `[n]` groups, rows and columns; the columns of a row ascend."""

    groups: Ints
    rows: Ints
    columns: Ints


class Victims(NamedTuple):
    """Entries to evict, and entries of the same tables that may receive their merged values."""

    leaving: TableEntries
    receivers: TableEntries


class _Held(NamedTuple):
    """Whole pages of some tables. A page's owner is the table of one row in one group.

    Attributes:
        groups, rows: `[owners]`, the group and row of each table.
        owner: `[n]`, the index of each page's owner; pages are in order of owner, then column.
        columns: `[n]`, the column each page is in.
        pages: `[n]`, page ids.
        free: `[n]`, whether the page may be evicted.
    """

    groups: Ints
    rows: Ints
    owner: Ints
    columns: Ints
    pages: Ints
    free: np.ndarray


class Evictor:
    """Chooses the pages that leave.

    Args:
        policy: ranks them.
        measure: collects what the policy needs.
        merge: averages the values of pages that leave into others, if the policy asks for it.
    """

    def __init__(self, config: CacheConfig, policy: Policy, measure: Measure, merge: Merge) -> None:
        self.policy, self.kept, self._newest = policy, config.kept, config.newest_kept
        self._measure, self._merge = measure, merge
        groups = range(len(config.groups))
        self._concerns = np.asarray([config.groups[g].window is None for g in groups])
        total = np.asarray([config.num_pages(g) for g in groups])
        self._high = (total * config.high_water).astype(np.int64)
        self._low = (total * config.low_water).astype(np.int64)

    @classmethod
    def of(cls, config: CacheConfig, measure: Measure, merge: Merge) -> Evictor | None:
        """Returns the evictor of a configuration; None if it has no policy."""
        return None if config.policy is None else cls(config, config.policy, measure, merge)

    # ------------------------------------------------------------------ how many

    def over_budget(self, tables: PageTables, rows: Ints, lengths: Ints) -> Victims | None:
        """Chooses the pages that rows hold beyond their budgets once they have these lengths.

        Only rows that fill a page in this step are checked: a row may stay over its budget because
        its pages are shared, and would otherwise be ranked again in every step.
        """
        size = tables.page_size
        columns = lengths // size
        filled = columns > tables.lengths[rows] // size
        if self.kept is None or not filled.any():
            return None
        whole = columns - tables.evicted[:, rows]
        excess = np.where(self._concerns[:, None] & filled, whole - self.kept.pages(columns), 0)
        groups, order = np.nonzero(excess > 0)
        if not groups.size:
            return None
        ends = whole[groups, order], lengths[order]
        held = self._held(tables, groups, rows[order], *ends, self._newest)
        scores = self._scores(tables, held, lengths[order])
        return _lowest(held, scores, excess[groups, order])

    def relieve(
        self, tables: PageTables, needed: Ints, room: Ints, grows: bool
    ) -> tuple[Ints, Victims | None]:
        """Chooses the pages to evict if a step would pass the high watermark.

        Sequences with most pages lose them first, as if all got the same budget. All evictable
        pages together may not be enough.

        Args:
            needed: pages of every segment of the pool that the step takes.
            room: pages of every segment that the step may have without an eviction.
            grows: whether the pool may still grow by the pages that it does not have yet.

        Returns:
            How many pages of every segment become free, and the pages. Staging pages are never
            evicted, because every sequence needs its own.
        """
        pool, coded = tables.pool, slice(None, None, tables.kinds)
        short = needed - room - (pool.num_pages - pool.existing) * grows
        back, missing = np.zeros_like(needed), short[coded]
        after = (pool.existing - pool.num_free - pool.num_cached + needed)[coded]
        wanted = np.where(after > self._high, after - self._low, 0)
        wanted = np.where(self._concerns, np.maximum(wanted, missing), 0)
        live = tables.live_rows()
        live = live[tables.num_pages[live] > 0]  # others may be in host memory
        whole = tables.lengths[live] // tables.page_size - tables.evicted[:, live]
        groups, order = np.nonzero((wanted > 0)[:, None] & (whole > 0))
        if not groups.size:
            return back, None
        rows, whole = live[order], whole[groups, order]
        held = self._held(tables, groups, rows, whole, tables.lengths[rows], self.policy.recent)
        staging = held.pages >= tables.first_staging[groups[held.owner]]
        held.free[staging] = False
        scores = self._scores(tables, held, tables.lengths[rows])
        spare = np.bincount(held.owner[scores < np.inf], minlength=groups.size)
        limit = tables.reservations.limit[rows]  # of coded pages: no staging page counts
        coded_pages = np.bincount(held.owner[~staging], minlength=groups.size)
        spare = np.where(limit > 0, np.minimum(spare, np.maximum(coded_pages - limit, 0)), spare)
        count = np.zeros_like(spare)
        for group in np.flatnonzero(wanted > 0):
            mine = groups == group
            count[mine] = _level(whole[mine], spare[mine], int(wanted[group]))
            back[coded][group] = count[mine].sum()
        return back, _lowest(held, scores, count)

    def take(self, tables: PageTables, victims: Victims) -> None:
        """Takes pages out of their rows, and first merges their values if the policy asks for it.

        If merging raises, for example because memory is short, nothing was changed.
        """
        leaving, receivers = (_still_own(tables, entries) for entries in victims)
        merged = []
        if self.policy.merges and leaving.rows.size and receivers.rows.size:
            for group, row in np.unique(np.stack(leaving[:2], 1), axis=0).tolist():
                leave, stay = (
                    tables.tables[group, row, e.columns[(e.groups == group) & (e.rows == row)]]
                    for e in (leaving, receivers)
                )
                if stay.size:
                    merged.append((group, stay, self._merge(group, leave, stay)))
        for group, stay, write in merged:
            # With merged values the pages hold no prefix of other texts any more.
            tables.index.forget(group, stay[tables.pool.findable[stay]].tolist())
            tables.pool.renew(stay)
            write()
        evict(tables, leaving)

    # ------------------------------------------------------------------ which

    def _held(
        self, tables: PageTables, groups: Ints, rows: Ints, whole: Ints, lengths: Ints, recent: int
    ) -> _Held:
        """Returns the first `whole` pages of these tables, and which of them may be evicted.

        The `recent` newest tokens of each row may not.
        """
        owner = np.repeat(np.arange(groups.size), whole)
        columns = within(whole)
        pages = tables.tables[groups[owner], rows[owner], columns]
        newest = np.maximum(lengths - recent, 0) // tables.page_size
        free = (tables.column_of[pages] < newest[owner]) & (tables.pool.refcount[pages] == 1)
        return _Held(groups, rows, owner, columns, pages, free)

    def _scores(self, tables: PageTables, held: _Held, lengths: Ints) -> Floats:
        """The policy's score of each page; `inf` for pages that are not offered to it."""
        scores = np.full(held.owner.size, np.inf)
        free = np.flatnonzero(held.free)
        if not free.size:
            return scores
        measured, broken = {}, np.zeros(free.size, dtype=bool)
        if self.policy.needs:
            measured = self._measure(self.policy.needs, held.pages, held.owner)
            # Pages with NaN or infinite statistics are evicted first within their sequence.
            broken = ~np.logical_and.reduce([np.isfinite(x[free]) for x in measured.values()])
        owner = held.owner[free]
        records = PageRecords(
            owner=np.unique(owner, return_inverse=True)[1],
            position=tables.column_of[held.pages[free]] * tables.page_size,
            tokens=np.full(free.size, tables.page_size),
            length=lengths[owner],
            **{name: np.nan_to_num(x[free], posinf=0, neginf=0) for name, x in measured.items()},
        )
        found = _checked(self.policy, self.policy.keep_scores(records), free.size)
        scores[free] = np.where(broken & (found < np.inf), -np.inf, found)
        return scores


def _checked(policy: Policy, answer: object, n: int) -> Floats:
    """Returns a policy's answer as floats; raises if it is not one number for each page."""
    name = f"{policy}.keep_scores"
    try:
        scores = np.asarray(answer)
    except ValueError as error:  # lists of different lengths
        raise PolicyError(f"{name}: expected [{n}] numbers, got no array: {error}") from None
    if scores.shape != (n,) or scores.dtype.kind not in "fiub":
        raise PolicyError(
            f"{name}: expected [{n}] numbers, got {scores.dtype} of shape {list(scores.shape)}"
        )
    if np.isnan(scores).any():
        raise PolicyError(f"{name}: expected numbers, got NaN in row {np.isnan(scores).argmax()}")
    return scores.astype(np.float64)


def _lowest(held: _Held, scores: Floats, count: Ints) -> Victims:
    """The pages of each owner with the `count` lowest scores, the oldest of equal ones first."""
    order = np.lexsort((held.columns, scores, held.owner))
    owner = held.owner[order]
    rank = np.arange(owner.size) - np.searchsorted(owner, owner)
    leaves = np.zeros(owner.size, dtype=bool)
    leaves[order] = (rank < count[owner]) & (scores[order] < np.inf)
    # Pages with the score `inf`, which the policy never evicts, receive no merged values.
    takes_over = ~leaves & (~held.free | (scores < np.inf))
    return Victims(_entries(held, leaves), _entries(held, takes_over))


def _entries(held: _Held, chosen: np.ndarray) -> TableEntries:
    owner = held.owner[chosen]
    return TableEntries(held.groups[owner], held.rows[owner], held.columns[chosen])


def _level(whole: Ints, spare: Ints, wanted: int) -> Ints:
    """Returns how many pages each owner gives, `wanted` in all, or as many as they can.

    Each owner gives its pages above a common level, as far as it can spare them; the level is the
    highest one that yields enough.

    Args:
        whole: `[owners]`, whole pages of each.
        spare: `[owners]`, pages that each may give.
    """

    def above(level: int) -> Ints:
        return np.minimum(spare, np.maximum(whole - level, 0))

    levels = range(1, int(whole.max()) + 1)
    level = bisect_left(levels, True, key=lambda level: above(level).sum() < wanted)
    given = above(level)
    # The next higher level yields too little. So some owners that would give one page less there
    # keep this page.
    surplus = max(0, int(given.sum()) - wanted)
    last = np.flatnonzero(given > above(level + 1))
    given[last[:surplus]] -= 1
    return given


def make_room(tables: PageTables, evictor: Evictor | None, needed: Ints, room: Ints) -> None:
    """Evicts pages or grows the pool until a step has its pages.

    Args:
        needed: pages of every segment of the pool that the step takes.
        room: pages of every segment that the step may have before anything is evicted.

    Raises:
        OutOfPagesError: neither gives enough pages; nothing was changed.
    """
    back, victims = np.zeros_like(needed), None
    if evictor is not None:
        back, victims = evictor.relieve(tables, needed, room, grows=True)
    short = needed - room - back
    if short.max() > 0 and not tables.grow(short):
        if evictor is not None:  # there was no memory to grow by
            back, victims = evictor.relieve(tables, needed, room, grows=False)
            short = needed - room - back
        if short.max() > 0:
            worst = int(short.argmax())
            raise out_of_pages(tables, "prepare", worst, int(needed[worst]), int(room[worst]))
    if evictor is not None and victims is not None:
        evictor.take(tables, victims)


# ------------------------------------------------------------------ what becomes of the tables


def _still_own(tables: PageTables, entries: TableEntries) -> TableEntries:
    """Returns the entries whose page no other sequence owns.

    Since the entries were chosen, a commit may have given a sequence a page published earlier.
    """
    pages = tables.tables[entries]
    mine = tables.pool.refcount[pages] == 1
    return TableEntries(*(part[mine] for part in entries))


def evict(tables: PageTables, entries: TableEntries) -> None:
    """Takes pages out of their rows; the pages behind them move up."""
    pool = tables.pool
    groups, rows, columns = entries
    pages = tables.tables[entries]
    if not pages.size:
        return
    for page in pages[pool.findable[pages]].tolist():
        tables.index.forget(int(pool.group_of[page]) // tables.kinds, [page])
    pool.drop(pages)
    if tables.notes is not None:
        tables.notes.evicted.append(pages)
    flat = groups * tables.max_sequences + rows
    _, begin, which = np.unique(flat, return_index=True, return_inverse=True)
    groups, rows = groups[begin], rows[begin]
    width = int((tables.num_pages[rows] - tables.evicted[groups, rows]).max())
    where = groups[:, None], rows[:, None], np.arange(width)
    kept = tables.tables[where]
    kept[which, columns] = -1
    order = np.argsort(kept < 0, axis=1, kind="stable")
    tables.tables[where] = np.take_along_axis(kept, order, axis=1)
    tables.changed.mark(*where)
    tables.compacted = True
    if tables.staged:
        coded = pages < tables.first_staging[groups[which]]
        tables.evicted_coded[groups, rows] += np.bincount(which, coded).astype(np.int64)
    tables.evicted[groups, rows] += np.bincount(which)
    tables.pages_evicted += pages.size
    tables.ids_known[rows] = False
    tables.bound_promises(np.unique(rows))
