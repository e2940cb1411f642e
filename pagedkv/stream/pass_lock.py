"""One thread at a time runs a streamed model; the outermost of its forwards is a pass."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

from pagedkv.errors import StreamError


class PassLock:
    """Turns of threads.

    The lock itself tells whether a forward is the outermost, because it stays right after an
    interrupt; a separate count would be wrong if Ctrl-C comes while a forward is left.

    Args:
        before: runs before an outermost forward, when it has its turn.
        after: runs after an outermost forward that returned.

    Attributes:
        count: outermost forwards so far, of the model and of parts that were called by themselves.
    """

    def __init__(self, before: Callable[[], None], after: Callable[[], None]) -> None:
        self._before, self._after = before, after
        self._lock, self._process = threading.RLock(), os.getpid()
        self._closed = False
        self.count = 0

    def taking(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """Wraps a forward so that it waits until no other thread computes.

        Raises:
            StreamError: the streamer was closed, or is another process's.
        """

        def in_turn(*args: Any, **kwargs: Any) -> Any:
            self._require_open()
            nested = self._lock._is_owned()  # type: ignore[attr-defined]  # as in Condition
            with self._lock:
                self._require_open()
                if nested:
                    return forward(*args, **kwargs)
                self.count += 1
                self._before()
                found = forward(*args, **kwargs)
                self._after()
                return found

        return in_turn

    def run(self, work: Callable[[], Any]) -> Any:
        """Runs work that looks at all weights, when no other thread computes.

        Raises:
            StreamError: the streamer was closed, or is another process's.
        """
        return self.taking(work)()

    def close(self, undo: Callable[[], None]) -> None:
        """Waits for the pass of another thread; later passes raise.

        Args:
            undo: runs then; but not in a process that was forked from this one, because it lacks
                the threads that may hold the lock.
        """
        if os.getpid() != self._process:
            self._closed = True
            return
        with self._lock:
            self._closed = True
            undo()

    def _require_open(self) -> None:
        if self._closed:
            raise StreamError("the streamer of this model was closed")
        if os.getpid() != self._process:
            raise StreamError(
                f"the streamer of this model was opened by process {self._process}, before a fork; "
                "open one in each process"
            )
