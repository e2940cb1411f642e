"""What the ranks that share a model agree on between two steps of a job.

Each rank runs the same job on its own. Between steps it may learn what the others do not know: a
Ctrl-C, that time is over, a prompt that comes late or not at all, an error of its caller's code.
All of them meet where a turn begins, and what one of them has to say is heard by all.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from pagedkv.errors import OtherRankError
from pagedkv.ranks import Ranks

from .rows import Row
from .source import Source

T = TypeVar("T")


class Together:
    """One job on several ranks. Calls are collective: all ranks make them, in the same order.

    Attributes:
        is_over: whether the first rank's time for the job was over when this turn began.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks, self.is_over = ranks, False
        self._interrupts = Interrupts()
        self._is_met = False  # else the others wait for this rank

    def begin(self) -> None:
        """Begins the job on this rank.

        Raises:
            RuntimeError: another thread runs one; what each of them asks would meet at random.
        """
        self._ranks.enter(threading.get_ident())
        self._interrupts.begin()

    def end(self) -> None:
        """Ends the job on this rank, also if it never began. The others are not told."""
        self._interrupts.end()
        self._ranks.leave()

    def begin_turn(self, is_over: bool) -> None:
        """Meets the others.

        Raises:
            KeyboardInterrupt: somebody pressed Ctrl-C on one of them.
            OtherRankError: the job of one of them ended by an error.
        """
        over = is_over and self._ranks.is_first
        pressed, self.is_over, failed = map(bool, self._ranks.most(self._interrupts.count, over, 0))
        self._is_met = True
        if failed:
            said = [(i, text) for i, text in enumerate(self._ranks.gather("")) if text]
            raise OtherRankError(f"rank {said[0][0]} of {self._ranks.size}: {said[0][1]}")
        if pressed:
            raise KeyboardInterrupt

    def apart(self, step: Callable[[], T]) -> T:
        """Computes a step. What happens on this rank from then on, the others do not know.

        Raises:
            OtherRankError: one of them is gone, or does not come.
        """
        with self._ranks.hearing():
            ended = step()
        self._is_met = False
        return ended

    def tell(self, error: BaseException) -> None:
        """Tells the others of an error by which the job ends here, if they wait to hear of it."""
        if (
            not self._is_met
            and isinstance(error, Exception)
            and not isinstance(error, OtherRankError)
        ):
            self._is_met = True
            self._ranks.most(0, 0, 1)
            self._ranks.gather(f"{type(error).__name__}: {error}")

    def read(self, source: Source, most: int) -> None:
        """Reads prompts that nobody knows yet: as many as the first rank gets, the same on all.

        Raises:
            ValueError: they are not the same.
        """
        if source.known:
            return source.read(most)
        if source.is_over or source.num_read >= most:
            return
        before = source.num_read
        if self._ranks.is_first:
            source.read(most)
        count, ended = self._ranks.share((source.num_read - before, source.is_over))
        if not self._ranks.is_first:
            source.read_exactly(count, ended)
        try:
            self._ranks.require_same("prompts", source.said(count))
        except ValueError as error:
            raise error from source.error  # perhaps it is what made the difference

    def rows(self, make: Callable[[], list[list[Row]]]) -> list[list[Row]]:
        """The rows of some prompts; what is wrong with one on any rank is its error on all."""
        made = self._ranks.agree(make)
        told = self._ranks.gather([[row.error for row in rows] for rows in made])
        for rows, *wrong in zip(made, *told):
            for row, *errors in zip(rows, *wrong):
                row.error = next(filter(None, errors), None)
        return made


class Interrupts:
    """Ctrl-C is counted instead of raised; the second one is raised at once.

    Only where it would raise KeyboardInterrupt in this thread: elsewhere the caller's own handler
    stays.

    Attributes:
        count: how often it was pressed.
    """

    def __init__(self) -> None:
        self.count, self._is_mine = 0, False

    def begin(self) -> None:
        """Takes the place of Python's handler."""
        main = threading.current_thread() is threading.main_thread()
        if main and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, self._note)
            self._is_mine = True

    def _note(self, *_: Any) -> None:
        self.count += 1
        if self.count > 1:
            raise KeyboardInterrupt

    def end(self) -> None:
        """Gives Python's handler back. Idempotent."""
        if self._is_mine and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, signal.default_int_handler)
            self._is_mine = False
