"""The command as one of several processes that torchrun started: the first speaks, others follow.

They share out one model and compute the same rows. Only the first reads prompts, opens the output,
prints, and shows progress. It hands its results, or its error, to the others.
"""

from __future__ import annotations

import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from pagedkv.interrupt import Uninterrupted

from .errors import UsageError
from .option import Given
from .prompts import Prompt
from .report import INTERRUPTED, SOME_FAILED, TERMINATED

if TYPE_CHECKING:  # it brings torch along, for which one process alone does not wait
    from pagedkv.ranks import LaunchedRanks, Ranks

    from .job_spec import Job

T = TypeVar("T")

PARTING = 5.0  # seconds that the first process waits for others, which may be gone
LAUNCHED = ("RANK", "LOCAL_RANK", "WORLD_SIZE")  # variables that torchrun sets for its processes


def processes() -> int:
    """Counts the processes that a launcher started to run this command together."""
    if not all(os.environ.get(name, "").isdecimal() for name in LAUNCHED):
        return 1
    return int(os.environ["WORLD_SIZE"])


def follows() -> bool:
    """Whether another process speaks for this one."""
    return processes() > 1 and os.environ["RANK"] != "0"


def only_alone(command: str | None) -> str:
    """Returns an error if several processes run a command that is for one; else an empty text."""
    if processes() == 1 or command in (None, "generate", "score"):
        return ""
    return (
        f"torchrun is for `pagedkv generate` and `pagedkv score`; `pagedkv {command}` runs without "
        "it"
    )


def be_silent() -> None:
    """Silences this process: the first one prints the same, also mistakes in the options."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115 - stays open until `Launch.meet` replaces it


class LostError(UsageError):
    """Another process of the command ended, and did not say why."""

    code = SOME_FAILED


class Launch:
    """A `with` region in which several processes run one command; alone, every call is free.

    Calls are collective: all processes make them, in the same order.

    Attributes:
        size: how many there are.
        is_first: whether this one speaks.
        lost: whether others ended before this one could part with them.
    """

    def __init__(self) -> None:
        self.size, self.is_first, self.lost = processes(), not follows(), False
        self._ranks: LaunchedRanks | None = None

    def __enter__(self) -> Launch:
        return self

    def __exit__(self, *_: object) -> None:
        if self._ranks is not None:
            self.lost = not self._ranks.part(PARTING)

    def leave(self, code: int) -> None:
        """Ends the process if others were lost; otherwise returns.

        Threads of a group that could not be ended still run. If one asked for the interpreter while
        it shuts down, the process would end with SIGABRT in place of its exit code.
        """
        if not self.lost:
            return
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):
                stream.flush()
        os._exit(code)

    def meet(self) -> None:
        """Waits for the other processes; calls before it concern this process alone."""
        if self.size == 1:
            return
        if not self.is_first:
            warnings.simplefilter("ignore")
            sys.stderr = sys.__stderr__  # a traceback is shown all the same
        with Uninterrupted():
            from pagedkv.ranks import LaunchedRanks

        try:
            self._ranks = LaunchedRanks()
        except Exception as error:  # an address that is taken, a device that is not there
            raise UsageError(f"torchrun: the {self.size} processes do not meet: {error}") from error

    def require_served(self, given: Given, pages: dict[str, Any]) -> None:
        """Raises if an option does not suit the number of processes, one or several."""
        if self.size == 1:
            if given.expert_parallel:
                raise UsageError("--expert-parallel: expected under torchrun, among its processes")
            return
        if given.device != "auto":
            raise UsageError("--device: expected none under torchrun, each process has its own")
        if given.host_memory is not None:
            raise UsageError("--host-memory: expected none under torchrun, where nothing streams")
        if given.prefix_store is not None:
            raise UsageError("--prefix-store: expected none under torchrun")
        if "growth_step" in pages:
            raise UsageError("--cache: expected no growth_step under torchrun")

    def share(self, value: T) -> T:
        """The value of the first process, on all of them."""
        return value if self._ranks is None else self._met(lambda ranks: ranks.share(value))

    def handed_over(self, job: Job, left: list[int]) -> tuple[Job, list[int]]:
        """Gives all processes what is left of the first one's job; the others need no texts."""
        options = self.share([job.prompts[i].options for i in left])
        if self.is_first:
            return job, left
        return replace(job, prompts=[Prompt("", each) for each in options]), [*range(len(options))]

    def ended(self, code: int, terminated: bool) -> int:
        """The exit code of all: the first process's, or SIGTERM's if any of them was terminated.

        Args:
            code: of this process.
            terminated: whether it got a SIGTERM.
        """
        if self._ranks is None:
            return code
        try:
            codes, each = zip(*self._met(lambda ranks: ranks.gather((code, terminated))))
        except LostError:  # the first process has said why it ends
            return code if self.is_first else SOME_FAILED
        return TERMINATED if codes[0] == INTERRUPTED and any(each) else int(codes[0])

    def _met(self, call: Callable[[Ranks], T]) -> T:
        assert self._ranks is not None
        try:
            return call(self._ranks)
        except RuntimeError as error:
            self._ranks, self.lost = None, True  # there is no process to part from
            said = next(iter(str(error).splitlines()), "")
            raise LostError(f"another process of torchrun ended: {said}") from error

    def first(self, attempt: Callable[[], T]) -> T | None:
        """Returns what an attempt gives the first process; the others do not try, and get None.

        Raises:
            UsageError: on all of them, if it is raised on the first.
        """
        return self.each(attempt if self.is_first else lambda: None)

    def each(self, attempt: Callable[[], T]) -> T:
        """Returns what an attempt gives this process; each process tries for itself.

        Raises:
            UsageError: on all of them, if it is raised on any.
        """
        if self._ranks is None:
            return attempt()
        found, wrong = None, None
        try:
            found = attempt()
        except UsageError as error:
            wrong = str(error)
        for rank, said in enumerate(self._met(lambda ranks: ranks.gather(wrong))):
            if said is not None:
                raise UsageError(said if rank == 0 else f"rank {rank} of {self.size}: {said}")
        return found  # type: ignore[return-value]

    def taken(self, results: Iterable[T], take: Callable[[T], object]) -> None:
        """Hands each result to `take`; its error ends the job on all processes at the same step.

        The others learn of a Ctrl-C, but not of a full disk. So an error presses Ctrl-C here.

        Raises:
            KeyboardInterrupt: Ctrl-C was pressed on one of them.
        """
        if self._ranks is None:
            for result in results:
                take(result)
            return
        wrong: Exception | None = None
        try:
            for result in results:
                try:
                    if wrong is None:
                        take(result)
                except Exception as error:
                    wrong = error
                    # `Ending` blocks SIGINT if the command was started with SIGINT ignored.
                    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
                    signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            if wrong is None:
                raise
        if wrong is not None:
            raise wrong
