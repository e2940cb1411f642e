"""The prompts of a call in their order: all known when it begins, or read as rows leave.

What is read comes from an iterator of the caller's, which may wait, raise, never end, or run rows
on the same pages itself. So it is read between two steps, while no other thread waits for this one.
A step goes first once reading takes longer than `AT_ONCE`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping
from time import perf_counter
from typing import Any, NamedTuple

from .prompts import Unread

AT_ONCE = 0.02  # seconds
WITH_IMAGES = 32  # prompts with images that may wait: their pixels are held
ENDED = object()  # in the place of a value, where there are fewer than prompts


class Coming(NamedTuple):
    """A prompt that is no row yet.

    Attributes:
        place: of the prompt among all of the call.
        prompt: its ids, or what says them when its row is made.
        own: values of its own, by the names of options; `salt` is always one.
    """

    place: int
    prompt: Any
    own: Mapping[str, Any]


class Source:
    """The prompts of a call, and what each has of its own.

    Args:
        prompts: ids of each, or an `Unread` that is read when its row is made.
        own: values for each prompt, by name.
        known: whether the prompts are all there already, so that reading them takes no time.

    Attributes:
        error: what reading raised; nothing is read after it.
    """

    def __init__(
        self, prompts: Iterable[Any], own: Mapping[str, Iterable[Any]], known: bool
    ) -> None:
        self._prompts = enumerate(prompts)
        self._own = {name: iter(values) for name, values in own.items()}
        self._known, self._is_over = known, False
        self._read: deque[Coming] = deque()
        self.error: Exception | None = None

    def read(self, most: int) -> None:
        """Reads on until so many prompts wait here, or a step goes first."""
        begun = perf_counter()
        while len(self._read) < most and not self._is_over:
            try:
                self._read_one()
            except StopIteration:
                self._is_over = True
            except Exception as error:  # whatever the caller's iterator may raise
                self.error, self._is_over = error, True
            if not self._known and self._is_enough(perf_counter() - begun):
                break

    def _read_one(self) -> None:
        place, prompt = next(self._prompts)
        own = {name: next(values, ENDED) for name, values in self._own.items()}
        self._read.append(Coming(place, prompt, own))

    def _is_enough(self, seconds: float) -> bool:
        images = sum(isinstance(coming.prompt, Unread) for coming in self._read)
        return seconds > AT_ONCE or images >= WITH_IMAGES

    def take(self) -> Coming | None:
        """The next prompt that was read; None if there is none."""
        return self._read.popleft() if self._read else None

    def end(self) -> None:
        """Reads no more of an iterator; what was read, or known from the beginning, is there."""
        self._is_over |= not self._known
