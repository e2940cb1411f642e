"""Ctrl-C waits while state is halfway between two consistent ones."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import TypeVar

try:  # the standard library's own turn every handler into an enum, four times as slow
    from _signal import getsignal as _get  # type: ignore[import-not-found]
    from _signal import signal as _set
except ImportError:
    from signal import getsignal as _get
    from signal import signal as _set


T = TypeVar("T")


def uninterrupted(attempt: Callable[[], T], undo: Callable[[T], object] | None = None) -> T:
    """Calls `attempt` as a whole; where an interrupt came in, undoes it before that is raised."""
    with Uninterrupted() as region:
        result = attempt()
        if region.pressed and undo is not None:
            undo(result)
    return result


class Uninterrupted:
    """A `with` region of a few array operations that a KeyboardInterrupt does not cut in two.

    The interrupt is raised at the end of the region instead, also if the region ends by an error:
    callers go on after some errors, and the interrupt would be lost. Outside the main thread, and
    where the caller has a handler of its own, nothing is done: there Python raises no
    KeyboardInterrupt.

    Attributes:
        pressed: whether an interrupt is waiting.
    """

    def __enter__(self) -> Uninterrupted:
        self.pressed = False
        self._mine = (
            threading.get_ident() == threading.main_thread().ident
            and _get(signal.SIGINT) is signal.default_int_handler
        )
        if self._mine:
            _set(signal.SIGINT, self._note)
        return self

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self.pressed = True

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._mine:
            _set(signal.SIGINT, signal.default_int_handler)
            if self.pressed:
                raise KeyboardInterrupt
