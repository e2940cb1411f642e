"""The lock of a pool; who takes it also waits for a forward that is under way on the pages.

A forward does not hold the lock from one hook to another, because an interrupt may end the forward
and no hook learns of it. Instead `PagesLock.forward` names the forward whose turn it is, and other
threads can see when it is over (`fair_turns.py`).
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
        running: empty, because no row of a forward leaves while others wait.
        turn: its `Turn` on the cache.
    """

    running: Sequence[Any]
    turn: Any

    @property
    def is_mine(self) -> bool:
        """Whether the current thread holds it."""

    def is_over(self) -> bool:
        """Whether its thread has ended, or has left the forward and no hook has run."""

    def abort(self) -> None:
        """Undoes the forward's changes of the pages. The caller holds the lock."""


class PagesLock:
    """A lock for `with`, which its holder may take again.

    Attributes:
        raw: the lock itself, without a wait for forwards.
        forward: the forward that has its turn; `Turns` alone writes it.
        wait_for_forward: a weak reference to `Turns.wait_for_forward`.
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
        """Returns `is_held`, and raises if another thread's forward has its turn.

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
        # If an interrupt comes after `acquire`, the lock is released again.
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
        """A function in C, which no interrupt can cut in two."""
        return self.raw.__exit__
