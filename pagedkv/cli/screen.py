"""Output of a job while it runs: its texts, and its progress.

On a terminal progress is one line below the texts; a log gets a line now and then.
"""

from __future__ import annotations

import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from datetime import timedelta
from threading import Event, Thread
from time import perf_counter
from typing import TYPE_CHECKING, Any

from rich.console import Console, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from .prompts import Prompt

if TYPE_CHECKING:  # they bring torch along, for which --help does not wait
    from pagedkv.batch.results import GenerationStats, Result

FIRST, EVERY = 5.0, 30.0  # seconds until the first line in a log, and from one to the next
BAR, LEAST = 30, 8  # columns of the bar, and fewer than which are none


class Progress(ABC):
    """How far something is, counted in tokens."""

    @property
    @abstractmethod
    def tokens(self) -> int:
        """Tokens done so far."""

    @property
    @abstractmethod
    def tokens_left(self) -> float:
        """Tokens that are expected to follow."""

    @abstractmethod
    def told(self, width: int | None = None) -> str:
        """All of it, or without the time that has passed what may fit so many columns."""

    def __str__(self) -> str:
        return self.told()


class Pace(Progress):
    """Progress of a job and the time left, counted in tokens, because rows end late.

    The time left is estimated from rows that ended: the others are expected to use the same share
    of the tokens they may get.

    Args:
        allowed: tokens that each row may get.
        stats: the generator's statistics, which change as it runs.
        layers: progress of a streamed model's pass, with `done` and `total`.
    """

    def __init__(
        self,
        allowed: list[int],
        stats: GenerationStats,
        layers: Any = None,
        clock: Callable[[], float] = perf_counter,
    ) -> None:
        self.rows, self._all_rows, self._coming = 0, len(allowed), sum(allowed)
        self._stats, self._layers, self._clock = stats, layers, clock
        self._begun = clock()
        self._allowed = self._used = self._lost = 0

    def ended(self, allowed: int, used: int, failed: bool) -> None:
        """Counts a row that ended; one that failed says nothing about the others."""
        self.rows += 1
        self._coming -= allowed
        if failed:
            self._lost += used
        else:
            self._allowed += allowed
            self._used += used

    @property
    def tokens(self) -> int:
        """Tokens generated so far."""
        return self._stats.new_tokens

    @property
    def tokens_left(self) -> float:
        """Tokens that rows are expected to generate until all have ended."""
        share = self._used / self._allowed if self._allowed else 1.0
        return max(0.0, share * self._coming - (self.tokens - self._used - self._lost))

    def told(self, width: int | None = None) -> str:
        passed = self._clock() - self._begun
        rate = self.tokens / passed if passed else 0.0
        parts = [f"{self.rows:,}/{self._all_rows:,} rows", f"{rate:,.1f} tokens/s"]
        since = f"{clock_of(passed)} passed"
        parts.append(since)
        if rate and (self.rows or passed >= FIRST):  # the first prompts take longest
            parts.append(f"about {clock_of(self.tokens_left / rate)} left")
        if self._layers is not None:
            parts.append(f"layer {self._layers.done} of {self._layers.total}")
        return joined(parts, since, width)


class Screen:
    """A `with` region that shows the progress of a job.

    Args:
        console: the console of standard error.

    Attributes:
        is_shared: whether texts go to the same terminal as the bar.
    """

    def __init__(self, console: Console) -> None:
        self.console = console
        self._state: str | Progress = ""
        self._since = perf_counter()
        watched = console.is_interactive and console.file.isatty()
        self.is_shared = watched and _is_one_terminal(sys.stdout, console.file)
        self._live = self._log = None
        if watched:
            self._live = Live(
                get_renderable=self._line,
                console=console,
                transient=True,
                redirect_stdout=self.is_shared,  # else it would follow the bar to standard error
            )
        else:
            self._over = Event()
            self._log = Thread(target=self._tell, args=(FIRST, EVERY), daemon=True)

    def doing(self, what: str | Progress) -> None:
        """Sets the text or the progress to show from now on."""
        self._state, self._since = what, perf_counter()
        if self._live is not None:
            self._live.refresh()

    def __enter__(self) -> Screen:
        if self._live is not None:
            self._live.start()
        elif self._log is not None:
            self._log.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the display. Idempotent."""
        if self._live is not None:
            self._live.stop()
        elif self._log is not None:
            self._over.set()
            self._log.join()

    def _words(self, width: int | None = None) -> str:
        if isinstance(self._state, Progress):
            return self._state.told(width)
        return f"{self._state} ... {clock_of(perf_counter() - self._since)}" if self._state else ""

    def _line(self) -> RenderableType:
        words = Text(self._words(self.console.width), no_wrap=True, overflow="crop")
        room = min(BAR, self.console.width - len(words) - 1)
        if not isinstance(self._state, Progress) or room < LEAST:
            return words
        tokens = self._state.tokens
        line = Table.grid(padding=(0, 1))
        bar = ProgressBar(tokens + self._state.tokens_left or 1, tokens, width=room)
        line.add_row(bar, words)
        return line

    def _tell(self, wait: float, then: float) -> None:
        while not self._over.wait(wait):
            if words := self._words():
                self.console.print(f"pagedkv: {words}")
            wait = then


class Texts:
    """Prints texts in the order of their prompts, each as soon as all before it are printed.

    On a terminal the end of each prompt stands above its text.
    """

    def __init__(self, screen: Screen, prompts: list[Prompt], samples: int) -> None:
        self._prompts = prompts
        self._order = [(i, sample) for i in range(len(prompts)) for sample in range(samples)]
        self._next = 0
        self._held: dict[tuple[int, int], str] = {}
        self._console = None
        if sys.stdout.isatty():
            # Through the console of the bar, if there is one: other output would run into the bar.
            own = Console(highlight=False, markup=False, emoji=False)
            self._console = screen.console if screen.is_shared else own

    def add(self, result: Result) -> None:
        self._held[result.index, result.sample] = (result.text or "").strip()
        while self._next < len(self._order) and self._order[self._next] in self._held:
            self._print(self._order[self._next])
            self._next += 1

    def flush(self) -> None:
        """Prints texts that wait for an earlier one, which an interruption keeps from coming."""
        for place in self._order[self._next :]:
            if place in self._held:
                self._print(place)

    def _print(self, place: tuple[int, int]) -> None:
        text, between = self._held.pop(place), "" if place == self._order[0] else "\n"
        if self._console is None:
            print(f"{between}{text}", flush=True)
            return
        content = self._prompts[place[0]].content
        last = content if isinstance(content, str) else content[-1]["content"]
        room = self._console.width - 4
        line = " ".join(str(last).split())
        line = line if len(line) <= room else "..." + line[3 - room :]
        self._console.out(f"{between}> {line}", style="dim", highlight=False)
        self._console.out(text, highlight=False)


def joined(parts: list[str], since: str, width: int | None) -> str:
    """What is told of some progress; where it may not be so wide, without one part."""
    if width is not None and len(", ".join(parts)) > width:
        parts = [part for part in parts if part != since]
    return ", ".join(parts)


def _is_one_terminal(*files: Any) -> bool:
    try:
        first, second = (file.fileno() for file in files)
        return os.isatty(first) and os.path.sameopenfile(first, second)
    except (AttributeError, OSError, ValueError):  # closed, or none of the system's
        return False


def clock_of(seconds: float) -> str:
    """Hours, minutes and seconds."""
    return str(timedelta(seconds=int(seconds)))
