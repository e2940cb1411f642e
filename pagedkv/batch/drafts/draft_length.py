"""How many drafts a row gets, by how many of its last ones were right."""

from __future__ import annotations

from math import log

WORTH = 0.25  # the chance to be right from which a draft is made
MEMORY = 0.9  # what counts of a step's drafts one step later: about ten steps are remembered
EVERY = 16  # steps after which a row is tried again of which no draft is worth it


class Pace:
    """The drafts of one row: as many as are all right with a chance of `WORTH`.

    Args:
        most: drafts that it may get at once.
        chance: that its first draft is right, before anything is known of it.
    """

    def __init__(self, most: int, chance: float = 1.0) -> None:
        self._most, self._right, self._tried = most, chance, 1.0
        self._waited = self._paused = 0

    def learn(self, drafted: int, right: int) -> None:
        """Takes in how many of its drafts were right; behind a wrong one they say nothing."""
        self._right = MEMORY * self._right + right
        self._tried = MEMORY * self._tried + right + (right < drafted)

    def pause(self) -> None:
        """Gives it none for a while."""
        self._paused = EVERY

    def next(self) -> int:
        """Drafts for the step that comes now."""
        if self._paused:
            self._paused -= 1
            return 0
        chance = min(self._right / self._tried, 1 - 1e-9)
        wide = int(log(WORTH) / log(chance)) if chance > 0 else 0
        if wide:
            return min(wide, self._most)
        self._waited = (self._waited + 1) % EVERY
        return 0 if self._waited else 1
