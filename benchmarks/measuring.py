"""How the kernel benchmarks time a call, and what they record beside the time.

On a GPU a sample is one replay of the captured call after the L2 was overwritten, timed by events;
pytest-benchmark sees it through a clock that only advances by what events say. On a CPU calls run
back to back in one thread, so small inputs come out of its caches.
"""

from __future__ import annotations

import platform
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

import torch

from benchmarks.gpu import timing

Call = Callable[[], object]
ROOT = Path(__file__).resolve().parents[1]
SECONDS = {"small": 0.05, "full": 2.0}  # about as long is one call timed on a CPU
ROUNDS = (5, 200)  # but so often at least, and at most
READ_BYTES = {"small": 256 << 20, "full": 1 << 30}  # beyond the caches of most processors
SIDE = 1024  # of the matrices that a CPU multiplies for its ceiling


class Clock:
    """A timer for pytest-benchmark that is moved on by whoever measured."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class What:
    """What is timed.

    Attributes:
        op, case, way: pytest-benchmark groups by `op/case`, so a group is one shape.
        nbytes, flops: at the least; 0 if no rate is wanted.
        baseline: the way that others of its group are compared with.
        shape: further facts for the results.
    """

    op: str
    case: str
    way: str
    nbytes: int = 0
    flops: int = 0
    baseline: bool = False
    shape: dict[str, Any] = field(default_factory=dict)

    def describe(self, benchmark: Any) -> None:
        """Puts it all into the results."""
        benchmark.group = f"{self.op}/{self.case}"
        facts = {"op": self.op, "case": self.case, "way": self.way, "baseline": self.baseline}
        benchmark.extra_info.update(facts | self.shape | software())


class Bench:
    """The fixture `bench`: checks a call, times it, records rates."""

    def __init__(
        self,
        benchmark: Any,
        clock: Clock | None,
        device: torch.device,
        size: str,
        ceilings: Callable[[], dict[str, float]],
    ) -> None:
        self.benchmark, self.clock = benchmark, clock
        self.device, self.size, self.ceilings = device, size, ceilings

    def __call__(self, call: Call, what: What, check: Callable[[Call], None]) -> None:
        """Times `call` if `check` lets it pass.

        Raises:
            AssertionError: the call is wrong; nothing was timed.
        """
        check(call)
        benchmark = self.benchmark
        what.describe(benchmark)
        benchmark.extra_info["device"] = device_name(self.device)
        if benchmark.disabled:
            return benchmark.pedantic(call)
        if self.clock is not None:
            self._on_device(call, self.clock)
        else:
            self._on_cpu(call)
        self._rates(what, benchmark.stats.stats.median)

    def _on_cpu(self, call: Call) -> None:
        least, most = ROUNDS
        rounds = int(SECONDS[self.size] / shortest(call, 3))
        rounds = max(least, min(most, rounds))
        self.benchmark.pedantic(call, rounds=rounds, warmup_rounds=1 + rounds // 10)
        self.benchmark.extra_info["timed"] = "wall, back to back"

    def _on_device(self, call: Call, clock: Clock) -> None:
        way, flush = timing.Way(call, True, self.device), timing.flusher(self.device)
        once = way.graph.replay if way.graph else way.call

        def sample() -> None:
            clock.now += way.cold(once, flush) / 1e6

        self.benchmark.pedantic(sample, rounds=way.samples, warmup_rounds=3)
        many, repeats = (way.many.replay, way.repeats) if way.many else (way.call, 1)
        warm = median(way.burst(many, 1) / repeats for _ in range(way.samples))
        host = median(way.host() for _ in range(5))
        self.benchmark.extra_info.update(
            {
                "timed": f"events, {'graph replay' if way.graph else 'eager'}, L2 cold",
                "warm L2 (us)": warm,
                "host (us)": host,
            }
        )

    def _rates(self, what: What, spent: float) -> None:
        info, top = self.benchmark.extra_info, self.ceilings()
        info["read stream (GB/s)"] = top["read_gbs"]
        if what.nbytes:
            info |= {"nbytes": what.nbytes, "GB/s": what.nbytes / spent / 1e9}
            info["share of read stream"] = info["GB/s"] / top["read_gbs"]
        if what.flops:
            info |= {"flops": what.flops, "TFLOPS": what.flops / spent / 1e12}
            info["matmul (TFLOPS)"] = top["matmul_tflops"]
            info["share of matmul"] = info["TFLOPS"] / top["matmul_tflops"]


def ceilings(device: torch.device, size: str) -> dict[str, float]:
    """GB/s of reading memory once, and TFLOPS of a matrix product in the dtype that is timed."""
    if device.type == "cuda":
        return timing.ceilings(device)
    data = torch.ones(READ_BYTES[size] // 4)  # written, so that every page of it is memory
    a, b = torch.randn(2, SIDE, SIDE)
    # What else runs can only take away from a ceiling.
    read, product = shortest(data.sum, 8), shortest(lambda: a @ b, 8)
    return {
        "read_gbs": 4 * data.numel() / read / 1e9,
        "matmul_tflops": 2 * SIDE**3 / product / 1e12,
    }


def shortest(call: Call, times: int) -> float:
    """Seconds of the shortest of several calls."""
    found = []
    for _ in range(times):
        start = perf_counter()
        call()
        found.append(perf_counter() - start)
    return min(found)


@cache
def software() -> dict[str, str | None]:
    """Versions, and the commit that was checked out."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, check=True)
        commit = asked.stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        commit = None
    return {"torch": torch.__version__, "triton": _version("triton"), "commit": commit}


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


@cache
def device_name(device: torch.device) -> str:
    """The card, or the kind of processor; what is timed there runs in one thread."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{_processor()}, 1 thread"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.machine())
