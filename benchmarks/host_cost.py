"""Host time of a decode step and of the calls in it: `python -m benchmarks.host_cost`, JSON.

By itself it launches on a GPU that is not there (`fake_driver.py`), tensors being the CPU's: the
whole way through the library and through Triton, without what the CUDA driver takes for a launch
and for each small torch operation. `--device cuda` measures with those, nothing waiting for the
device in between. Nothing is computed on the fake one, so there is nothing to compare either; what
can be said is how many kernels each call launches, and that is part of the result.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import perf_counter
from typing import Any

import torch

from benchmarks.fake_driver import FakeGPU, fake_gpu
from pagedkv import CacheConfig, PagedKVCache, paged_attention, write_kv
from pagedkv.kernels import paged

ROWS, LAYERS, PAGE = 16, 30, 16
HEADS = (16, 2, 64)  # small: what the host does is the same for all of them
SHORT, LONG = 64, 8192  # tokens: one that no kernel splits over, and one that all do
CALLS = 10  # of one kind in a sample; a clock is read before and after

Samples = dict[str, list[float]]


class Meter:
    """Collects samples, and kernels launched, by name."""

    def __init__(self, gpu: FakeGPU | None) -> None:
        self.gpu = gpu
        self.seconds: Samples = {}
        self.launches: dict[str, int | None] = {}

    @contextmanager
    def sample(self, name: str, calls: int = 1, idle: bool = True) -> Iterator[None]:
        """Times a block of so many calls.

        Args:
            idle: begins when the device has nothing left to do, so that no launch waits for it.
        """
        if idle and self.gpu is None:
            torch.cuda.synchronize()
        before = self.gpu.launches if self.gpu else 0
        start = perf_counter()
        yield
        spent = perf_counter() - start
        self.seconds.setdefault(name, []).append(spent / calls)
        self.launches[name] = (self.gpu.launches - before) // calls if self.gpu else None

    def many(self, name: str, call: Callable[[], object], rounds: int) -> None:
        """Samples of one call, over and over."""
        for _ in range(3):
            call()
        for _ in range(rounds):
            with self.sample(name, CALLS):
                for _ in range(CALLS):
                    call()


def inputs(device: torch.device, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """One layer's q, k and v for a token a row."""
    h, g, d = HEADS
    return tuple(torch.randn(ROWS, n, d, device=device, dtype=dtype) for n in (h, g, g))


def kernels(meter: Meter, device: torch.device, rounds: int) -> None:
    """The launchers of `pagedkv.kernels.paged`, as the cache calls them."""
    _, g, d = HEADS
    q, k, v = inputs(device, torch.bfloat16)
    pages = torch.zeros(2, ROWS, g, PAGE, d, device=device, dtype=torch.bfloat16)
    k_pages, v_pages = pages
    table = torch.zeros(ROWS, LONG // PAGE, dtype=torch.int32, device=device)
    starts = torch.arange(ROWS + 1, dtype=torch.int32, device=device)
    slots = torch.arange(ROWS, device=device) * PAGE
    for name, length in (("one launch", SHORT), ("two launches", LONG)):
        lens = torch.full((ROWS,), length, dtype=torch.int32, device=device)

        def plan(lens: torch.Tensor = lens, length: int = length) -> paged.Plan:
            return paged.plan(lens, starts, q, k_pages, num_new=[1] * ROWS, max_kv=length)

        work = plan()

        def attend(lens: torch.Tensor = lens, work: paged.Plan = work) -> Any:
            rows = q, k_pages, v_pages, table, lens, starts
            return paged.paged_attention(*rows, work, scale=d**-0.5)

        meter.many(f"kernels: attend, {name}", attend, rounds)
    meter.many("kernels: plan", plan, rounds)
    meter.many("kernels: write_kv", lambda: paged.write_kv(k, v, k_pages, v_pages, slots), rounds)


def steps(meter: Meter, device: torch.device, rounds: int) -> None:
    """Whole decode steps, fed by count, and the public calls in an open one."""
    _, g, d = HEADS
    config = CacheConfig(
        num_layers=LAYERS,
        num_kv_heads=g,
        head_dim=d,
        dtype="bfloat16",
        max_tokens=ROWS * (1024 + PAGE),
        page_size=PAGE,
        max_sequences=ROWS,
    )
    cache = PagedKVCache(config, device=device, backend="torch" if meter.gpu else "triton")
    # On a CPU the backend is refused, as it should be: only here nothing runs what is launched.
    cache._storage.backend, cache._storage.kernels = "triton", paged
    q, k, v = inputs(device, torch.bfloat16)
    seqs = [cache.add() for _ in range(ROWS)]
    with cache.step(seqs, num_new=1024 - 4 - rounds - PAGE, layers=()):
        pass

    def whole() -> None:
        with meter.sample("step"):
            with meter.sample("step: prepare", idle=False):
                step = cache.prepare(seqs, num_new=1)
            with meter.sample(f"step: {LAYERS} layers", idle=False):
                for layer in range(LAYERS):
                    paged_attention(q, k, v, step, layer)
            with meter.sample("step: commit", idle=False):
                cache.commit(step)

    for _ in range(3 + rounds):
        whole()
    for name in meter.seconds:
        meter.seconds[name] = meter.seconds[name][-rounds:]
    step = cache.prepare(seqs, num_new=1)
    paged_attention(q, k, v, step, 0)  # plans, for all that follow
    meter.many("layer: write and attend", lambda: paged_attention(q, k, v, step, 0), rounds)
    meter.many("layer: write_kv", lambda: write_kv(k, v, step, 0), rounds)


def measure(device: str, rounds: int) -> dict[str, dict[str, Any]]:
    """Seconds of each sample and launches of one call, by name."""

    def on(gpu: FakeGPU | None) -> dict[str, dict[str, Any]]:
        where = torch.device("cpu" if gpu else device)
        meter = Meter(gpu)
        steps(meter, where, rounds)
        kernels(meter, where, rounds)
        return {
            name: {"seconds": seconds, "launches": meter.launches[name]}
            for name, seconds in meter.seconds.items()
        }

    if device != "fake":
        return on(None)
    with fake_gpu(90) as gpu:
        return on(gpu)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", choices=("fake", "cuda"), default="fake")
    parser.add_argument("--rounds", type=int, default=100)
    options = parser.parse_args()
    print(json.dumps(measure(options.device, options.rounds)))


if __name__ == "__main__":
    main()
