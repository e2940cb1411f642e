"""Which entries of the page tables were written since they were last sent to the device."""

from __future__ import annotations

from typing import Any

import numpy as np

from pagedkv.arrays import Bools, Ints


class DirtyEntries:
    """Indices of written entries.

    Entries are noted as the places they are written to, not as columns of a text: pages move up
    where others are evicted, and `evict` notes all that moved.

    Args:
        shape: of the tables, `(groups, rows, columns)`.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        self._shape = shape
        self._noted: list[tuple[Any, Ints, Ints]] = []

    def note(self, groups: Any, rows: Ints, columns: Ints) -> None:
        """Takes an index into the tables: of each group a slice, one, or an array."""
        self._noted.append((groups, rows, columns))

    def places(self) -> Ints:
        """Flat indices into the tables, some of them perhaps twice."""
        nothing = np.empty(0, dtype=np.int64)
        return np.concatenate([nothing, *(self._flat(*index) for index in self._noted)])

    def clear(self) -> None:
        """All of it was sent."""
        self._noted.clear()

    @property
    def many(self) -> bool:
        """Whether sequences must have come and gone without a step."""
        return len(self._noted) > 2 * self._shape[1] + 64

    def forget_ended(self, live: Bools, columns: Ints) -> None:
        """Notes of the rows that are still in use all entries, once each, instead of the others.

        Args:
            live, columns: of all rows, whether they are in use and how many entries they have.
        """
        rows = np.unique(np.concatenate([np.ravel(rows) for _, rows, _ in self._noted]))
        self._noted = [
            (slice(None), np.asarray([row]), np.arange(columns[row]))
            for row in rows[live[rows]].tolist()
        ]

    def _flat(self, groups: Any, rows: Ints, columns: Ints) -> Ints:
        number, height, width = self._shape
        inside = rows * width + columns
        if isinstance(groups, slice):
            groups = np.arange(number).reshape(-1, *(1,) * inside.ndim)
        flat: Ints = groups * (height * width) + inside
        return flat.reshape(-1)
