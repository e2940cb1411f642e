"""Replaces tokens of a text: plans how far its sequence goes back, and which ids follow."""

from __future__ import annotations

from operator import index
from typing import NamedTuple

import numpy as np

from pagedkv.arrays import Tokens

from . import restore, sequences
from .prefix import UNKNOWN_TOKEN, leading
from .tables import PageTables


class Splice(NamedTuple):
    """The plan for a sequence whose tokens are replaced.

    Attributes:
        row: the sequence's row.
        kept: tokens that stay as they are.
        rest: ids behind them, to be computed.
    """

    row: int
    kept: int
    rest: Tokens


def plan(tables: PageTables, seq: int, start: int, stop: int, tokens: Tokens) -> Splice:
    """Plans the replacement of tokens `start .. stop` of a text; changes nothing.

    Raises:
        ValueError: there are no such tokens; or the sequence cannot go back, because of a window, a
            policy or a state; or ids behind them are not known; or tokens would leave their region.
        SequenceTooLongError: the new text can never fit.
    """
    row = tables.row_of(seq)
    tables.require_here([row])
    start, stop, size = index(start), index(stop), tables.size_of(row)
    if not 0 <= start <= stop <= size:
        raise ValueError(
            f"start, stop: expected 0 <= start <= stop <= {size}, sequence {seq} has {size} "
            f"tokens, got {start}, {stop}"
        )
    regions = tables.chain(row).mixed
    if tokens.size < stop - start and any(c * tables.page_size > start for c in regions):
        raise ValueError(
            f"tokens: expected at least {stop - start}: with fewer, tokens behind a region of the "
            f"salt of sequence {seq} would move before it and be found by others; add the new text "
            "with regions of its own"
        )
    text = np.concatenate([restore.text_of(tables, row), tables.uncached(seq)])
    changed = np.concatenate([tokens, text[stop:]])
    if not start + changed.size:
        raise ValueError("tokens: expected a text of at least one token, got none")
    sequences.require_fits(tables, start + changed.size, None)
    before = text[start : start + changed.size]
    same = before == changed[: before.size]
    kept, committed = start + leading(same), int(tables.lengths[row])
    kept = min(kept, committed)
    if tables.states is not None and kept < committed:
        kept = max([n for n in tables.states.checkpoints.lengths(row) if n <= kept], default=kept)
    try:
        sequences.require_truncatable(tables, seq, kept)
    except ValueError as error:
        raise ValueError(f"start: {str(error).removeprefix('n: ')}") from None
    again = np.arange(size)
    again = again[((again >= kept) & (again < start)) | (again >= stop)]  # old tokens of the rest
    unknown = again[text[again] == UNKNOWN_TOKEN]
    if unknown.size:
        first = int(unknown[0])
        raise ValueError(
            f"{'stop' if first >= stop else 'start'}: the id of token {first} of sequence {seq} is "
            "not known: it was fed by count, or a window has dropped its page"
        )
    rest = np.concatenate([text[kept:start], changed[max(0, kept - start) :]])
    return Splice(row, kept, rest)


def splice(tables: PageTables, seq: int, kept: int, rest: Tokens) -> None:
    """Cuts a sequence to the kept tokens and makes the rest uncached."""
    sequences.truncate(tables, seq, kept)
    row = tables.row_of(seq)
    tables.pending.pop(row, None)
    if rest.size:
        tables.pending[row] = rest
