"""How many drafts a row gets, by how many of its last ones were right."""

from __future__ import annotations

LONGEST_REST = 16  # steps: a text that has become easy to guess is noticed within so many


class Pace:
    """The drafts of one row: one more than were right, and none for a while where none ever are.

    A draft that is wrong costs a token's arithmetic twice, in the draft model and in the step. So
    after n steps in a row whose drafts were all wrong, the row rests for 2**n - 1 steps.

    Args:
        most: drafts that it may get at once.
    """

    def __init__(self, most: int) -> None:
        self._most, self.width = most, most
        self._misses = self._rest = 0

    def learn(self, drafted: int, right: int) -> None:
        """Takes in how many of its drafts were right."""
        if right:
            self.width, self._misses = min(self._most, right + 1 + (right == drafted)), 0
            return
        self.width, self._misses = 1, self._misses + 1
        self._rest = min(LONGEST_REST, 2**self._misses - 1)

    def pause(self) -> None:
        """Has it rest as long as ever."""
        self._rest = LONGEST_REST

    def next(self) -> int:
        """Drafts for the step that comes now."""
        if self._rest:
            self._rest -= 1
            return 0
        return self.width
