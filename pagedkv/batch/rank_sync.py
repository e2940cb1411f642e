"""Lets the ranks that share a model agree between two steps of a job.

Each rank runs the same job on its own. Between steps it may learn what the others do not know: a
Ctrl-C, the end of the time, a prompt that comes late or not at all, an error of its caller's code.
All ranks meet where a turn begins, and there each tells the others. A process that has its model
alone meets nobody: its `RankSync` costs nothing.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, TypeVar

from pagedkv.errors import OtherRankError
from pagedkv.ranks import Ranks

from .prompt_queue import Coming, PromptQueue
from .rows import Row

T = TypeVar("T")


class RankSync:
    """One job of a process that has its model alone.

    Attributes:
        is_over: whether the time for the job was over when this turn began.
        is_stale: whether another rank may have forgotten prefixes since the last turn.
        at_once: prompts that become rows together.
    """

    is_over = is_stale = False
    at_once = 1

    def begin(self) -> None:
        """Begins the job on this rank."""

    def end(self) -> None:
        """Ends the job on this rank, also if it never began. The others are not told."""

    def begin_turn(self, is_over: bool, is_stale: bool) -> None:
        """Meets the other ranks.

        Args:
            is_over: whether this rank finds that the time for the job is over.
            is_stale: whether it has forgotten prefixes, because its model has changed.
        """
        self.is_over = is_over

    def apart(self, step: Callable[[], T]) -> T:
        """Computes a step; from its end to the next turn this rank may fail alone."""
        return step()

    def tell(self, error: BaseException) -> None:
        """Tells the other ranks of an error that ends the job here, if they wait for this rank."""

    def read(self, source: PromptQueue, most: int, reading: AbstractContextManager[Any]) -> None:
        """Reads prompts until `most` wait.

        Args:
            reading: a context in which other threads may have the rows put back.
        """
        with reading:
            source.read(most)

    def rows(self, make: Callable[[Coming], list[Row]], coming: list[Coming]) -> list[list[Row]]:
        """Makes the rows of each prompt."""
        return [make(one) for one in coming]


class ManyRanks(RankSync):
    """One job on several ranks. Calls are collective: all ranks make them, in the same order.

    `is_over` is the first rank's.
    """

    at_once = 1 << 30  # the ranks meet once for all prompts that have come

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._interrupts = Interrupts()
        self._is_met = False  # if not, the other ranks wait for this one

    def begin(self) -> None:
        """Begins the job on this rank.

        Raises:
            RuntimeError: another thread runs a job; calls of the two would meet at random.
        """
        self._ranks.enter(threading.get_ident())
        self._interrupts.begin()

    def end(self) -> None:
        self._interrupts.end()
        self._ranks.leave()

    def begin_turn(self, is_over: bool, is_stale: bool) -> None:
        """See `RankSync`.

        Raises:
            KeyboardInterrupt: somebody pressed Ctrl-C on one of them.
            OtherRankError: the job of one of them ended by an error.
        """
        over = is_over and self._ranks.is_first
        told = self._ranks.most(self._interrupts.count, over, 0, is_stale)
        pressed, self.is_over, failed, self.is_stale = map(bool, told)
        self._is_met = True
        if failed:
            said = [(i, text) for i, text in enumerate(self._ranks.gather("")) if text]
            raise OtherRankError(f"rank {said[0][0]} of {self._ranks.size}: {said[0][1]}")
        if pressed:
            raise KeyboardInterrupt

    def apart(self, step: Callable[[], T]) -> T:
        """See `RankSync`.

        Raises:
            OtherRankError: one of the others is gone, or does not come.
        """
        with self._ranks.hearing():
            ended = step()
        self._is_met = False
        return ended

    def tell(self, error: BaseException) -> None:
        heard = isinstance(error, OtherRankError)
        if not self._is_met and isinstance(error, Exception) and not heard:
            self._is_met = True
            self._ranks.most(0, 0, 1, 0)
            self._ranks.gather(f"{type(error).__name__}: {error}")

    def read(self, source: PromptQueue, most: int, reading: AbstractContextManager[Any]) -> None:
        """Reads new prompts: as many as the first rank gets, the same on all.

        Raises:
            ValueError: the prompts of the ranks differ.
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
            raise error from source.error  # reading may have failed on one rank only

    def rows(self, make: Callable[[Coming], list[Row]], coming: list[Coming]) -> list[list[Row]]:
        """See `RankSync`; an error of a prompt on one rank is its error on all."""
        made = self._ranks.agree(lambda: [make(one) for one in coming])
        told = self._ranks.gather([[row.error for row in rows] for rows in made])
        for rows, *wrong in zip(made, *told):
            for row, *errors in zip(rows, *wrong):
                row.error = next(filter(None, errors), None)
        return made


def rank_sync(ranks: Ranks) -> RankSync:
    """Returns a `RankSync` for a job; it costs nothing in a process that has its model alone."""
    return ManyRanks(ranks) if ranks.size > 1 else RankSync()


class Interrupts:
    """Counts Ctrl-C instead of raising it; the second one is raised at once.

    It does so only if Ctrl-C would raise KeyboardInterrupt in this thread; a caller's own handler
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
