"""The changes of `prepare` to the page tables, as `commit` and `abort` need them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from pagedkv.arrays import Bools, Ints, Tokens

if TYPE_CHECKING:
    from . import staging


class Copy(NamedTuple):
    """Pages of one group that are copied before a write, because other sequences own them too."""

    group: int
    order: Ints  # `[n]`, indices of the writing sequences in the step
    source: Ints  # `[n]`
    target: Ints  # `[n]`


@dataclass(slots=True)
class PagePlan:
    """The changes that a step makes to the page tables.

    Attributes:
        rows: `[B]`, each sequence's row.
        start: `[B]`, committed tokens before the step.
        new: `[B]`, tokens this step adds.
        tokens: `[T]`, the ids of the new tokens, -1 where unknown; None if only counts were given.
        pages_before: `[B]`, table columns in use before the step.
        column, offset: `[B]`, the table column of the first new token and its slot there.
        most: the largest number of new tokens that a sequence gets; 1 in plain decoding.
        grown_rows, grown_columns: `[n]`, entries that got a fresh page in every group.
        copies: pages copied on write, before the first layer writes.
        held: `[B]`, whether a shared page already stores a sequence's only new token; None if no
            sequence has such a token.
        spared: `[B]`, whether a page was set aside for the copy of a shared tail, or None.
        claimed: rows whose tail page was checked and may be written by them now, or None.
        direct: in formats with staging pages, the new entries that this step fills completely;
            else None.
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
        """Returns pages that the step owns until it ends, once for each reference."""
        set_aside = [] if self.codings is None else [self.codings.target.reshape(-1)]
        return [*(copy.source for copy in self.copies), *set_aside]
