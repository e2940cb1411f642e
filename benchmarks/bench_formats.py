"""Every format and policy in one table: bytes, what a model loses, and the time of a decode step.

- `x fewer bytes`, at 512, 2k and 8k tokens: K and V of one text in bf16, over the bytes of all
  tensors that a cache for it allocates: scales and exact pages included, page tables not.
- KL and recall are those of `quality.py`, on SmolLM2.
- `decode`: time of a whole step without a model (bookkeeping, writes, attention of all layers) over
  that of dense pages, which takes turns with it; fp32, one thread on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.conftest import ratio
from benchmarks.quality import Quality, Way, heading, way_of
from pagedkv import CacheConfig, PagedKVCache, paged_attention

pytest.importorskip("transformers")

LENGTHS = 512, 2048, 8192
HEAD_DIMS = 64, 128
WAYS = [
    way_of("dense"),
    way_of("int8"),
    way_of("fp8"),
    way_of("int4"),
    way_of("int8/int4"),
]


@dataclass(frozen=True)
class Size:
    """What is measured: the model's layers, tokens of a text, and the decode step's shape."""

    model_layers: int
    tokens: int
    layers: int
    rows: int
    past: int
    rounds: int


SIZES = {"small": Size(2, 128, 2, 2, 256, 2), "full": Size(30, 1024, 4, 8, 4096, 20)}


@pytest.fixture(scope="module")
def quality(smollm2_path: Path, size: str) -> Quality:
    from benchmarks.smollm2 import load

    model = load(smollm2_path, torch.float32, num_hidden_layers=SIZES[size].model_layers)
    return Quality(*model, tokens=SIZES[size].tokens, names=("prose", "docs", "recall"))


@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.name)
def bench_way(way: Way, quality: Quality, size: str, alternate: Any, table: Any) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    row = {"kept": way.name}
    for dim in HEAD_DIMS:
        fewer = [f"{fewer_bytes(way, dim, length):.2f}" for length in LENGTHS]
        row[f"x fewer bytes, D {dim}"] = " / ".join(fewer)
    found = quality.read(way)
    row |= {f"KL {name}": f"{found[name].mean_kl:.4f}" for name in ("prose", "docs")}
    row["recall"] = f"{found['recall'].perplexity:.2f}"
    seconds = alternate({"dense": decoding(Way("dense"), size), way.name: decoding(way, size)},
                        rounds=SIZES[size].rounds)  # fmt: skip
    row["decode"] = f"{ratio(seconds, way.name, 'dense'):.2f}"
    torch.set_num_threads(threads)
    shape = SIZES[size]
    table(f"{heading(quality)}; decode of {shape.rows} rows after {shape.past} tokens", row)


def fewer_bytes(way: Way, head_dim: int, length: int) -> float:
    """K and V of a text in bf16 over what a cache for this one text allocates."""
    layers, heads = 2, 8
    config = CacheConfig(
        num_layers=layers,
        num_kv_heads=heads,
        head_dim=head_dim,
        dtype="bfloat16",
        max_tokens=length,
        max_sequences=1,
        **way.fields,
    )
    held = PagedKVCache(config, device="cpu")._storage.nbytes
    return 2 * layers * heads * head_dim * 2 * length / held


def decoding(way: Way, size: str) -> Callable[[], None]:
    """A decode step of some rows of random K and V, each call one token later."""
    shape, heads, kv_heads, dim = SIZES[size], 9, 3, 64
    most = shape.past + shape.rounds + 8
    config = CacheConfig(
        num_layers=shape.layers,
        num_kv_heads=kv_heads,
        head_dim=dim,
        dtype="float32",
        max_tokens=shape.rows * (most + 64),
        max_sequences=shape.rows,
        **way.fields,
    )
    cache = PagedKVCache(config, device="cpu")
    seqs = [cache.add() for _ in range(shape.rows)]
    generator = torch.Generator().manual_seed(0)

    def step(new: int) -> None:
        with cache.step(seqs, num_new=new) as opened:
            for layer in range(shape.layers):
                q = torch.randn(shape.rows * new, heads, dim, generator=generator)
                k, v = torch.randn(2, shape.rows * new, kv_heads, dim, generator=generator)
                paged_attention(q, k, v, opened, layer)

    for _ in range(shape.past // 64):
        step(64)
    return lambda: step(1)
