"""The page tables' part of a step: what `prepare` changed, and what `commit` and `abort` need."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from pagedkv.arrays import Bools, Ints, Tokens

if TYPE_CHECKING:
    from . import staging


class Copy(NamedTuple):
    """Pages of one group copied before a write, because others own them too."""

    group: int
    order: Ints  # which sequences of the step, `[n]`
    source: Ints  # `[n]`
    target: Ints  # `[n]`


@dataclass(slots=True)
class PagePlan:
    """The changes that a step makes to the page tables.

    Attributes:
        rows: `[B]`, one per sequence.
        start: `[B]`, committed tokens before the step.
        new: `[B]`, tokens this step adds.
        tokens: `[T]`, the ids of the new tokens, -1 where unknown; None if only counts were given.
        pages_before: `[B]`, table columns in use before the step.
        column, offset: `[B]`, the table column of the first new token and its slot there.
        most: new tokens of the sequence that gets most; 1 in plain decoding.
        grown_rows, grown_columns: `[n]`, entries that were given a fresh page in every group.
        copies: pages copied on write, before the first layer writes.
        held: `[B]`, whether a sequence's only new token is stored already, on a page that is
            shared; None if no sequence's is.
        spared: `[B]`, whether a page was set aside for the copy of a shared tail, or None.
        claimed: rows whose tail page was checked and is theirs to write now, or None.
        direct: in formats with staging pages, the new entries that this step fills from end to
            end; else None.
        codings: in formats with staging pages, the staging pages that this step completes; else
            None.
    """

    rows: Ints
    start: Ints
    new: Ints
    tokens: Tokens | None
    pages_before: Ints
    column: Ints
    offset: Ints
    most: int
    grown_rows: Ints
    grown_columns: Ints
    copies: list[Copy] = field(default_factory=list)
    held: Bools | None = None
    spared: Bools | None = None
    claimed: Ints | None = None
    direct: staging.StepEntries | None = None
    codings: staging.Codings | None = None

    def owned(self) -> list[Ints]:
        """Pages of which the step itself owns a reference until it ends, one for each entry."""
        set_aside = [] if self.codings is None else [self.codings.target.reshape(-1)]
        return [*(copy.source for copy in self.copies), *set_aside]
