"""What a trace costs a decode step: the bookkeeping alone, and a small model's whole step.

Caches with and without a trace take turns, each of them through the same steps; afterwards both
have the same pages.
"""

from __future__ import annotations

from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.conftest import Alternate, Figure, ratio
from pagedkv import CacheConfig, PagedCache, PagedKVCache

SIZES: dict[str, dict[str, Any]] = {
    "small": {"rounds": 50, "steps": 3, "layers": 2},
    "full": {"rounds": 400, "steps": 40, "layers": 30},
}
PROMPT = 200
TARGET = 1.05  # of a decode step without


@pytest.mark.parametrize("rows", [1, 16, 64, 256])
def bench_bookkeeping(
    alternate: Alternate, figure: Figure, shape: dict[str, Any], tmp_path: Path, rows: int
) -> None:
    most = 1024 * rows
    config = CacheConfig(2, 1, 8, "float32", max_tokens=most, page_size=16, max_sequences=256)
    made = {}
    for name, trace in (("off", None), ("on", tmp_path / "a.trace")):
        cache = PagedKVCache(config, device="cpu", backend="torch", trace=trace)
        made[name] = cache, [cache.add() for _ in range(rows)]

    def step(name: str, ids: Any) -> None:
        cache, seqs = made[name]
        step = cache.prepare(seqs, ids)
        step.wrote[:] = [0, 1]  # what layers would do
        cache.commit(step)

    for name in made:
        step(name, np.arange(PROMPT)[None].repeat(rows, 0))
    ids = np.random.default_rng(0).integers(0, 49_000, rows)
    ways = {"off": lambda: step("off", ids), "on": lambda: step("on", ids)}
    seconds = alternate(ways, rounds=shape["rounds"])
    off, on = (cache._tables for cache, _ in made.values())
    assert np.array_equal(off.tables, on.tables)
    assert (tmp_path / "a.trace").read_bytes().count(b'"commit"') >= 2
    for name in seconds:
        figure(
            f"bookkeeping of a step, {rows} rows, trace {name}", 1e6 * median(seconds[name]), "us"
        )


@pytest.mark.model
def bench_decode(
    alternate: Alternate,
    figure: Figure,
    shape: dict[str, Any],
    model: Any,
    one_thread: None,
    tmp_path: Path,
) -> None:
    ids = torch.randint(0, 40_000, (16, 128))
    on, off, again = (
        PagedCache(model, max_tokens=16 * 512, **fields)
        for fields in ({"trace": tmp_path / "a.trace"}, {}, {"rollback": 1})
    )

    @torch.no_grad()
    def step(cache: PagedCache, tokens: Any) -> Any:
        return model(tokens, cache=cache, use_cache=True, logits_to_keep=1).logits

    caches = {"off": off, "off again": again, "on": on}
    first = [step(cache, ids) for cache in caches.values()]
    assert torch.equal(first[0], first[2])
    ways = {name: lambda cache=cache: step(cache, ids[:, :1]) for name, cache in caches.items()}
    seconds = alternate(ways, rounds=shape["steps"])
    figure("decode step, 16 rows, trace off", 1e3 * median(seconds["off"]), "ms")
    figure("decode step, another cache without", ratio(seconds, "off again", "off"), "x")
    figure("decode step, trace on", ratio(seconds, "on", "off"), "x", TARGET)
    for cache in caches.values():
        cache.close()
