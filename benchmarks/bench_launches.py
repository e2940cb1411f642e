"""Host time of a whole decode step through the Triton backend, and of the calls in it.

A layer's launches are bound once for a step; the other way is to call the kernels anew.

16 rows of about 1000 tokens, 30 layers, measured in a process of its own. If there is a card, it
runs there, and no sample waits for the card. If there is none, it runs for an absent card
(`absent_card` in `kernels/triton/card.py`), with tensors on the CPU. Then calls go all the way
through the library and Triton, but the time of the CUDA driver is missing. Nothing is computed,
so no results are compared; only the number of kernels that each call launches is checked.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from statistics import median
from time import perf_counter
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.conftest import job
from pagedkv import CacheConfig, PagedKVCache, paged_attention

ROUNDS = {"small": 60, "full": 400}
ROWS, LAYERS, PAGE = 16, 30, 16
HEADS = (16, 2, 64)  # small, because the host does the same for all sizes
LENGTH = 8192  # tokens of rows, which every kernel splits
CALLS = 10  # calls of one kind in a sample, between two readings of the clock
STEP, LAYER, WRITE, ATTEND = "step", "layer: write and attend", "write_kv", "attend"
LAUNCHES = {WRITE: 1, ATTEND: 2}  # by themselves: the parts of a row are merged by a second one


def bench_layer(record: Any, claim: Any, size: str, device: torch.device) -> None:
    """A layer of a step, beside its kernels called by themselves."""
    pytest.importorskip("triton")
    found = job("benchmarks.bench_launches", device.type, str(ROUNDS[size]))
    for part, expected in LAUNCHES.items():
        assert found[part][1] in (None, expected)
    seconds = {name: spent for name, (spent, _) in found.items()}
    apart = [write + attend for write, attend in zip(seconds[WRITE], seconds[ATTEND])]
    name = "a layer, write and attend"
    record(
        name, {"kernels called by themselves": apart, "launches bound for the step": seconds[LAYER]}
    )
    claim(name, "bound / called by themselves", median(seconds[LAYER]) / median(apart))
    claim(name, "bound", 1e6 * median(seconds[LAYER]), "us", 20)
    claim("a decode step", f"all of it, {LAYERS} layers", 1e6 * median(seconds[STEP]), "us")


# ------------------------------------------------------------------ in a process of its own


class Meter:
    """Collects samples, and kernels launched, by name."""

    def __init__(self, gpu: Any) -> None:
        self.gpu = gpu  # the absent card, or None if there is a card
        self.seconds: dict[str, list[float]] = {}
        self.launches: dict[str, int | None] = {}

    @contextmanager
    def sample(self, name: str, calls: int = 1) -> Iterator[None]:
        """Times a block of `calls` calls."""
        if self.gpu is None:
            torch.cuda.synchronize()  # so that no launch waits
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


def inputs(device: str) -> list[Tensor]:
    """One layer's q, k and v for a token a row."""
    h, g, d = HEADS
    return [torch.randn(ROWS, n, d, device=device, dtype=torch.bfloat16) for n in (h, g, g)]


def kernels(meter: Meter, device: str, rounds: int) -> None:
    """The launchers of `pagedkv.kernels.triton.backend`, as the cache calls them."""
    from pagedkv.kernels.triton import backend as paged

    _, g, d = HEADS
    q, k, v = inputs(device)
    pages = torch.zeros(2, ROWS, g, PAGE, d, device=device, dtype=torch.bfloat16)
    table = torch.zeros(ROWS, LENGTH // PAGE, dtype=torch.int32, device=device)
    starts = torch.arange(ROWS + 1, dtype=torch.int32, device=device)
    slots = torch.arange(ROWS, device=device) * PAGE
    lens = torch.full((ROWS,), LENGTH, dtype=torch.int32, device=device)
    work = paged.plan(lens, starts, q, pages[0], num_new=[1] * ROWS, max_kv=LENGTH)

    def attend() -> Any:
        return paged.paged_attention(q, *pages, table, lens, starts, work, scale=d**-0.5)

    meter.many(ATTEND, attend, rounds)
    meter.many(WRITE, lambda: paged.write_kv(k, v, *pages, slots), rounds)


def steps(meter: Meter, device: str, rounds: int) -> None:
    """Whole decode steps, fed by count, and a layer of an open one."""
    from pagedkv.kernels.triton import backend as paged

    _, g, d = HEADS
    sizes = {"page_size": PAGE, "max_sequences": ROWS, "max_tokens": ROWS * (1024 + PAGE)}
    config = CacheConfig(LAYERS, g, d, "bfloat16", **sizes)
    cache = PagedKVCache(config, device=device, backend="torch" if meter.gpu else "triton")
    # A cache rightly refuses this backend on a CPU; only here nothing that is launched runs.
    cache.backend, cache._storage._kernels = "triton", paged
    q, k, v = inputs(device)
    seqs = [cache.add() for _ in range(ROWS)]
    with cache.step(seqs, num_new=1024 - 4 - rounds - PAGE, layers=()):
        pass
    for _ in range(3 + rounds):
        with meter.sample(STEP), cache.step(seqs, num_new=1) as step:
            for layer in range(LAYERS):
                paged_attention(q, k, v, step, layer)
    meter.seconds[STEP] = meter.seconds[STEP][-rounds:]
    step = cache.prepare(seqs, num_new=1)
    paged_attention(q, k, v, step, 0)  # plans, for all that follow
    meter.many(LAYER, lambda: paged_attention(q, k, v, step, 0), rounds)


def main(device: str, rounds: int) -> None:
    from pagedkv.kernels.triton.card import absent_card

    with absent_card(90) if device == "cpu" else nullcontext() as gpu:
        meter = Meter(gpu)
        steps(meter, device, rounds)
        kernels(meter, device, rounds)
    print(json.dumps({name: (meter.seconds[name], meter.launches[name]) for name in meter.seconds}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
