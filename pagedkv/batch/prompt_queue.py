"""The prompts of a call in their order: all known when it begins, or read as rows leave.

A caller's iterator may wait, raise, never end, or run rows on the same pages itself. So it is read
between two steps, while no other thread waits for this one. Once reading has taken longer than
`AT_ONCE`, a step is computed before more is read.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable, Mapping
from time import perf_counter
from typing import Any, NamedTuple

import numpy as np

from pagedkv.ranks import Ranks, spelled

from .order import by_prefix
from .prompts import Unread

AT_ONCE = 0.02  # seconds
WITH_IMAGES = 32  # prompts with images that may wait: their pixels are held
ENDED = object()  # stands for a value if there are fewer values than prompts


class Coming(NamedTuple):
    """A prompt that is no row yet.

    Attributes:
        place: the prompt's place among those of the call.
        prompt: its ids, or an object that gives them when its row is made.
        own: values of its own, by the names of options; `salt` among them, which contexts have.
        options: the prompt's `GenerationOptions`; None if those of the call hold.
    """

    place: int
    prompt: Any
    own: Mapping[str, Any]
    options: Any = None


class PromptQueue:
    """The prompts of a call, and the values that each has of its own.

    Args:
        prompts: ids of each, or an `Unread` that is read when its row is made.
        own: values for each prompt, by name.
        known: whether the prompts are all there already, so that reading them takes no time.
        may_see: whether some may have images.

    Attributes:
        known, may_see: as given.
        error: the error that reading raised; nothing is read after it.
        is_over: whether nothing more is read.
    """

    def __init__(
        self,
        prompts: Iterable[Any],
        own: Mapping[str, Iterable[Any]],
        known: bool,
        may_see: bool = True,
    ) -> None:
        self._prompts = enumerate(prompts)
        self._own = {name: iter(values) for name, values in own.items()}
        self.known, self.may_see, self.is_over = known, may_see, False
        self._read: deque[Coming] = deque()
        self.error: Exception | None = None

    def read(self, most: int) -> None:
        """Reads on until `most` prompts wait here, or it is time for a step."""
        begun = perf_counter()
        while len(self._read) < most and not self.is_over:
            self._try_one()
            if not self.known and self._is_enough(perf_counter() - begun):
                break

    def read_exactly(self, count: int, to_the_end: bool) -> None:
        """Reads `count` more prompts, as another rank has, however long that takes.

        Args:
            to_the_end: whether the other rank found that there are no more.
        """
        wanted = len(self._read) + count + to_the_end
        while len(self._read) < wanted and not self.is_over:
            self._try_one()

    def _try_one(self) -> None:
        try:
            place, prompt = next(self._prompts)
            own = {name: next(values, ENDED) for name, values in self._own.items()}
            self._read.append(Coming(place, prompt, own))
        except StopIteration:
            self.is_over = True
        except Exception as error:  # whatever the caller's iterator may raise
            self.error, self.is_over = error, True

    def said(self, count: int) -> bytes:
        """Returns the last `count` prompts and how reading ended, as bytes to compare."""
        last = list(self._read)[max(0, len(self._read) - count) :] if count else []
        return spelled([count, self.is_over, repr(self.error), last])

    def _is_enough(self, seconds: float) -> bool:
        images = sum(isinstance(coming.prompt, Unread) for coming in self._read)
        return seconds > AT_ONCE or images >= WITH_IMAGES

    @property
    def num_read(self) -> int:
        """Prompts that wait here."""
        return len(self._read)

    def require_same(self, ranks: Ranks, beside: Any) -> None:
        """Raises ValueError if other ranks were given something else than this one.

        Prompts of an iterator are compared later, as they are read.

        Args:
            beside: what else has to be the same on all ranks.
        """
        if ranks.size > 1:
            if self.known:
                self.read(sys.maxsize)
            said = self.said(self.num_read) if self.known else b""
            ranks.require_same("prompts and options", spelled(beside) + said)

    def put_together(self, page_size: int) -> None:
        """Puts known prompts that begin with the same pages side by side."""
        self.read(sys.maxsize)
        read = [*self._read]
        nothing = np.empty(0, int)
        texts = [nothing if isinstance(one.prompt, Unread) else one.prompt for one in read]
        salts = [one.own["salt"] for one in read]
        self._read = deque(read[i] for i in by_prefix(texts, salts, page_size))

    def put(self, coming: Coming) -> None:
        """Adds a prompt behind all others; any thread may call it."""
        self._read.append(coming)

    def take(self, most: int) -> list[Coming]:
        """Takes the next prompts that were read, `most` at most."""
        return [self._read.popleft() for _ in range(min(most, len(self._read)))]

    def end(self) -> None:
        """Reads no more of an iterator; prompts that were read, or known beforehand, stay."""
        self.is_over |= not self.known
