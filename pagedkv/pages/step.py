"""One step over the page tables: `prepare` makes room, `commit` keeps it, `abort` gives it back.

`prepare` checks everything first and then takes pages, so that a failing call changes nothing.
Until `commit` lengths stay as they are: where a layer writes depends only on committed state.
"""

from __future__ import annotations

import numpy as np

from pagedkv.arrays import Ints, Tokens

from . import staging
from .evict import Evictor, Victims, make_room
from .ids import require_short
from .plan import Copy, PagePlan
from .pool import within
from .prefix import UNKNOWN_TOKEN
from .publish import publish, store_tokens
from .tables import PageTables


def prepare(
    tables: PageTables,
    rows: Ints,
    new: Ints,
    tokens: Tokens | None,
    max_step_tokens: int,
    evictor: Evictor | None = None,
) -> PagePlan:
    """Makes room for `new` tokens of each row: fresh pages, and copies of shared ones.

    Args:
        evictor: takes pages from sequences if pages run short.

    Raises:
        SequenceTooLongError: a sequence or the step is longer than the cache allows.
        OutOfPagesError: not all tokens fit; nothing was changed.
    """
    size = tables.page_size
    start = tables.lengths[rows]
    end = start + new
    total = require_short(tables, rows, end, new, max_step_tokens)
    column = start // size
    pages_before = tables.num_pages[rows]
    pages_after = (end + (size - 1)) // size
    grow = pages_after - pages_before
    offset = start - column * size
    none = rows[:0]
    most = 1 if total == rows.size else int(new.max())  # every sequence has at least one
    plan = PagePlan(rows, start, new, tokens, pages_before, column, offset, most, none, none)
    if tables.states is not None:
        tables.states.require_room(rows)

    tails = np.flatnonzero(tables.check_tail[rows])
    shared = _plan_copies(tables, plan, tails) if tails.size else []
    num_grown = int(grow.sum())
    order = none
    if num_grown:
        if num_grown == np.count_nonzero(grow):
            order = np.flatnonzero(grow)
            plan.grown_columns = pages_before[order]
        else:
            order = np.repeat(np.arange(rows.size), grow)
            plan.grown_columns = pages_before[order] + within(grow)
    if tables.staged:
        fresh, targets = _take_staged(tables, plan, order, shared, evictor)
        plan.copies = [Copy(g, which, source, targets[g]) for g, which, source in shared]
    elif num_grown or shared:
        _check_room(tables, plan, grow, num_grown, shared, evictor)
        fresh, targets = tables.pool.take(num_grown, [(g, which.size) for g, which, _ in shared])
        plan.copies = [Copy(*shares, target) for shares, target in zip(shared, targets)]
    if num_grown:
        plan.grown_rows = rows[order]
        places = tables.at(plan.grown_rows, plan.grown_columns)
        tables.tables[places] = fresh
        tables.changed.mark(*places)
        tables.column_of[fresh] = plan.grown_columns
        tables.num_pages[rows] = pages_after
    if tails.size:
        plan.spared = tables.reservations.extra[rows]  # a copy
        _copy_or_claim(tables, plan, tails)
    if tables.reservations.count and (num_grown or tails.size or tables.staged):
        tables.reservations.update(rows)
    if tables.states is not None:
        tables.states.prepare(rows)
    return plan


def _take_staged(
    tables: PageTables,
    plan: PagePlan,
    order: Ints,
    shared: list[tuple[int, Ints, Ints]],
    evictor: Evictor | None,
) -> tuple[Ints, list[Ints]]:
    """Takes coded and staging pages: for new entries, each group's copies, and codings."""
    reserved, start, rows = tables.reservations, plan.start, plan.rows
    end = start + plan.new
    needs = staging.needs_of(tables, start, end, order, plan.grown_columns)
    copies = [0] * len(tables.windows)
    for group, which, _ in shared:
        copies[group] = which.size
    wanted = staging.needed(needs, copies)
    coded = tables.coded_of(end) - tables.num_coded[rows]
    room = reserved.available()
    if reserved.total:
        nothing = np.zeros(rows.size, dtype=bool)
        covered = reserved.covered(rows, reserved.fewest_pages(rows), coded, nothing)
        room += covered * reserved.binding
    make_room(tables, evictor, wanted, room)
    fresh, targets, codings = staging.take(tables, needs, wanted, copies)
    tables.num_coded[rows] += coded
    plan.direct = staging.StepEntries(order[needs.direct], plan.grown_columns[needs.direct])
    plan.codings = staging.Codings(needs.completing, plan.column[needs.completing], codings)
    return fresh, targets


