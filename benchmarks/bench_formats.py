"""Every format and policy in one table: bytes, what a model loses, and the time of a decode step.

- `x fewer bytes`, at 512, 2k and 8k tokens: K and V of eight texts in bf16, over the bytes of all
  tensors of pages that a cache for them allocates: scales, bounds and exact pages included.
- KL and recall are those of `pagedkv quality`, on SmolLM2.
- `decode`: time of a whole step without a model (bookkeeping, writes, attention of all layers) over
  that of dense pages, which takes turns with it; fp32, one thread on a CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.bench_growth import forward
from benchmarks.conftest import ratio
from pagedkv import CacheConfig, PagedKVCache
from pagedkv.quality import Variant, variant
from pagedkv.quality.probes import Probe, probes
from pagedkv.quality.reading import compare
from pagedkv.retention import POLICIES

pytest.importorskip("transformers")

LENGTHS = 512, 2048, 8192
HEAD_DIMS = 64, 128
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


# The model's layers and tokens of a text; then the decode step's shape.
NAMES = ("model_layers", "tokens", "layers", "rows", "past", "rounds")
SIZES = {
    "small": dict(zip(NAMES, (2, 256, 2, 2, 512, 2))),
    "full": dict(zip(NAMES, (30, 1024, 4, 8, 4096, 20))),
}


@pytest.fixture(scope="module")
def texts(smollm2_path: Path, size: str) -> tuple[Any, list[Probe]]:
    """The model, and what it reads."""
    from benchmarks.smollm2 import load

    layers, tokens = SIZES[size]["model_layers"], SIZES[size]["tokens"]
    model, tokenizer = load(smollm2_path, torch.float32, num_hidden_layers=layers)
    found = probes(tokenizer, tokens)
    return model, [found[name] for name in ("prose", "docs", "recall")]


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("kept", KEPT)
def bench_way(kept: str, texts: Any, shape: Any, alternate: Any, table: Any) -> None:
    row = {"kept": kept}
    for dim in HEAD_DIMS:
        fewer = [f"{fewer_bytes(KEPT[kept], dim, length):.2f}" for length in LENGTHS]
        row[f"x fewer bytes, D {dim}"] = " / ".join(fewer)
    model, read = texts
    tokens, layers = len(read[0].ids), model.config.num_hidden_layers
    (found,) = compare(model, [way(KEPT[kept], tokens)], read)
    row |= {f"KL {name}": f"{found[name].mean_kl:.4f}" for name in ("prose", "docs")}
    row["recall"] = f"{found['recall'].perplexity:.2f}"
    ways = {"dense": decoding({}, shape), kept: decoding(KEPT[kept], shape)}
    row["decode"] = f"{ratio(alternate(ways, rounds=shape['rounds']), kept, 'dense'):.2f}"
    heading = f"SmolLM2-135M, {layers} layers, texts of {tokens} tokens; "
    table(f"{heading}decode of {shape['rows']} rows after {shape['past']} tokens", row)


def way(kept: dict[str, Any], length: int) -> Variant:
    """A way of keeping texts of some length."""
    budget = {"budget": int(kept["budget"] * length)} if "budget" in kept else {}
    return variant(**kept | budget, length=length)


def fewer_bytes(kept: dict[str, Any], head_dim: int, length: int) -> float:
    """K and V of some texts in bf16 over what a cache for them allocates."""
    layers, heads, texts = 2, 4, 8
    fields = dict(way(kept, length).fields)
    held = fields.get("budget", int(length * fields.get("keep", 1)))
    config = CacheConfig(layers, heads, head_dim, "bfloat16", texts * held, max_sequences=texts,
                         **fields)  # fmt: skip
    nbytes = PagedKVCache(config, device="cpu")._storage.nbytes
    return 2 * layers * heads * head_dim * 2 * texts * length / nbytes


def decoding(kept: dict[str, Any], shape: dict[str, int]) -> Callable[[], None]:
    """A decode step of some rows of random K and V, each call one token later."""
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
