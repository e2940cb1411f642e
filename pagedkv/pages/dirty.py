"""Notes entries of the page tables that were written since they were last sent to the device."""

from __future__ import annotations

from typing import Any

import numpy as np

from pagedkv.arrays import Bools, Ints


class DirtyEntries:
    """Indices of written entries.

    Marks are places in the tables, not columns of a text: an eviction moves later pages up, and
    `evict` marks all that moved.

    Args:
        shape: shape of the tables, `(groups, rows, columns)`.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        self._shape = shape
        self._marked: list[tuple[Any, Ints, Ints]] = []

    def mark(self, groups: Any, rows: Ints, columns: Ints) -> None:
        """Marks entries as written.

        Args:
            groups, rows, columns: an index into the tables; `groups` is a slice, one group, or an
                array.
        """
        self._marked.append((groups, rows, columns))

    def places(self) -> Ints:
        """Returns flat indices into the tables; some may occur twice."""
        nothing = np.empty(0, dtype=np.int64)
        return np.concatenate([nothing, *(self._flat(*index) for index in self._marked)])

    def clear(self) -> None:
        """Forgets all entries, because they were sent."""
        self._marked.clear()

    @property
    def many(self) -> bool:
        """Whether many marks have gathered, because sequences came and went without a step."""
        return len(self._marked) > 2 * self._shape[1] + 64

    def forget_ended(self, live: Bools, columns: Ints) -> None:
        """Marks all entries of rows that are still in use, once each, and forgets the others.

        Args:
            live, columns: `[rows]`, whether each row is in use, and how many entries it has.
        """
        rows = np.unique(np.concatenate([np.ravel(rows) for _, rows, _ in self._marked]))
        self._marked = [
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
