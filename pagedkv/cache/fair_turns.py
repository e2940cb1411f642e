"""The order of turns for jobs that several threads run on the pages of one cache.

A turn is a step, and the job whose last turn is longest ago goes first. A job whose rows find no
pages may wait for rows of other threads to end, unless these threads have ended or wait here, too.
So a job gives up its own rows before it waits, stands in line, and meanwhile no rows of other jobs
join. After pages ran short no row joins at all until one has left for good: so one of the running
rows always comes to its end, and no two jobs put each other back for ever. Nobody takes pages from
a paused stream: its caller may have paused it to look at them. A job that reads prompts from its
caller puts its rows back if others wait for their pages: the next prompt may depend on the others.

A forward of a `PagedCache` is a turn, too. It lasts from one hook to another, and other threads
look from time to time whether its module is still called.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from threading import Condition, Thread, current_thread
from time import monotonic
from typing import Any, Protocol

from pagedkv.errors import OpenStepError
from pagedkv.interrupt import Uninterrupted

from .lock import Forward, PagesLock

POLL = 0.1  # seconds after which a waiting job looks again: a thread may end without notice


@dataclass
class Turn:
    """The state of one job.

    Attributes:
        thread: the thread that runs the job; for a paused stream the thread that ran it last.
        wanted: whether the job asks for its turn now.
        latest: number of the last turn that the job had.
        tried: `Turns.departures` when that turn began.
        put_back: puts the job's rows back; None unless its thread reads prompts.
        reads_since: when the thread began to read.
    """

    thread: Thread = field(default_factory=current_thread)
    wanted: bool = False
    latest: int = 0
    tried: int = -1
    put_back: Callable[[], None] | None = None
    reads_since: float = 0.0

    @contextmanager
    def reading(self, put_back: Callable[[], None]) -> Iterator[None]:
        """While prompts are read within, the holder of the lock may put the job's rows back."""
        self.reads_since, self.put_back = monotonic(), put_back
        try:
            yield
        finally:
            self.put_back = None

    @property
    def is_held_up(self) -> bool:
        """Whether the rows wait for a prompt, for long or in the current thread."""
        waited = self.thread is current_thread() or monotonic() - self.reads_since > POLL
        return self.put_back is not None and waited


class RowHolder(Protocol):
    """Rows that one thread at a time runs; the rows in `running` hold pages."""

    turn: Turn

    @property
    def running(self) -> Sequence[Any]: ...


@dataclass(eq=False)
class _Caller:
    """A thread that asks only for the lock, and goes before all jobs that had a turn."""

    running: Sequence[Any] = ()
    turn: Turn = field(default_factory=lambda: Turn(wanted=True))


