"""Whose turn it is: jobs that several threads run on the pages of one cache.

A turn is a step, and the job whose last one is longest ago goes first. A job whose rows find no
pages may count on rows of other threads: they leave by themselves, unless their thread has ended or
waits here itself. So a job gives up its own rows before it waits, stands in line, and while it does
nobody else's rows join. After pages ran short none joins at all until one has left for good: of
those that run one always comes to its end, and no two put each other back for ever.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Condition, RLock, Thread, current_thread
from typing import Any, Protocol

from pagedkv.errors import OpenStepError
from pagedkv.interrupt import Uninterrupted

POLL = 0.1  # seconds after which who waits looks again: a thread may end without a word


@dataclass
class Turn:
    """What is known of one job.

    Attributes:
        thread: who runs it; of a stream that is paused, who did last.
        wanted: whether it asks for its turn now.
        latest: number of the last turn it had.
        tried: `Turns.departures` when that began.
    """

    thread: Thread = field(default_factory=current_thread)
    wanted: bool = False
    latest: int = 0
    tried: int = -1


class Job(Protocol):
    """Rows that are run by one thread at a time; those in `running` hold pages."""

    running: list[Any]
    turn: Turn


class Turns:
    """The jobs on one cache. All but `ask` and `forget` are called by the holder of its lock.

    Attributes:
        departures: how often rows have left for good.
        short_at: `departures` when a row was last put back for want of pages.
    """

    def __init__(self, lock: RLock) -> None:
        self._changed = Condition(lock)
        self._jobs: list[Job] = []
        self._line: list[Job] = []  # those that hold nothing and wait for pages
        self._in_turn: Job | None = None
        self._count = 0
        self.departures, self.short_at = 0, -1

    @property
    def is_mine(self) -> bool:
        """Whether the current thread is in a turn."""
        now = self._in_turn
        return now is not None and now.turn.thread is current_thread()

    def ask(self, job: Job) -> None:
        """The current thread wants a turn for a job, and is about to take the lock.

        Raises:
            OpenStepError: it is in a turn already.
        """
        if self.is_mine:
            raise OpenStepError(
                "generate: rows cannot be run from within a step of others on the same pages, as "
                "a processor would; give it a generator with a cache of its own"
            )
        job.turn.thread = current_thread()
        if job not in self._jobs:
            self._jobs.append(job)
        job.turn.wanted = job not in self._line

    def begin(self, job: Job) -> None:
        """Lets others go first, and waits a moment where nothing has left since the last turn."""
        turn = job.turn
        if job in self._line:
            self._wait_until(lambda: self._may_try(job))
            turn.wanted = True
        while not self._wait_until(lambda: self._is_next(job)):
            pass
        self._count += 1
        self._in_turn = job
        turn.wanted, turn.latest, turn.tried = False, self._count, self.departures

    def end(self, job: Job, waits: bool = False) -> None:
        """After the turn; whether the job holds nothing and waits for pages."""
        self._in_turn = None
        if waits and job not in self._line:
            self._line.append(job)
        elif not waits and job in self._line:
            self._line.remove(job)
        self._changed.notify_all()

    def leave(self, job: Job) -> None:
        """A job is over."""
        self.forget(job)
        self._changed.notify_all()

    def forget(self, job: Job) -> None:
        """`leave` for a finalizer, which may run in the middle of anything."""
        if self._in_turn is job:
            self._in_turn = None
        for jobs in (self._jobs, self._line):
            if job in jobs:
                jobs.remove(job)
        self.departures += 1

    def may_join(self, job: Job) -> bool:
        """Whether nobody else stands in line before a job's rows."""
        return not self._line or self._line[0] is job

    def others_may_leave(self, job: Job) -> bool:
        """Whether other rows will leave if this job waits.

        Those of its own thread will not, nor those of a thread that has ended or stands in line:
        the stream they belong to is paused.
        """
        held = {current_thread(), *(other.turn.thread for other in self._line)}
        return any(
            other.running and other.turn.thread not in held and other.turn.thread.is_alive()
            for other in self._jobs
            if other is not job
        )

    def who_holds(self, job: Job) -> str:
        """What an error may add about pages that are held by rows of other jobs."""
        if not any(other.running for other in self._jobs if other is not job):
            return ""
        return " Rows of a stream that is paused hold some of them: go on with it, or close it."

    def _may_try(self, job: Job) -> bool:
        """Whether a job in line may find what it did not find in its last turn."""
        if not self.may_join(job):
            return False
        return self.departures != job.turn.tried or not self.others_may_leave(job)

    def _is_next(self, job: Job) -> bool:
        turns = [other.turn for other in self._jobs if other.turn.wanted]
        return not any(t.latest < job.turn.latest and t.thread.is_alive() for t in turns)

    def _wait_until(self, ready: Callable[[], bool]) -> bool:
        """Whether it came true within a moment, for which others have the lock."""
        if ready():
            return True
        self._changed.notify_all()
        with Uninterrupted():  # Ctrl-C could lose the lock on its way out
            return self._changed.wait_for(ready, POLL)
