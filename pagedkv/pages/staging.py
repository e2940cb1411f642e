"""Staging pages: full-precision pages that are not coded yet, and the first page of each text.

A format that codes whole pages can code only complete ones. So a page that is written in several
steps is a *staging page*, in full precision. The step that completes it sets a coded page aside,
and the commit *codes* it: it writes the coded bytes into that page, which takes its place. A page
that one step fills is *direct*: it is coded as it is written. A text's first page is never coded.

When one sequence completes a shared staging page, the other owners keep the uncoded page: only a
sequence's own commit changes bytes that it has committed. A coded page is never written in place:
if a text was cut within one, `prepare` decodes it to a staging page before the next token, the way
it copies a shared page.

Invariant: all complete pages of a sequence except the first are coded.

Three other ways were tried. If a page is coded again whenever it changes, errors grow. If a dense
tail is kept outside of the table, some operation forgets it: reorder, crop, batch selection. With
three staging pages a sequence, 4 bits take more than a third of the bytes of 16 at 2,048 tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pagedkv.arrays import Bools, Ints

from .tables import PageTables


class StepEntries(NamedTuple):
    """Table entries of a step.

    Attributes:
        order: `[n]`, the index of each entry's sequence in the step.
        column: `[n]`, each entry's column of the text.
    """

    order: Ints
    column: Ints


class Codings(NamedTuple):
    """Staging pages that a step completes if all of it is accepted.

    Attributes:
        order: `[n]`, the index of each page's sequence in the step.
        column: `[n]`, the page's column of its text.
        target: `[groups, n]`, the coded page set aside for each staging page.
    """

    order: Ints
    column: Ints
    target: Ints


class Needs(NamedTuple):
    """The entries and sequences of a step that decide which pages it needs.

    Attributes:
        direct: whether this step fills each new entry completely.
        completing: indices of the sequences whose staging page the step completes.
    """

    direct: Bools
    completing: Ints


def needs_of(tables: PageTables, start: Ints, end: Ints, order: Ints, columns: Ints) -> Needs:
    """Finds which new entries a step fills, and which sequences complete a staging page."""
    size = tables.page_size
    direct = (columns > 0) & ((columns + 1) * size <= end[order])
    column, inside = start // size, start % size > 0
    completing = inside & (column > 0) & ((column + 1) * size <= end)
    return Needs(direct, np.flatnonzero(completing))


def needed(needs: Needs, copies: list[int]) -> Ints:
    """Counts the pages of every segment of the pool that a step takes.

    Args:
        copies: for each group, how many pages are copied before they are written.
    """
    direct = int(needs.direct.sum())
    staging = needs.direct.size - direct
    counts = [(direct + needs.completing.size, staging + n) for n in copies]
    return np.asarray(counts, dtype=np.int64).reshape(-1)


def take(
    tables: PageTables, needs: Needs, wanted: Ints, copies: list[int]
) -> tuple[Ints, list[Ints], Ints]:
    """Takes the pages of a step: for new entries, for copies, and for pages that will be coded."""
    taken = tables.pool.take(0, list(enumerate(wanted.tolist())))[1]
    fresh = np.empty((len(copies), needs.direct.size), dtype=np.int64)
    codings = np.empty((len(copies), needs.completing.size), dtype=np.int64)
    copied = []
    for group in range(len(copies)):
        coded, staging = taken[2 * group : 2 * group + 2]
        fresh[group, needs.direct], codings[group] = np.split(coded, [int(needs.direct.sum())])
        entries = int((~needs.direct).sum())
        fresh[group, ~needs.direct], rest = np.split(staging, [entries])
        copied.append(rest)
    return fresh, copied, codings


def due(tables: PageTables, rows: Ints, codings: Codings, end: Ints) -> list[tuple[Ints, Ints]]:
    """Returns, by group, the codings due for sequences that end at `end`, and their pages."""
    reached = (codings.column + 1) * tables.page_size <= end[codings.order]
    found = []
    for group, table in enumerate(tables.tables):
        at = rows[codings.order]
        pages = table[at, codings.column - tables.evicted[group, at]]
        # A prompt that was found as a whole may end in a page that is coded already.
        which = np.flatnonzero(reached & (pages >= tables.first_staging[group]))
        found.append((which, pages[which]))
    return found


def code(tables: PageTables, rows: Ints, codings: Codings, end: Ints) -> None:
    """Replaces due staging pages by their coded pages, and frees the coded pages not needed."""
    pool, index = tables.pool, tables.index
    for group, (which, source) in enumerate(due(tables, rows, codings, end)):
        target = codings.target[group, which]
        index.tokens[target] = index.tokens[source]
        pool.filled[target] = tables.page_size
        at, column = rows[codings.order[which]], codings.column[which]
        place = group, at, column - tables.evicted[group, at]
        tables.tables[place] = target
        tables.changed.mark(*place)
        tables.column_of[target] = column
        index.forget(group, source.tolist())  # other owners keep them, but no prompt finds them now
        pool.drop(source)
        pool.drop(np.delete(codings.target[group], which))
