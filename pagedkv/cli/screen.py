"""The progress of a job while it runs.

On a terminal it is drawn below the texts, as the last line; a log gets a line now and then.
"""

from __future__ import annotations

import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable
from datetime import timedelta
from math import ceil
from threading import Event, Thread
from time import perf_counter
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

FIRST, EVERY = 5.0, 30.0  # seconds until the first line in a log, and from one to the next
BAR, LEAST = 30, 8  # most and fewest columns of the bar; with less room there is no bar
TALL = 12  # lines of a terminal: with fewer it shows nothing but the bar


class Progress(ABC):
    """A measure of how far a job is.

    Args:
        clock: gives seconds.
    """

    def __init__(self, clock: Callable[[], float] = perf_counter) -> None:
        self._clock, self._begun = clock, clock()

    @property
    def passed(self) -> float:
        """Seconds since it began."""
        return self._clock() - self._begun

    @property
    @abstractmethod
    def share(self) -> float:
        """The share of its time that has passed, as far as that is known: 0 to 1."""

    @property
    def seconds_left(self) -> float | None:
        """Seconds that it still takes; None if that is not known."""
        return self.passed / self.share - self.passed if 0 < self.share < 1 else None

    @abstractmethod
    def done(self) -> list[str]:
        """Says what is done."""

    def beside(self) -> list[str]:
        """Returns further facts, for the end of the line."""
        return []

    def told(self, width: int | None = None) -> str:
        """Returns one line; if it is longer than `width`, without the time that has passed."""
        since, left = f"{clock_of(self.passed)} passed", self.seconds_left
        ahead = [] if left is None else [f"about {clock_of(max(1, ceil(left)))} left"]
        parts = [*self.done(), since, *ahead, *self.beside()]
        if width is not None and len(", ".join(parts)) > width:
            parts.remove(since)
        return ", ".join(parts)

    def __str__(self) -> str:
        return self.told()


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
        self._above: Callable[[int], list[Text]] | None = None
        self._since = perf_counter()
        watched = console.is_interactive and console.file.isatty()
        self.is_shared = watched and _is_one_terminal(sys.stdout, console.file)
        self._live = self._log = None
        if watched:
            self._live = Live(
                get_renderable=self._drawn,
                console=console,
                transient=True,
                redirect_stdout=self.is_shared,  # else it would follow the bar to standard error
            )
        else:
            self._over = Event()
            self._log = Thread(target=self._tell, args=(FIRST, EVERY), daemon=True)

    def doing(self, what: str | Progress, above: Callable[[int], list[Text]] | None = None) -> None:
        """Sets what to show from now on.

        Args:
            what: a text, or progress.
            above: makes the lines to show above it, for the width of a terminal.
        """
        self._state, self._above, self._since = what, above, perf_counter()
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

    def _drawn(self) -> RenderableType:
        width, height = self.console.size
        above = self._above(width) if self._above and height >= TALL else []
        return Group(*above, self._line())

    def _line(self) -> RenderableType:
        words = Text(self._words(self.console.width), no_wrap=True, overflow="crop")
        room = min(BAR, self.console.width - len(words) - 1)
        if not isinstance(self._state, Progress) or room < LEAST:
            return words
        line = Table.grid(padding=(0, 1))
        line.add_row(ProgressBar(1, self._state.share, width=room), words)
        return line

    def _tell(self, wait: float, then: float) -> None:
        while not self._over.wait(wait):
            if words := self._words():
                self.console.print(f"pagedkv: {words}")
            wait = then


def _is_one_terminal(*files: Any) -> bool:
    try:
        first, second = (file.fileno() for file in files)
        return os.isatty(first) and os.path.sameopenfile(first, second)
    except (AttributeError, OSError, ValueError):  # closed, or no file of the system
        return False


def clock_of(seconds: float) -> str:
    """Hours, minutes and seconds."""
    return str(timedelta(seconds=int(seconds)))