def _plan_copies(tables: PageTables, plan: PagePlan, tails: Ints) -> list[tuple[int, Ints, Ints]]:
    """Finds the pages to copy before they are written: `(group, order, pages)` of each group.

    If all owners of a page write in this step, the writer with the highest offset (the last of
    them in `seqs` order) keeps the page: no other owner has committed slots behind that offset. If
    some owner does not write, or if the page is coded, every writer copies.

    Args:
        tails: indices of the sequences whose tails have to be checked.
    """
    pool, index = tables.pool, tables.index
    rows, column = plan.rows[tails], plan.column[tails]
    offset = plan.offset[tails]
    tail = tables.tables[tables.at(rows, column)]
    if plan.tokens is not None:
        # If a prompt was found as a whole, its last token is stored already and is not written.
        position = (np.cumsum(plan.new) - plan.new)[tails]
        fed = plan.tokens[position]
        stored = (index.tokens[tail, offset] == fed).all(0) & (fed != UNKNOWN_TOKEN)
        held = stored & (pool.filled[tail] > offset).all(0) & (plan.new[tails] == 1)
        if held.any():
            plan.held = np.zeros(plan.rows.size, dtype=bool)
            plan.held[tails[held]] = True
    copies = []
    for group, pages in enumerate(tail):
        write = pages >= 0 if plan.held is None else (pages >= 0) & ~plan.held[tails]
        coded = (pages < tables.first_staging[group]) & tables.staged
        writers = np.flatnonzero(write & ((pool.refcount[pages] > 1) | coded))
        if not writers.size:
            continue
        unique, which, count = np.unique(pages[writers], return_inverse=True, return_counts=True)
        depth = offset[writers] * plan.rows.size + np.arange(writers.size)
        deepest = np.full(unique.size, -1)
        np.maximum.at(deepest, which, depth)
        stays = (depth == deepest[which]) & (count == pool.refcount[unique])[which]
        stays &= ~coded[writers]
        writers = writers[~stays]
        if writers.size:
            copies.append((group, tails[writers], pages[writers]))
    return copies


def _check_room(
    tables: PageTables,
    plan: PagePlan,
    grow: Ints,
    num_grown: int,
    shared: list[tuple[int, Ints, Ints]],
    evictor: Evictor | None,
) -> None:
    reserved = tables.reservations
    room = reserved.available()
    if evictor is None and not shared and num_grown <= min(room.tolist()):
        return
    needed = np.full(len(tables.windows), num_grown)
    copied = np.zeros(grow.size, dtype=bool)
    for group, order, _ in shared:
        needed[group] += order.size
        copied[order] = True
    if reserved.total:
        held = reserved.fewest_pages(plan.rows)
        room += reserved.covered(plan.rows, held, grow, copied) * reserved.binding
    make_room(tables, evictor, needed, room)


def _copy_or_claim(tables: PageTables, plan: PagePlan, tails: Ints) -> None:
    """Moves writers of shared pages to pages of their own; the others write in place."""
    pool, index = tables.pool, tables.index
    for group, order, source, target in plan.copies:
        rows, column = plan.rows[order], plan.column[order]
        place = group, rows, column - tables.evicted[group, rows]
        tables.tables[place] = target
        tables.changed.mark(*place)
        tables.column_of[target] = column
        # Only `commit` drops the source pages, so that an abort finds them as they were.
        index.tokens[target] = index.tokens[source]
        pool.filled[target] = plan.offset[order]
        tables.reservations.extra[rows] = False
    writers = tails if plan.held is None else tails[~plan.held[tails]]
    rows, column = plan.rows[writers], plan.column[writers]
    offset = plan.offset[writers]
    for group, pages in enumerate(tables.tables[tables.at(rows, column)]):
        below = pool.filled[pages] > offset
        for page, keep in zip(pages[below].tolist(), offset[below].tolist()):
            tables.forget_behind(group, page, keep)
    tables.check_tail[rows] = False
    plan.claimed = rows


def abort(tables: PageTables, plan: PagePlan) -> None:
    """Undoes everything that `prepare` did; cached pages that were reused stay forgotten."""
    if tables.states is not None:
        tables.states.abort(plan.rows)
    places = tables.at(plan.grown_rows, plan.grown_columns)
    grown = tables.tables[places]  # a copy
    tables.tables[places] = -1
    tables.num_pages[plan.rows] = plan.pages_before
    tables.pool.drop(grown.reshape(-1))
    for group, order, source, target in plan.copies:
        rows, column = plan.rows[order], plan.column[order]
        place = group, rows, column - tables.evicted[group, rows]
        tables.tables[place] = source
        tables.changed.mark(*place)
        tables.pool.drop(target)
        if plan.spared is not None and not tables.staged:
            tables.reservations.extra[rows] |= plan.spared[order]
    if plan.codings is not None:
        tables.pool.drop(plan.codings.target.reshape(-1))
        tables.num_coded[plan.rows] = tables.coded_of(plan.start)
    if plan.claimed is not None:
        tables.check_tail[plan.claimed] = True
    if tables.reservations.count:
        tables.reservations.update(plan.rows)


