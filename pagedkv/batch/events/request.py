"""A row as its caller sees it, and what happens to it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from threading import Event as Signal
from threading import get_ident
from typing import TYPE_CHECKING, Literal, NamedTuple

from pagedkv.batch.results import FinishReason, Result

if TYPE_CHECKING:
    from pagedkv.batch.rows import Row

    from .text import Text

Wish = Literal["cancel", "pause", "resume"]


class Event(NamedTuple):
    """A new token of a row, and the end of the row if this was its last.

    Attributes:
        request: what `add` returned for the row.
        token: its id; None where the row ended without one (an error, or it was cancelled).
        text: the text that is new and whole: no character and no stop string is cut in two.
            The texts of all events of a row, one behind the other, are the `text` of its result.
        logprob: log-probability of the token under the model's own distribution, if asked for.
        finish_reason: why the row ended; None while it goes on.
    """

    request: Request
    token: int | None
    text: str
    logprob: float | None = None
    finish_reason: FinishReason | None = None


class Request:
    """One prompt that was added, and its row.

    Any thread may call its methods.

    Attributes:
        index: how many prompts were added before it.
        result: its `Result`, once it ended; None before.
    """

    def __init__(
        self,
        index: int,
        tell: Callable[[Request, Wish], None],
        reader: Callable[[], int | None],
    ) -> None:
        self.index = index
        self.result: Result | None = None
        self.row: Row | None = None
        self.text: Text | None = None
        self.sent = 0  # tokens that have become events
        self.is_cancelled = False
        self.tell, self._ended = tell, Signal()
        self._reader = reader  # returns the thread that takes steps
        self._error: BaseException | None = None

    @property
    def is_over(self) -> bool:
        """Whether the row has ended."""
        return self._ended.is_set()

    def cancel(self) -> bool:
        """Ends the row at the next step; returns whether it still ran. Its pages are free then."""
        if self.is_over:
            return False
        self.is_cancelled = True
        self.tell(self, "cancel")
        return True

    def wait(self, timeout: float | None = None) -> Result:
        """Waits until another thread, which reads the events, has ended the row.

        Raises:
            RuntimeError: this thread reads them, and would wait for itself.
            TimeoutError: it takes longer than `timeout` seconds.
            Exception: the error that ended the steps of all rows.
        """
        if not self.is_over and self._reader() == get_ident():
            raise RuntimeError("wait: this thread reads the events; go on reading them instead")
        if not self._ended.wait(timeout):
            raise TimeoutError(f"wait: row {self.index} has not ended within {timeout} seconds")
        if self._error is not None:
            raise self._error
        assert self.result is not None
        return self.result

    def end(self, result: Result | None, error: BaseException | None = None) -> None:
        """Notes how the row ended, and wakes the threads that wait for it."""
        self.result, self._error, self.row = result, error, None
        self._ended.set()


Wishes = deque[tuple[Request, Wish]]
