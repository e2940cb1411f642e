"""How calls are timed: on a GPU by events and graph replay, cold and warm, ways taking turns.

On a GPU a cold sample is one replay of the captured call after the L2 was overwritten; eager times
include what the host needs to launch, if that is longer. On a CPU calls run back to back in one
thread, so small inputs come out of its caches.
"""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import TypeVar

import torch

T = TypeVar("T")
Call = Callable[[], object]
Times = dict[str, float]  # microseconds

ROUNDS = 3
SAMPLES = 30  # of each round; long calls take a third, which is 30 in all
LONG = 2000.0  # microseconds
FLUSH = 256 << 20  # bytes written between cold calls, several times the L2 of any GPU of today
BURST = 400.0  # microseconds of work in one warm graph, so that its launch is lost in it

READ_BYTES = 256 << 20  # that a CPU reads for its ceiling, beyond the caches of most
SIDE = 1024  # of the matrices that a CPU multiplies for its ceiling


class Way:
    """One call, ready to be timed."""

    def __init__(self, call: Call, graph: bool, device: torch.device) -> None:
        self.call, self.device = call, device
        self.on_gpu = device.type == "cuda"
        self.times: dict[str, list[float]] = {}
        for _ in range(3):  # loads modules, compiles, fills allocator caches
            call()
        estimate = self.burst(call, 3)
        self.samples = SAMPLES if estimate < LONG else SAMPLES // 3
        self.repeats = max(1, min(20, int(BURST / estimate)))
        graph = graph and self.on_gpu
        self.graph = self.capture(1) if graph else None
        self.many = self.capture(self.repeats) if graph else None

    def capture(self, calls: int) -> torch.cuda.CUDAGraph | None:
        """Captures calls as a graph; None if that fails, as with calls that wait for the device."""
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                for _ in range(calls):
                    self.call()
        except RuntimeError:
            torch.cuda.synchronize()  # raises again if the device itself is lost
            return None
        return graph

    def burst(self, call: Callable[[], object], count: int) -> float:
        """Time per call of several in a row."""
        if not self.on_gpu:
            return self.host(call, count)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(count):
            call()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / count * 1e3

    def cold(self, call: Callable[[], object], flush: Callable[[], object]) -> float:
        """Times a call after the L2 was overwritten; the host runs ahead during the overwriting."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        flush()
        begin.record()
        call()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e3

    def host(self, call: Callable[[], object], count: int) -> float:
        """Time per call until the call returns, with the device idle at the start."""
        if self.on_gpu:
            torch.cuda.synchronize()
        start = perf_counter()
        for _ in range(count):
            call()
        spent = (perf_counter() - start) / count * 1e6
        if self.on_gpu:
            torch.cuda.synchronize()
        return spent

    def round(self, flush: Callable[[], object]) -> None:
        def add(name: str, sample: Callable[[], float], count: int) -> None:
            self.times.setdefault(name, []).append(median(sample() for _ in range(count)))

        few = max(3, self.samples // 3)
        if self.graph and self.many:
            graph, many = self.graph, self.many
            add("graph_cold", lambda: self.cold(graph.replay, flush), self.samples)
            add("graph_warm", lambda: self.burst(many.replay, 1) / self.repeats, self.samples)
        if self.on_gpu:
            add("eager_cold", lambda: self.cold(self.call, flush), self.samples)
        add("eager", lambda: self.burst(self.call, self.repeats), few)
        add("host", lambda: self.host(self.call, self.repeats), few)

    def result(self) -> Times:
        """The median over rounds, and how far apart rounds were, as a share of it."""
        found = {name: median(values) for name, values in self.times.items()}
        main = self.times.get("graph_cold", self.times["eager"])
        return found | {"spread": (max(main) - min(main)) / median(main)}


def measure(ways: dict[str, Way]) -> dict[str, Times]:
    """Times several ways in turn, A B C A B C ..., so that changing clocks meet all alike."""
    flush = flusher(next(iter(ways.values())).device) if ways else lambda: None
    for _ in range(ROUNDS):
        for way in ways.values():
            way.round(flush)
    return {name: way.result() for name, way in ways.items()}


def flusher(device: torch.device) -> Callable[[], object]:
    """Overwrites the L2."""
    if device.type != "cuda":
        return lambda: None
    buffer = torch.empty(FLUSH, dtype=torch.uint8, device=device)
    return buffer.zero_


def main_time(times: Times | None) -> float | None:
    """The time that is compared: graph replay with a cold L2, or else an eager call."""
    if not times:
        return None
    return times.get("graph_cold", times.get("eager_cold", times.get("eager")))


def ceilings(device: torch.device) -> dict[str, float]:
    """The device's limits: streams in GB/s, matrices in TFLOPS, an empty span of events."""
    on_gpu = device.type == "cuda"
    nbytes, side = (4 << 30, 8192) if on_gpu else (READ_BYTES, SIDE)
    data = torch.ones(nbytes // 4, device=device)  # written, so that all of it has memory
    spare = torch.empty_like(data[: len(data) // 2])
    dtype = torch.bfloat16 if on_gpu else torch.float32
    a, b = torch.randn(2, side, side, device=device, dtype=dtype)
    out = torch.empty_like(a)
    calls: dict[str, Call] = {
        "read_gbs": data.sum,
        "copy_gbs": lambda: spare.copy_(data[: len(spare)]),
        "matmul_tflops": lambda: torch.mm(a, b, out=out),
    }
    work = {"read_gbs": nbytes / 1e3, "copy_gbs": nbytes / 1e3, "matmul_tflops": 2 * side**3 / 1e6}
    if not on_gpu:  # other programs can only lower a ceiling
        return {name: work[name] / (1e6 * shortest(call, 8)) for name, call in calls.items()}
    from benchmarks.peers.kernels import read_all

    calls["read_gbs"] = read_all([data.normal_()])
    # What a span of events costs around a kernel that does nothing; not subtracted anywhere.
    calls["smallest_us"] = torch.zeros(1, device=device).zero_
    times = measure({name: Way(call, True, device) for name, call in calls.items()})
    smallest = times.pop("smallest_us").get("graph_cold", 0.0)
    rates = {n: work[n] / each.get("graph_warm", each["eager"]) for n, each in times.items()}
    return rates | {"smallest_us": smallest}


def held(what: str) -> float:
    """MiB of this process as Linux counts them: `VmRSS`, `VmHWM`, `VmData`."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(what)) / 1024


def with_peak(way: Callable[[], T]) -> tuple[T, float | None]:
    """The answer, and how far the process's resident memory rose above its start, in MiB.

    This needs Linux, which can forget the peak so far; elsewhere it is None.
    """
    gc.collect()
    try:
        ctypes.CDLL(None).malloc_trim(0)
        Path("/proc/self/clear_refs").write_text("5")
    except (OSError, AttributeError):
        return way(), None
    before = held("VmRSS")
    answer = way()
    return answer, held("VmHWM") - before


def shortest(call: Call, times: int) -> float:
    """Seconds of the shortest of several calls."""
    found = []
    for _ in range(times):
        start = perf_counter()
        call()
        found.append(perf_counter() - start)
    return min(found)
