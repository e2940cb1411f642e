"""Notes changes of the page tables and the pool, for a trace to write down.

Without a trace nothing is noted: `PageTables` uses the two classes below only if it gets `Notes`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from pagedkv.arrays import Ints

from .dirty import DirtyEntries
from .pool import PagePool
from .prefix import PrefixIndex


@dataclass
class Notes:
    """The places that changed since the last `drain`; a place may occur repeatedly.

    Attributes:
        entries: flat indices into the tables that were written.
        pages: pages whose references, contents or place in the pool may have changed.
        evicted: pages that a policy evicted.
    """

    entries: list[Ints] = field(default_factory=list)
    pages: list[Ints] = field(default_factory=list)
    evicted: list[Ints] = field(default_factory=list)

    def drain(self) -> tuple[Ints, Ints, Ints]:
        """Returns `entries`, `pages` and `evicted`, ascending and distinct, and empties them."""
        return _drain(self.entries), _drain(self.pages), _drain(self.evicted)


_NOTHING: Ints = np.empty(0, dtype=np.int64)


def _drain(noted: list[Ints]) -> Ints:
    if not noted:
        return _NOTHING
    places = noted[0] if len(noted) == 1 else np.concatenate(noted)
    noted.clear()
    if places.size < 2:
        return places[places >= 0]
    places = np.sort(places)
    once = places >= 0  # -1: no page
    once[1:] &= places[1:] != places[:-1]
    return places[once]


class NotedEntries(DirtyEntries):
    """Notes written entries for a trace as well, which keeps them after they were sent."""

    def __init__(self, shape: tuple[int, ...], notes: Notes) -> None:
        super().__init__(shape)
        self._notes = notes

    def mark(self, groups: Any, rows: Ints, columns: Ints) -> None:
        super().mark(groups, rows, columns)
        self._notes.entries.append(self._flat(groups, rows, columns))


class NotedPool(PagePool):
    """Notes pages that are taken, shared, dropped or written anew."""

    def __init__(
        self, num_pages: Sequence[int], index: PrefixIndex, kinds: int, notes: Notes
    ) -> None:
        super().__init__(num_pages, index, kinds)
        self._notes = notes

    def _note(self, pages: Ints | int) -> None:
        self._notes.pages.append(np.array(pages).reshape(-1))  # a copy: it may be a view

    def renew(self, pages: Ints | int) -> None:
        super().renew(pages)
        self._note(pages)

    def add_owners(self, pages: Ints, owners: int) -> None:
        super().add_owners(pages, owners)
        self._note(pages)

    def share(self, pages: Ints) -> None:
        super().share(pages)
        self._note(pages)

    def drop(self, pages: Ints) -> None:
        super().drop(pages)
        self._note(pages)

    def release_cached(self) -> None:
        self._note(np.flatnonzero(self._stamp[:-1] >= 0))
        super().release_cached()
