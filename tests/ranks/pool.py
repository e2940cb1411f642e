"""Runs functions in several processes that share a gloo group, for tests of several ranks.

    run(2, "tests.ranks.jobs:tokens", folder, max_new_tokens=8)

calls `tokens(folder, max_new_tokens=8)` in two processes at once, in each as one rank of two, and
returns what they returned, in the order of ranks. The name says where the function is, because the
processes import it for themselves; arguments and results are pickled. A function finds its rank in
`torch.distributed` (initialised, gloo) and in `RANK`, `WORLD_SIZE`, `LOCAL_RANK` and
`LOCAL_WORLD_SIZE`; transformers' `from_pretrained(distributed_config=...)` takes up that group.

Processes are forked off one that has imported torch and transformers, and stay for the tests that
follow. A function leaves its process as it found it. Where one raises, dies or takes longer than
its limit, all are ended, and the next call gets new ones.
"""

from __future__ import annotations

import atexit
import os
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from multiprocessing.connection import Connection, Listener, wait
from pathlib import Path
from typing import Any, NamedTuple

SECONDS = 240.0  # the longest a call may take; torch.distributed itself would wait for hours
GRACE = 10.0  # how long others may take behind one that failed
HERE = Path(__file__).resolve()


class Outcome(NamedTuple):
    """How a function ended on one rank.

    Attributes:
        result: what it returned.
        error: the traceback of what it raised; "died" where its process ended; None if neither.
        seconds: when, from the call on.
    """

    result: Any
    error: str | None
    seconds: float


def run(n: int, function: str, *args: Any, seconds: float = SECONDS, **kwargs: Any) -> list[Any]:
    """Runs a function on n ranks; returns each one's result.

    Args:
        function: as "package.module:name".
        seconds: its own limit.

    Raises:
        AssertionError: it raised on a rank, or took too long; with the tracebacks of all ranks.
    """
    found = outcomes(n, function, *args, seconds=seconds, **kwargs)
    wrong = [f"rank {i}: {one.error}" for i, one in enumerate(found) if one.error]
    assert not wrong, f"{function} on {n} ranks\n" + "\n".join(wrong)
    return [one.result for one in found]


def outcomes(
    n: int, function: str, *args: Any, seconds: float = SECONDS, **kwargs: Any
) -> list[Outcome]:
    """Runs a function on n ranks that are expected to raise or to die."""
    ranks = _pool().ranks(n)
    begun = time.monotonic()
    for rank in ranks:
        with suppress(ConnectionError):  # of one that died before: what is received says so
            rank.send((function, args, kwargs))
    found: dict[int, Outcome] = {}
    while len(found) < n:
        left = [rank for i, rank in enumerate(ranks) if i not in found]
        for ready in wait(left, begun + seconds - time.monotonic()) or left:
            spent = time.monotonic() - begun
            outcome = Outcome(None, f"not done after {spent:.0f} s", spent)
            if spent < seconds:
                try:
                    outcome = Outcome(*ready.recv(), spent)
                except (EOFError, ConnectionError):  # reset, where it died before it had read all
                    outcome = Outcome(None, "died", spent)
            found[ranks.index(ready)] = outcome
            if outcome.error:
                seconds = min(seconds, spent + GRACE)
    if any(one.error for one in found.values()):
        _pool().end(n)
    return [found[i] for i in range(n)]


class _Pool:
    """The process that others are forked off, and the ranks that there are by now."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="pagedkv-ranks-")
        self._listener = Listener(str(Path(self._folder.name) / "socket"))
        env = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, str(HERE.with_name("worker.py")), self._listener.address]
        self._process = subprocess.Popen(command, env=env)
        self._forker = self._accepted()
        self._ranks: dict[int, list[Connection]] = {}
        self._count = 0

    def _accepted(self) -> Connection:
        """A connection from a process that was begun: one that cannot import never calls."""
        called = self._listener._listener._socket  # type: ignore[attr-defined]
        while not wait([called], timeout=1):
            assert self._process.poll() is None, "the process that ranks are forked off has ended"
        return self._listener.accept()

    def ranks(self, n: int) -> list[Connection]:
        if n not in self._ranks:
            self._count += 1
            self._forker.send(("fork", n, str(Path(self._folder.name) / f"store{self._count}")))
            came = [self._accepted() for _ in range(n)]
            self._ranks[n] = [rank for _, rank in sorted((r.recv(), r) for r in came)]
        return self._ranks[n]

    def end(self, n: int) -> None:
        """Ends the n ranks; the next call gets others."""
        self._forker.send(("end", n, ""))
        self._forker.recv()
        for rank in self._ranks.pop(n):
            rank.close()

    def close(self) -> None:
        for n in list(self._ranks):
            self.end(n)
        self._forker.close()
        self._process.wait()
        self._listener.close()
        self._folder.cleanup()


_POOLS: list[_Pool] = []


def _pool() -> _Pool:
    if not _POOLS:
        _POOLS.append(_Pool())
        atexit.register(_POOLS[0].close)
    return _POOLS[0]
