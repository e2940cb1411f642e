"""What a step is going to do to the page tables, and has done by the time it is open."""

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
class StepPlan:
    """What a step does to the page tables.

    Attributes:
        rows: `[B]`, one per sequence.
        start: `[B]`, committed tokens before the step.
        new: `[B]`, tokens this step adds.
        tokens: their ids `[T]`, -1 where unknown; None if fed by count altogether.
        pages_before: `[B]`, table columns in use before the step.
        column, offset: `[B]`, the table column of the first new token and its slot there.
        most: new tokens of the sequence that gets most; 1 in plain decoding.
        grown_rows, grown_columns: `[n]`, entries that were given a fresh page in every group.
        copies: copy-on-write, done before the first layer writes.
        held: `[B]`, sequences whose one token is already stored on a shared page, or None.
        claimed: rows that had to look and now own their tail page alone, or None.
        direct: with staging pages, new entries that this step fills from end to end.
        codings: with staging pages, those that it completes.
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
    claimed: Ints | None = None
    direct: staging.StepEntries | None = None
    codings: staging.Codings | None = None
