"""Lets SIGTERM, by which schedulers and services end a job, act like Ctrl-C."""

from __future__ import annotations

import os
import signal
import sys
import time
from _thread import start_new_thread
from types import FrameType
from typing import Any

SOON = 0.05  # seconds


class Ending:
    """A `with` region in which SIGTERM raises KeyboardInterrupt; a second one ends the process.

    SIGTERM is turned into SIGINT, so it waits wherever Ctrl-C does (`pagedkv.interrupt`). This
    holds even if SIGINT itself is ignored, as in processes that shells start in the background. To
    be used in the main thread.

    Python prints and forgets a KeyboardInterrupt in code that cannot raise, such as a weak
    reference's callback while modules are imported. Such an interrupt is sent again.

    Attributes:
        terminated: whether a SIGTERM came.
    """

    def __enter__(self) -> Ending:
        self.terminated = False
        self._deaf = signal.getsignal(signal.SIGINT) is signal.SIG_IGN
        if self._deaf:  # held back from now on, in place of ignored
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            signal.signal(signal.SIGINT, signal.default_int_handler)
        self._before = signal.getsignal(signal.SIGTERM)
        if self._before is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._end)
        self._hook = sys.unraisablehook
        sys.unraisablehook = self._again
        return self

    def _again(self, lost: Any) -> None:
        if not issubclass(lost.exc_type, KeyboardInterrupt):
            self._hook(lost)
            return
        # Another thread sends it, and later: within this call it would be lost once more, and
        # `Thread.start` would stay in this call until the thread runs, perhaps longer than SOON.
        start_new_thread(_press, ())

    def _end(self, number: int, frame: FrameType | None) -> None:
        self.terminated = True
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if self._deaf:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        signal.raise_signal(signal.SIGINT)

    def __exit__(self, *_: object) -> None:
        sys.unraisablehook = self._hook
        if self._before is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if self._deaf:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _press() -> None:
    time.sleep(SOON)
    os.kill(os.getpid(), signal.SIGINT)
