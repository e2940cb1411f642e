"""SIGTERM, with which schedulers and services end a job, ends it as Ctrl-C does."""

from __future__ import annotations

import signal
from types import FrameType


class Ending:
    """A `with` region in which SIGTERM raises KeyboardInterrupt; a second one ends the process.

    SIGTERM is turned into SIGINT and so waits wherever Ctrl-C does (`pagedkv.interrupt`), also
    where SIGINT itself is ignored, as shells do for processes in the background. To be used in the
    main thread.

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
        return self

    def _end(self, number: int, frame: FrameType | None) -> None:
        self.terminated = True
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if self._deaf:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        signal.raise_signal(signal.SIGINT)

    def __exit__(self, *_: object) -> None:
        if self._before is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if self._deaf:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