def commit(
    tables: PageTables,
    plan: PagePlan,
    accepted: Ints | None,
    tokens: Tokens | None,
    evictor: Evictor | None = None,
    revocable: bool = False,
) -> Victims | None:
    """Moves lengths by the accepted tokens and makes them findable.

    Args:
        accepted: `[B]`, how many tokens each sequence keeps, or None for all.
        tokens: ids of the accepted tokens, flat, -1 where unknown; None if none is known.
        revocable: until the next commit, windows keep every page that `truncate` needs to go back
            to the length before this step, or to any length since.

    Returns:
        Pages that are over the budget now, for `evictor.take`.

    Raises:
        PolicyError: the policy did not return scores; nothing was changed.
    """
    rows = plan.rows
    count = plan.new if accepted is None else accepted
    end = plan.start + count
    # The policy is asked before anything changes, because a caller's policy may raise.
    victims = None if evictor is None else evictor.over_budget(tables, rows, end)
    if accepted is not None:
        _give_back(tables, plan, end)
    if tables.states is not None:
        tables.states.commit(rows, count)
    for copy in plan.copies:
        tables.pool.drop(copy.source)
    taken = int(count.sum())
    one_each = plan.most == 1 and taken == rows.size
    store_tokens(tables, plan, count, one_each, tokens)
    if plan.codings is not None:
        staging.code(tables, rows, plan.codings, end)
        tables.num_coded[rows] = tables.coded_of(end)
        if accepted is not None:  # a text cut within a coded page needs a staging page
            tables.check_tail[rows] |= end % tables.page_size > 0
    tables.lengths[rows] = end
    tables.tokens_computed += taken
    if tokens is None:
        tables.ids_known[rows[count > 0]] = False
    else:
        if tokens.size and tokens.min() == UNKNOWN_TOKEN:
            tables.ids_known[np.repeat(rows, count)[tokens == UNKNOWN_TOKEN]] = False
        publish(tables, plan, end, one_each)
    for group, window in enumerate(tables.windows):
        if window is not None:
            newest = plan.start if revocable else end
            _drop_behind(tables, group, rows, newest - window - tables.rollback)
    if plan.claimed is not None:
        # A tail that was shared again while the step was open still needs the extra page.
        tables.reservations.extra[plan.claimed] &= tables.check_tail[plan.claimed]
    changes = accepted is not None or plan.claimed is not None or tables.staged
    if tables.reservations.count and changes:
        tables.reservations.update(rows)
        if tables.staged and accepted is not None:
            tables.reservations.settle(rows.tolist())
    if tables.pending:
        for row, taken in zip(rows.tolist(), count.tolist()):
            _advance_prompt(tables, row, taken)
    return victims


def _advance_prompt(tables: PageTables, row: int, taken: int) -> None:
    left = tables.pending.get(row)
    if left is not None:
        if taken < left.size:
            tables.pending[row] = left[taken:]
        else:
            del tables.pending[row]


def _give_back(tables: PageTables, plan: PagePlan, end: Ints) -> None:
    """Returns pages that no accepted token reached."""
    needed = -(-end // tables.page_size)
    spare = plan.grown_columns >= needed[_order_of(tables, plan)[plan.grown_rows]]
    rows, columns = plan.grown_rows[spare], plan.grown_columns[spare]
    places = tables.at(rows, columns)
    pages = tables.tables[places]
    tables.tables[places] = -1
    tables.num_pages[plan.rows] = np.maximum(needed, plan.pages_before)
    tables.pool.drop(pages[:, ::-1].reshape(-1))


def _order_of(tables: PageTables, plan: PagePlan) -> Ints:
    order = np.zeros(tables.max_sequences, dtype=np.int64)
    order[plan.rows] = np.arange(plan.rows.size)
    return order


def _drop_behind(tables: PageTables, group: int, rows: Ints, keep_from: Ints) -> None:
    """Drops the pages of one group that lie wholly before `keep_from`."""
    before = tables.first_kept[group, rows]
    first = np.minimum(np.maximum(keep_from, 0) // tables.page_size, tables.num_pages[rows])
    if not (first > before).any():
        return
    dropped = np.maximum(first - before, 0)
    order = np.repeat(np.arange(rows.size), dropped)
    gone_rows, columns = rows[order], before[order] + within(dropped)
    pages = tables.tables[group, gone_rows, columns]
    tables.tables[group, gone_rows, columns] = -1
    tables.first_kept[group, rows] = np.maximum(first, before)
    tables.pool.drop(pages)
    tables.changed.mark(group, gone_rows, columns)
