"""Ctrl-C at a chosen line of what runs."""

import signal
import sys
from collections.abc import Callable
from typing import Any


class AtLine:
    """Presses Ctrl-C when some files are about to run their n-th line.

    Attributes:
        pressed: whether there were so many lines.
    """

    def __init__(self, n: int, counts: Callable[[str], bool]) -> None:
        self.left, self.counts, self.pressed = n, counts, False

    def __enter__(self) -> "AtLine":
        sys.settrace(self.trace)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)

    def trace(self, frame: Any, event: str, _: Any) -> Any:
        if not self.counts(frame.f_code.co_filename):
            return self.trace if event == "call" else None
        if event == "line":
            self.left -= 1
            if not self.left:
                self.pressed = True
                signal.raise_signal(signal.SIGINT)
        return self.trace
