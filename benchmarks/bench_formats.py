"""Every format and policy in one table: bytes, what a model loses, and the time of a decode step.

- `x fewer bytes`, at 512, 2k and 8k tokens: K and V of eight texts in bf16, over the bytes of all
  tensors of pages that a cache for them allocates: scales, bounds and exact pages included.
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
from benchmarks.quality import Quality, heading, way_of
from pagedkv import CacheConfig, PagedKVCache, paged_attention
from pagedkv.retention import POLICIES

pytest.importorskip("transformers")

LENGTHS = 512, 2048, 8192
HEAD_DIMS = 64, 128
KEPT = {  # formats, policies, and the share of a text that is kept or read
    "dense": {},
    "int8": {"format": "int8"},
    "fp8": {"format": "fp8"},
    "int4": {"format": "int4"},
    "int8/int4": {"format": "int8/int4"},
    "read 25%": {"read": 0.25},
    "int4, read 25%": {"format": "int4", "read": 0.25},
    **{f"{policy} 50%": {"policy": policy, "budget": 0.5} for policy in POLICIES},
    "int4, keydiff 50%": {"format": "int4", "policy": "keydiff", "budget": 0.5},
}


@dataclass(frozen=True)
class Size:
    """What is measured: the model's layers, tokens of a text, and the decode step's shape."""

    model_layers: int
    tokens: int
    layers: int
    rows: int
    past: int
    rounds: int


SIZES = {"small": Size(2, 256, 2, 2, 512, 2), "full": Size(30, 1024, 4, 8, 4096, 20)}


@pytest.fixture(scope="module")
def quality(smollm2_path: Path, size: str) -> Quality:
    from benchmarks.smollm2 import load

    model = load(smollm2_path, torch.float32, num_hidden_layers=SIZES[size].model_layers)
    return Quality(*model, tokens=SIZES[size].tokens, names=("prose", "docs", "recall"))


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("kept", KEPT)
def bench_way(kept: str, quality: Quality, shape: Size, alternate: Any, table: Any) -> None:
    row = {"kept": kept}
    for dim in HEAD_DIMS:
        fewer = [f"{fewer_bytes(KEPT[kept], dim, length):.2f}" for length in LENGTHS]
        row[f"x fewer bytes, D {dim}"] = " / ".join(fewer)
    found = quality.read(way_of(**KEPT[kept], tokens=quality.tokens))
    row |= {f"KL {name}": f"{found[name].mean_kl:.4f}" for name in ("prose", "docs")}
    row["recall"] = f"{found['recall'].perplexity:.2f}"
    ways = {"dense": decoding({}, shape), kept: decoding(KEPT[kept], shape)}
    row["decode"] = f"{ratio(alternate(ways, rounds=shape.rounds), kept, 'dense'):.2f}"
    table(f"{heading(quality)}; decode of {shape.rows} rows after {shape.past} tokens", row)


def fewer_bytes(kept: dict[str, Any], head_dim: int, length: int) -> float:
    """K and V of some texts in bf16 over what a cache for them allocates."""
    layers, heads, texts = 2, 4, 8
    fields = dict(way_of(**kept, tokens=length).fields)
    held = fields.get("budget", length)
    config = CacheConfig(layers, heads, head_dim, "bfloat16", texts * held, max_sequences=texts,
                         **fields)  # fmt: skip
    nbytes = PagedKVCache(config, device="cpu")._storage.nbytes
    return 2 * layers * heads * head_dim * 2 * texts * length / nbytes


def decoding(kept: dict[str, Any], shape: Size) -> Callable[[], None]:
    """A decode step of some rows of random K and V, each call one token later."""
    heads, kv_heads, dim = 9, 3, 64
    most = shape.past + shape.rounds + 64
    config = CacheConfig(
        num_layers=shape.layers,
        num_kv_heads=kv_heads,
        head_dim=dim,
        dtype="float32",
        max_tokens=shape.rows * most,
        max_sequences=shape.rows,
        **way_of(**kept, tokens=shape.past).fields,
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
