"""How long a plan takes: from a configuration, from a checkpoint's headers, and when it is refused.

A planner that takes milliseconds can be asked in a loop, or at every admission.
"""

import json
from functools import partial
from pathlib import Path
from statistics import median

import pytest

from benchmarks.conftest import Alternate, Figure
from pagedkv import BudgetExceeded, plan_memory

CONFIG = {
    "model_type": "llama",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
SHARDS = 30


def llama_70b(folder: Path) -> Path:
    """A checkpoint of the shapes of Llama 3 70B in 30 shards, all holes: it takes no disk."""
    h, feed, kv = 8192, 28672, 1024
    layer = {
        **{f"self_attn.{name}_proj": [h, h] for name in "qo"},
        **{f"self_attn.{name}_proj": [kv, h] for name in "kv"},
        **{f"mlp.{name}_proj": [feed, h] for name in ("gate", "up")},
        **{"mlp.down_proj": [h, feed], "input_layernorm": [h], "post_attention_layernorm": [h]},
    }
    shapes = {"model.embed_tokens": [128256, h], "lm_head": [128256, h], "model.norm": [h]}
    for i in range(80):
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in layer.items()}
    names = [f"{name}.weight" for name in shapes]
    places = {}
    for shard in range(SHARDS):
        file = folder / f"model-{shard:05}-of-{SHARDS:05}.safetensors"
        header, at = {}, 0
        for name in names[shard::SHARDS]:
            shape = shapes[name.removesuffix(".weight")]
            size = 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
            header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [at, at + size]}
            places[name] = file.name
            at += size
        text = json.dumps(header).encode()
        with file.open("wb") as stream:
            stream.write(len(text).to_bytes(8, "little") + text)
            stream.truncate(8 + len(text) + at)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


@pytest.mark.parametrize("source", ["config", "folder"])
def bench_plan(alternate: Alternate, figure: Figure, tmp_path: Path, source: str) -> None:
    model = llama_70b(tmp_path) if source == "folder" else CONFIG
    plan = plan_memory(model, device_memory="8GiB", host_memory="64GiB", batch=1)
    assert plan.shape.exact == (source == "folder")
    assert plan.device_bytes == plan_memory(CONFIG, device_memory="8GiB").device_bytes
    plan_it = partial(plan_memory, model, device_memory="8GiB", host_memory="64GiB", batch=1)
    times = alternate({source: plan_it}, rounds=100, warmup=3)[source]
    what = "a configuration" if source == "config" else f"723 tensors in {SHARDS} shards"
    target = 10 if source == "config" else 50
    figure(f"plan of a 70B model from {what}", 1e3 * median(times), "ms", target)


def bench_refusal(alternate: Alternate, figure: Figure) -> None:
    """Advice is tried before it is given, so a refusal takes several plans."""

    def refused_plan() -> None:
        with pytest.raises(BudgetExceeded) as refused:
            plan_memory(CONFIG, device_memory="16GiB", batch=64)
        assert refused.value.advice

    times = alternate({"refused": refused_plan}, rounds=30, warmup=1)["refused"]
    figure("refusal with advice", 1e3 * median(times), "ms", 100)
