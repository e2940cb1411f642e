"""The time of pools that grow, and the memory of caches while a text is generated.

One objection to reserving ahead is that every step may pay for memory that is not used. Here a step
of all layers takes turns on three pools: one for exactly the tokens that it ever holds, one for 16
times as many, and one that may grow to that size.

    python -m benchmarks.bench_growth docs/growth.png

draws memory over 4000 tokens that come one at a time (Linux). Each cache runs in a process of its
own, which reads from /proc how much it has allocated (VmData) and how much it uses (VmRSS). A CPU
gives memory at the first write, a card at the allocation. The concatenating cache calls `torch.cat`
for K and V of every layer and token, as transformers' DynamicCache does. Its memory is read after
every concatenation, while the old tensor is still there, and after every token.
"""

import multiprocessing
import sys
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch

from benchmarks.conftest import Alternate, ratio
from benchmarks.measuring import held
from pagedkv import CacheConfig, PagedKVCache, paged_attention, write_kv

SIZES: dict[str, dict[str, int]] = {
    "small": {"layers": 2, "batch": 2, "tokens": 200, "rounds": 60},
    "full": {"layers": 30, "batch": 2, "tokens": 2048, "rounds": 240},
}
WARMUP = 8
TIMES = 16


def new_pool(shape: dict[str, int], device: torch.device, times: int, growing: bool) -> Any:
    """Makes a pool for `times` the tokens that are needed, and sequences with their prompts."""
    each = -(-(shape["tokens"] + WARMUP + shape["rounds"] + 1) // 16) * 16
    sizes = {"max_tokens": times * shape["batch"] * each, "max_sequence_length": each}
    sizes |= {"max_sequences": shape["batch"], "growth_step": 256 if growing else None}
    dtype = "float32" if device.type == "cpu" else "bfloat16"
    config = CacheConfig(shape["layers"], 3, 64, dtype, **sizes)
    cache = PagedKVCache(config, device=device)
    seqs = [cache.add() for _ in range(shape["batch"])]
    with cache.step(seqs, num_new=shape["tokens"]) as step:
        forward(cache, step)
    return cache, seqs


def forward(cache: PagedKVCache, step: Any) -> torch.Tensor:
    """Writes and attends in every layer, as a model would; returns the last layer's output."""
    torch.manual_seed(int(step.kv_lens_host[0]))  # the same in every pool
    dtype = getattr(torch, cache.config.dtype)
    q = torch.randn(step.num_tokens, 9, 64, dtype=dtype, device=cache.device)
    k, v = q[:, :3], q[:, 3:6]
    for layer in range(cache.config.num_layers):
        out = paged_attention(q, k, v, step, layer)
    return out


@pytest.mark.usefixtures("one_thread")
def bench_reserved(
    shape: dict[str, int], device: torch.device, alternate: Alternate, claim: Any
) -> None:
    """A decode step in pools that reserve more than is used."""
    exact, growing, large = "an exact pool", "a pool that grows", f"{TIMES} times reserved"
    pools = {
        exact: new_pool(shape, device, 1, False),
        growing: new_pool(shape, device, TIMES, True),
        large: new_pool(shape, device, TIMES, False),
    }
    stats = pools[growing][0].stats()
    assert stats.pages < 2 * pools[exact][0].stats().pages < stats.reserved
    outs: dict[str, torch.Tensor] = {}

    def decode(name: str) -> None:
        cache, seqs = pools[name]
        with cache.step(seqs, num_new=1) as step:
            outs[name] = forward(cache, step)
        if device.type == "cuda":
            torch.cuda.synchronize()

    job = "a decode step"
    ways = {name: partial(decode, name) for name in pools}
    seconds = alternate(job, ways, rounds=shape["rounds"], warmup=WARMUP)
    for name in (growing, large):
        assert torch.equal(outs[name], outs[exact])
        claim(job, f"{name} / {exact}", ratio(seconds, name, exact), target=1.02)


def bench_grow(
    shape: dict[str, int], device: torch.device, alternate: Alternate, claim: Any
) -> None:
    """Room for 256 more tokens in all layers: a full pool grows, or `torch.cat` adds to 1,024."""
    rounds, layers = shape["rounds"], shape["layers"]
    sizes = {"max_tokens": 256 * (rounds + 3), "max_sequences": rounds + 3}
    config = CacheConfig(layers, 3, 64, "float32", **sizes, growth_step=256)
    cache = PagedKVCache(config, device=device)
    cache.add(max_tokens=256)
    held: list[torch.Tensor] = []

    def fill() -> None:
        held[:] = [torch.zeros(1, 3, 1024, 64, device=device) for _ in range(2 * layers)]

    def concatenate() -> None:
        more = torch.empty(1, 3, 256, 64, device=device)
        held[:] = [torch.cat([old, more], dim=2) for old in held]
        if device.type == "cuda":
            torch.cuda.synchronize()

    def grow() -> None:
        before = cache.stats().growths
        cache.add(max_tokens=256)
        assert cache.stats().growths == before + 1

    job, ways = "256 tokens more", {"torch.cat": concatenate, "the pool grows": grow}
    seconds = alternate(job, ways, rounds, before=fill)
    claim(job, "the pool grows / torch.cat", ratio(seconds, "the pool grows", "torch.cat"))


# ------------------------------------------------------------------ memory over tokens

LAYERS, HEADS, DIM = 4, 4, 64
TOKENS = 4000
EVERY = 10  # tokens between two looks
WAYS: dict[str, int | None] = {
    "fixed pool of 4000 tokens": None,
    "growth_step=1024": 1024,
    "growth_step=256": 256,
    "torch.cat for every token": 0,
}
Look = tuple[float, float]  # MiB allocated, and MiB of it in use


def look() -> Look:
    return held("VmData"), held("VmRSS")


def pooled(growth_step: int | None) -> Iterator[list[Look]]:
    """Memory of a pool, token by token."""
    sizes = {"max_tokens": TOKENS, "max_sequences": 1, "growth_step": growth_step}
    cache = PagedKVCache(CacheConfig(LAYERS, HEADS, DIM, "float32", **sizes), device="cpu")
    seq, new = cache.add(), torch.ones(1, HEADS, DIM)
    for _ in range(TOKENS):
        with cache.step([seq], num_new=1) as step:
            for layer in range(LAYERS):
                write_kv(new, new, step, layer)
        yield [look()]


def concatenated() -> Iterator[list[Look]]:
    """Memory of tensors that get one token longer each time."""
    kept = [torch.ones(1, HEADS, 0, DIM) for _ in range(2 * LAYERS)]
    new = torch.ones(1, HEADS, 1, DIM)
    for token in range(TOKENS):
        looks = []
        for i, old in enumerate(kept):
            kept[i] = torch.cat([old, new], dim=2)
            if token % EVERY == 0:
                looks.append(look())
            del old
        yield [*looks, look()]


def measure(growth_step: int | None) -> list[list[Look]]:
    """Memory above the process's own at every EVERY-th token, read once or several times."""
    torch.set_num_threads(1)
    start = concatenated if growth_step == 0 else partial(pooled, growth_step)
    next(start())  # loads all code
    before = look()
    return [
        [(data - before[0], resident - before[1]) for data, resident in looks]
        for token, looks in enumerate(start())
        if token % EVERY == 0
    ]


def draw(path: str) -> None:
    import matplotlib

    matplotlib.use("Agg")  # no display is needed
    from matplotlib import pyplot

    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn, max_tasks_per_child=1) as pool:
        found = dict(zip(WAYS, pool.map(measure, WAYS.values())))
    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4), sharey=True, layout="constrained")
    titles = "memory allocated (on a card, all of it is used)", "memory in use on a CPU"
    for axis, title in enumerate(titles):
        for name, looks in found.items():
            points = [(EVERY * i, each[axis]) for i, at in enumerate(looks) for each in at]
            width = 0.7 if WAYS[name] == 0 else 1.2
            axes[axis].plot(*zip(*points), label=name, linewidth=width)
            last = [each[axis] for at in looks[-10:] for each in at]
            print(f"{name}, {title}: {min(last):.1f} to {max(last):.1f} MiB at the end")
        axes[axis].set(title=title, xlabel="tokens generated")
        axes[axis].grid(alpha=0.3)
    axes[0].set_ylabel("MiB")
    axes[0].legend()
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    # Imported by its module's name, under which processes find it.
    from benchmarks.bench_growth import draw as run

    run(sys.argv[1])
