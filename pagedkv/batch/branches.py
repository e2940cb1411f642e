"""Keeps recurrent states as checkpoints: where prompts part, and where texts end.

A prompt of a model with states is found up to a checkpoint, not up to any token. The scheduler
knows its prompts, so it keeps a checkpoint exactly where the texts of a running and a waiting row
part: the running row's step ends there. Such a place is a *branch*. It counts if it is at least a
page long and longer than what the waiting row finds anyway. Three more rules help prompts that
nobody knew of beforehand:

- If the pages found for a prompt reach a page or more beyond its latest state, the prompt has
  parted there from an earlier text. It keeps a checkpoint there for the next prompt.
- If no row waits, a row that ends keeps the state at the end of its answer; a row that is alone
  also keeps the state at the end of its prompt.
- A row that is put back keeps the state it had.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from pagedkv.arrays import Tokens
from pagedkv.cache.cache import PagedKVCache
from pagedkv.pages.prefix import leading
from pagedkv.pages.salts import shared_tokens

from .rows import Row


class Branches:
    """Keeps no checkpoints, for a model without recurrent states."""

    def plan(self, row: Row, waiting: Iterable[Row]) -> None:
        """Decides where a row that has just joined keeps its state for rows that wait."""

    def meet(self, rows: Iterable[Row], other: Row) -> None:
        """Makes rows keep their states where a row that begins to wait parts from them."""

    def counts(self, row: Row, length: int) -> bool:
        """Whether a waiting row can begin behind `length` tokens of its text."""
        return True

    def cut(self, row: Row, length: int) -> None:
        """Makes a row keep its state at a length, if it is not computed that far yet."""

    def most(self, row: Row) -> int:
        """Returns how many tokens the next step of a row may have."""
        return len(row.ids) - row.done

    def reached(self, rows: Iterable[Row]) -> None:
        """Keeps the states of rows that a step has brought to a cut."""

    def end_of_prompt(self, row: Row) -> None:
        """Keeps the state of a row whose prompt has just been computed, if a slot is unused."""

    def keep(self, rows: Sequence[Row]) -> None:
        """Keeps the states of rows that are about to leave."""


class StateBranches(Branches):
    """The checkpoints of a job's rows. A row's `cuts` are the lengths at which its steps end."""

    def __init__(self, cache: PagedKVCache) -> None:
        self.cache, self.least = cache, cache.config.page_size

    def plan(self, row: Row, waiting: Iterable[Row]) -> None:
        pages, _ = self._found(row)
        row.cuts = []
        if not row.joined_before and pages >= row.done + self.least:
            self.cut(row, pages)
        for other in waiting:
            self._part(row, other)

    def meet(self, rows: Iterable[Row], other: Row) -> None:
        for row in rows:
            self._part(row, other)

    def _part(self, row: Row, other: Row) -> None:
        """Makes a row keep its state where a waiting row parts from it."""
        most = shared_tokens(other.salt, row.salt, self.least)
        if most > row.done:
            length = min(most, shared_length(other.text(), row.ids))
            if length > row.done and length not in row.cuts and self.counts(other, length):
                self.cut(row, length)

    def counts(self, row: Row, length: int) -> bool:
        """Whether a checkpoint at a length of a row's text is worth a slot."""
        return length >= self.least and length > self._found(row)[1]

    def cut(self, row: Row, length: int) -> None:
        if row.done < length and length not in row.cuts:
            row.cuts = sorted([*row.cuts, length])

    def most(self, row: Row) -> int:
        return (row.cuts[0] if row.cuts else len(row.ids)) - row.done

    def reached(self, rows: Iterable[Row]) -> None:
        for row in rows:
            if row.done in row.cuts:
                self.cache.checkpoint(row.seq)
            # The step may have passed a cut that was asked for while it was composed.
            row.cuts = [length for length in row.cuts if length > row.done]

    def end_of_prompt(self, row: Row) -> None:
        is_unused = self.cache.stats().states < self.cache.config.max_states
        if row.done == len(row.ids) and is_unused:
            self.keep([row])

    def keep(self, rows: Sequence[Row]) -> None:
        for row in rows:
            if row.done >= self.least:
                self.cache.checkpoint(row.seq)

    def _found(self, row: Row) -> tuple[int, int]:
        return self.cache.stored_prefix(row.text(), salt=row.salt)


def shared_length(ids: Tokens, other: Tokens) -> int:
    """Counts the tokens that a prompt can find of a text: its last token is always computed."""
    n = min(len(ids) - 1, len(other))
    return leading(ids[:n] == other[:n])
