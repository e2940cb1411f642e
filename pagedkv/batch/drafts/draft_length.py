"""How many drafts a row gets, by how many of its last ones were right."""

from __future__ import annotations

from math import log

WORTH = 0.25  # a draft is made if its chance to be right is at least this
MEMORY = 0.9  # what drafts count falls to this with each step: about ten steps are remembered
EVERY = 16  # steps after which a row that gets no drafts is tried again


class DraftLength:
    """The number of drafts for one row: as many as are all right with a chance of `WORTH`.

    Args:
        most: drafts that it may get at once.
        chance: that its first draft is right, before anything is known of it.
    """

    def __init__(self, most: int, chance: float = 1.0) -> None:
        self._most, self._right, self._tried = most, chance, 1.0
        self._waited = self._paused = 0

    def learn(self, drafted: int, right: int) -> None:
        """Takes in how many of its drafts were right; those behind a wrong one do not count."""
        self._right = MEMORY * self._right + right
        self._tried = MEMORY * self._tried + right + (right < drafted)

    def pause(self) -> None:
        """Gives the row no drafts for a while."""
        self._paused = EVERY

    def next(self) -> int:
        """Returns the number of drafts for the next step."""
        if self._paused:
            self._paused -= 1
            return 0
        chance = min(self._right / self._tried, 1 - 1e-9)
        wide = int(log(WORTH) / log(chance)) if chance > 0 else 0
        if wide:
            return min(wide, self._most)
        self._waited = (self._waited + 1) % EVERY
        return 0 if self._waited else 1
