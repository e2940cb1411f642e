"""The lock of a pool, which waits for the forward that is under way on its pages as well.

A forward does not hold the lock from one hook to another, because an interrupt may end it and is
told to no hook. It stands in the lock as the one whose turn it is, and another thread can see that
it is over (`fair_turns.py`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from threading import RLock
from typing import Any, Protocol

from pagedkv.errors import OpenStepError


class Forward(Protocol):
    """A forward that has its turn, or waits for it.

    Attributes:
        running: its rows that would leave if others waited: none.
        turn: a `Turn`, of its cache.
    """

    running: Sequence[Any]
    turn: Any

    @property
    def is_mine(self) -> bool:
        """Whether the current thread holds it."""

    def is_over(self) -> bool:
        """Whether its thread has ended, or has left it without a word."""

    def abort(self) -> None:
        """Takes back what it did to the pages. Called by the holder of the lock."""


class PagesLock:
    """A lock for `with`, which its holder may take again.

    Attributes:
        raw: the lock itself, without a wait for forwards.
        forward: the forward that has its turn; `Turns` alone writes it.
        wait_for_forward: what `Turns` does, weakly referred to.
    """

    def __init__(self) -> None:
        self.raw = RLock()
        self.forward: Forward | None = None
        self.wait_for_forward: weakref.WeakMethod[Callable[[], None]] | None = None

    @property
    def is_held(self) -> bool:
        """Whether the current thread holds it, or has a forward that has its turn."""
        forward = self.forward
        if forward is not None:
            return forward.is_mine
        owned: bool = self.raw._is_owned()  # type: ignore[attr-defined]  # as in Condition
        return owned

    def require_free(self) -> bool:
        """Returns whether it `is_held`; it may also be free.

        Raises:
            OpenStepError: a forward of another thread is under way.
        """
        held = self.is_held
        if not held and self.forward is not None:
            raise OpenStepError(
                "a forward of a PagedCache is under way on these pages in another thread: where "
                "threads share pages, a loop of its own and layers that are called by hand need "
                "`with cache.lock:` around each step"
            )
        return held

    def __enter__(self) -> None:
        # Between the lines of `try` an interrupt finds the lock taken.
        try:
            self.raw.acquire()
            if self.forward is not None and self.wait_for_forward is not None:
                wait = self.wait_for_forward()
                if wait is not None:
                    wait()
        except BaseException:
            if self.raw._is_owned():  # type: ignore[attr-defined]
                self.raw.release()
            raise

    @property
    def __exit__(self) -> Callable[..., None]:
        """A function of C, which no interrupt cuts in two."""
        return self.raw.__exit__
