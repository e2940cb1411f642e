"""Bytes of pages, and the time of a decode step, for every format and policy.

- `x fewer bytes`: bytes of K and V of eight texts in bf16, heads of 64, over the bytes that a cache
  for them allocates for pages: scales, bounds and exact pages included.
- a decode step without a model (bookkeeping, writes, attention of all layers): its time over that
  of dense pages, which takes turns with it; fp32, one thread on a CPU.

`pagedkv quality` measures what a model loses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from benchmarks.bench_growth import forward
from benchmarks.conftest import Alternate, ratio
from pagedkv import CacheConfig, PagedKVCache
from pagedkv.quality import Variant, variant
from pagedkv.retention import POLICIES

pytest.importorskip("transformers")

LENGTHS = 512, 2048, 8192
AREA = "formats and policies"
KEPT = {  # formats, policies, and what is kept or read; budgets are shares of a text
    "dense": {},
    "int8": {"kv_format": "int8"},
    "fp8": {"kv_format": "fp8"},
    "int4": {"kv_format": "int4"},
    "int8,int4": {"kv_format": ("int8", "int4")},
    "read 25%": {"read": 0.25},
    "int4, read 25%": {"kv_format": "int4", "read": 0.25},
    **{f"{policy} 50%": {"retention": policy, "budget": 0.5} for policy in POLICIES},
    "keydiff, keep 0.5": {"retention": "keydiff", "keep": 0.5},
    "int4, keydiff 50%": {"kv_format": "int4", "retention": "keydiff", "budget": 0.5},
}


NAMES = ("layers", "rows", "past", "rounds")
SIZES = {"small": dict(zip(NAMES, (2, 2, 512, 25))), "full": dict(zip(NAMES, (4, 8, 4096, 20)))}


@pytest.mark.usefixtures("one_thread")
def bench_ways_of_keeping(shape: Any, alternate: Alternate, claim: Any, table: Any) -> None:
    """A decode step with each way of keeping, in turn with dense pages."""
    job, ways = "a decode step", {name: decoding(kept, shape) for name, kept in KEPT.items()}
    seconds = alternate(job, ways, rounds=shape["rounds"])
    for name, kept in KEPT.items():
        fewer = {f"at {n:,} tokens": f"{fewer_bytes(kept, 64, n):.2f}" for n in LENGTHS}
        table({"x fewer bytes": name} | fewer)
        if name != "dense":
            claim(job, f"{name} / dense", ratio(seconds, name, "dense"))


def way(kept: dict[str, Any], length: int) -> Variant:
    """Returns the variant that keeps texts of some length in this way."""
    budget = {"budget": int(kept["budget"] * length)} if "budget" in kept else {}
    return variant(**kept | budget, length=length)


def fewer_bytes(kept: dict[str, Any], head_dim: int, length: int) -> float:
    """Returns bytes of K and V in bf16 over those that a cache for the same texts allocates."""
    layers, heads, texts = 2, 4, 8
    fields = dict(way(kept, length).fields)
    held = fields.get("budget", int(length * fields.get("keep", 1)))
    config = CacheConfig(layers, heads, head_dim, "bfloat16", texts * held, max_sequences=texts,
                         **fields)  # fmt: skip
    nbytes = PagedKVCache(config, device="cpu")._storage.nbytes
    return 2 * layers * heads * head_dim * 2 * texts * length / nbytes


def decoding(kept: dict[str, Any], shape: dict[str, int]) -> Callable[[], None]:
    """Returns a decode step of rows of random K and V; each call is one token later."""
    rows, past = shape["rows"], shape["past"]
    sizes = {"max_tokens": rows * (past + shape["rounds"] + 64), "max_sequences": rows}
    fields = way(kept, past).fields
    config = CacheConfig(shape["layers"], 3, 64, "float32", **sizes, **fields)
    cache = PagedKVCache(config, device="cpu")
    seqs = [cache.add() for _ in range(rows)]

    def step(new: int) -> None:
        with cache.step(seqs, num_new=new) as opened:
            forward(cache, opened)

    for _ in range(past // 64):
        step(64)
    return lambda: step(1)
