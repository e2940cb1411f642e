"""Decode on pools that are far larger than what they hold, and what growing one costs.

The objection to reserving ahead is that every step then pays for what is not used. Here a step of
all layers takes turns on three pools: one of exactly the tokens it ever holds, one of 16 times as
many, and one that grows towards as many.
"""

from functools import partial
from statistics import median
from typing import Any

import pytest
import torch

from benchmarks.conftest import Alternate, Figure, ratio
from pagedkv import CacheConfig, PagedKVCache, paged_attention

SIZES: dict[str, dict[str, int]] = {
    "small": {"layers": 2, "batch": 2, "tokens": 200, "rounds": 8},
    "full": {"layers": 30, "batch": 2, "tokens": 2048, "rounds": 240},
}
WARMUP = 8
TIMES = 16


@pytest.fixture
def shape(size: str) -> dict[str, int]:
    return SIZES[size]


def new_pool(shape: dict[str, int], device: torch.device, times: int, growing: bool) -> Any:
    """A pool for `times` what the benchmark needs, and its sequences, prompts computed."""
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
    """Writes and attends in every layer, as a model would: what the last one returns."""
    torch.manual_seed(int(step.kv_lens_host[0]))  # the same in every pool
    dtype = getattr(torch, cache.config.dtype)
    q = torch.randn(step.num_tokens, 9, 64, dtype=dtype, device=cache.device)
    k, v = q[:, :3], q[:, 3:6]
    for layer in range(cache.config.num_layers):
        out = paged_attention(q, k, v, step, layer)
    return out


def bench_reserved(
    shape: dict[str, int], device: torch.device, alternate: Alternate, figure: Figure
) -> None:
    pools = {
        "exact": new_pool(shape, device, 1, False),
        f"{TIMES} times, growing": new_pool(shape, device, TIMES, True),
        f"{TIMES} times": new_pool(shape, device, TIMES, False),
    }
    exact, growing, large = pools
    stats = pools[growing][0].stats()
    assert stats.pages < 2 * pools[exact][0].stats().pages < stats.reserved
    outs: dict[str, torch.Tensor] = {}

    def decode(name: str) -> None:
        cache, seqs = pools[name]
        with cache.step(seqs, num_new=1) as step:
            outs[name] = forward(cache, step)
        if device.type == "cuda":
            torch.cuda.synchronize()

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    ways = {name: partial(decode, name) for name in pools}
    seconds = alternate(ways, rounds=shape["rounds"], warmup=WARMUP)
    torch.set_num_threads(threads)
    for name in (growing, large):
        assert torch.equal(outs[name], outs[exact])
    spent = 1e3 * median(seconds[exact])
    figure(f"decode step of {shape['tokens']} tokens, exact pool", spent, "ms")
    for name in (growing, large):
        figure(f"  pool of {name} / exact", ratio(seconds, name, exact), "x", 1.02)


def bench_grow(shape: dict[str, int], alternate: Alternate, figure: Figure) -> None:
    """Reserving 256 tokens more in a pool that has none left, which grows it, all layers."""
    rounds = shape["rounds"]
    sizes = {"max_tokens": 256 * (rounds + 1), "max_sequences": rounds + 1}
    config = CacheConfig(shape["layers"], 3, 64, "float32", **sizes, growth_step=256)
    cache = PagedKVCache(config, device="cpu")
    cache.add(max_tokens=256)
    times = alternate({"grow": partial(cache.add, max_tokens=256)}, rounds, warmup=0)["grow"]
    assert cache.stats().growths == len(times)
    figure(f"growth by 256 tokens in {shape['layers']} layers, CPU", 1e6 * median(times), "us")
