"""Decides which prompts wait for one another, so that a prefix is computed once.

If a prompt shares more with one that is still being computed than is stored so far, it waits for
that prompt instead of computing the same tokens beside it.
"""

from __future__ import annotations

from collections.abc import Iterable

from pagedkv.pages.salts import Salt, shared_tokens, up_to

from .branches import Branches, shared_length
from .rows import NOT_RUNNING, Row


class Heads:
    """The prompts that are being computed, by the page of tokens that they begin with.

    Args:
        page_size: tokens of a page; less is not worth waiting for.
        rows: the prompts that are being computed when admission begins.
    """

    def __init__(self, page_size: int, branches: Branches, rows: Iterable[Row]) -> None:
        self._size, self._branches = page_size, branches
        self._by_head: dict[tuple[Salt, bytes], list[Row]] = {}
        for row in rows:
            self.add(row)

    def add(self, row: Row) -> None:
        """Adds a row that has joined, if a part of its prompt is still to be computed."""
        if row.done < len(row.prompt):  # samples of one prompt part behind it
            self._by_head.setdefault(self._head(row), []).append(row)

    def _head(self, row: Row) -> tuple[Salt, bytes]:
        """Returns the salt and first tokens; rows that differ here do not wait for one another."""
        return up_to(row.salt, self._size), row.key[: row.prompt.itemsize * self._size]

    def delay(self, row: Row) -> bool:
        """Whether this row has to wait for another one that is computing tokens they share."""
        if row.waits_for is not None:
            other, shared = row.waits_for
            if other.seq != NOT_RUNNING and other.is_prefilling and other.done < shared:
                return True
        row.waits_for = None
        ids = row.text()
        for other in self._by_head.get(self._head(row), ()):
            salted = shared_tokens(row.salt, other.salt, self._size)
            shared = min(shared_length(ids, other.ids), salted)
            # One token is enough: equal prompts that start together are computed once.
            if shared > other.done and self._branches.counts(row, shared):
                row.waits_for = other, shared
                self._branches.cut(other, shared)
                return True
        return False