class Turns:
    """The jobs on one cache.

    Only `ask`, `forget`, `begin_forward` and `end_forward` may be called without the cache's lock.

    Attributes:
        departures: how often rows have left for good.
        short_at: `departures` when a row was last put back for want of pages.
    """

    def __init__(self, lock: PagesLock) -> None:
        self._lock, self._changed = lock, Condition(lock.raw)
        lock.wait_for_forward = weakref.WeakMethod(self.wait_for_forward)
        self._asleep = 0  # threads that wait for a change
        self._jobs: list[RowHolder] = []
        self._line: list[RowHolder] = []  # jobs that hold no pages and wait for some
        self._in_turn: RowHolder | None = None
        self._count = 0
        self.departures, self.short_at = 0, -1

    @property
    def is_mine(self) -> bool:
        """Whether the current thread is in a turn."""
        now = self._in_turn
        return now is not None and now.turn.thread is current_thread()

    def ask(self, job: RowHolder) -> None:
        """Asks for a turn of a job in the current thread, which takes the lock next.

        Raises:
            OpenStepError: the thread is in a turn already.
        """
        if self.is_mine:
            raise OpenStepError(
                "generate: called inside an open step on the same pages, for example by a logits "
                "processor; use a generator with a cache of its own"
            )
        job.turn.thread = current_thread()
        if job not in self._jobs:
            self._jobs.append(job)
        job.turn.wanted = job not in self._line

    def begin(self, job: RowHolder) -> None:
        """Waits for the turns of jobs that come first, then begins a turn.

        A job in line waits until a row has left since its last turn.
        """
        turn = job.turn
        if job in self._line:
            self._wait_until(lambda: self._may_try(job))
            turn.wanted = True
        is_next = False
        while not is_next:
            is_next = self._wait_until(lambda: self._is_next(job))
        self._count += 1
        self._in_turn = job
        turn.wanted, turn.latest, turn.tried = False, self._count, self.departures

    def end(self, job: RowHolder, waits: bool = False) -> None:
        """Ends a turn.

        Args:
            waits: whether the job holds no pages now and waits for some.
        """
        self._in_turn = None
        if waits and job not in self._line:
            self._line.append(job)
        elif not waits and job in self._line:
            self._line.remove(job)
        self._changed.notify_all()

    def leave(self, job: RowHolder) -> None:
        """Takes out a job that is over."""
        self.forget(job)
        self._changed.notify_all()

    def forget(self, job: RowHolder) -> None:
        """Takes out a job and wakes no thread: for a finalizer, which may run at any point."""
        if self._in_turn is job:
            self._in_turn = None
        for jobs in (self._jobs, self._line):
            if job in jobs:
                jobs.remove(job)
        self.departures += 1

    def begin_forward(self, forward: Forward) -> None:
        """Waits for the turn of a forward, which lasts until `end_forward`.

        If the thread has a turn or holds the lock already, the forward is a part of that.
        """
        lock = self._lock
        if lock.is_held:
            return
        if lock.forward is None and not self._jobs:
            with lock.raw:
                if lock.forward is None and not self._jobs:
                    forward.turn.latest = self._count = self._count + 1
                    lock.forward = forward
                    return
        try:
            self.ask(forward)
            with lock.raw:
                self.begin(forward)
                self._in_turn = None
                self._jobs.remove(forward)
                lock.forward = forward
        except BaseException:
            self.end_forward(forward)
            if forward in self._jobs:
                self._jobs.remove(forward)
            raise

    def end_forward(self, forward: Forward) -> None:
        """Ends the turn of a forward, if it has one."""
        if self._lock.forward is not forward:
            return
        if not self._asleep:
            self._lock.forward = None
        if self._asleep:  # looked at again: a thread counts itself before it looks at `forward`
            with self._lock.raw:  # C code; an interrupt could fall between lines of a Condition's
                if self._lock.forward is forward:
                    self._lock.forward = None
                self._changed.notify_all()

    def wait_for_forward(self) -> None:
        """Waits until no forward of another thread is under way; ends one that was abandoned."""
        if not self._is_free():
            caller = _Caller()
            while not self._wait_until(self._is_free, caller):
                pass

    def _is_free(self) -> bool:
        forward = self._lock.forward
        if forward is None or forward.is_mine:
            return True
        if not forward.is_over():
            return False
        with Uninterrupted():
            self._lock.forward = None
            forward.abort()
        return True

    def may_join(self, job: RowHolder) -> bool:
        """Whether every job in line before this one, if there is any, waits for a prompt."""
        return next((o for o in self._line if o is job or not o.turn.is_held_up), job) is job

    def others_may_leave(self, job: RowHolder) -> bool:
        """Whether rows of other jobs will leave if this job waits.

        Rows of this job's own thread will not leave, nor rows of a thread that has ended or stands
        in line: their stream is paused. Nor will rows leave that wait for a prompt.
        """
        held = {current_thread(), *(other.turn.thread for other in self._line)}
        return any(
            other.running
            and other.turn.thread not in held
            and other.turn.thread.is_alive()
            and not other.turn.is_held_up
            for other in self._jobs
            if other is not job
        )

    def put_others_back(self, job: RowHolder) -> bool:
        """Puts back the rows of jobs that hold pages while they read prompts; whether any did."""
        reading = [o for o in self._jobs if o is not job and o.running and o.turn.is_held_up]
        for other in reading:
            if (put_back := other.turn.put_back) is not None:  # None if it has just got its prompt
                put_back()
        return bool(reading)

    def who_holds(self, job: RowHolder) -> str:
        """A sentence for an error, if rows of other jobs hold pages; else empty."""
        if not any(other.running for other in self._jobs if other is not job):
            return ""
        return " Rows of a stream that is paused hold some of them: go on with it, or close it."

    def _may_try(self, job: RowHolder) -> bool:
        """Whether a job in line may find pages that it did not find in its last turn."""
        if not self.may_join(job):
            return False
        return self.departures != job.turn.tried or not self.others_may_leave(job)

    def _is_next(self, job: RowHolder) -> bool:
        turns = [other.turn for other in self._jobs if other.turn.wanted]
        first = not any(t.latest < job.turn.latest and t.thread.is_alive() for t in turns)
        return first and self._is_free()

    def _wait_until(self, ready: Callable[[], bool], caller: RowHolder | None = None) -> bool:
        """Whether a condition is true within `POLL` seconds; meanwhile others may take the lock.

        Args:
            caller: is listed among the jobs meanwhile, so that others see it wait.
        """
        if ready():
            return True
        self._changed.notify_all()
        with Uninterrupted():  # Ctrl-C could lose the lock on its way out
            seen = [] if caller is None else [caller]
            self._asleep += 1
            self._jobs += seen
            try:
                return self._changed.wait_for(ready, POLL)
            finally:
                self._asleep -= 1
                for one in seen:
                    self._jobs.remove(one)
