"""Tiny models of many families in folders of several files, and the one way they are compared."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from pagedkv import LayerStreamer
from pagedkv.errors import CheckpointError
from pagedkv.models.checkpoint import Checkpoint
from pagedkv.stream import WeightStore
from pagedkv.stream.skeleton import build as skeleton
from tests.hf.tiny import _COMMON, _MHA, _SHAPE, FAMILIES, build, generate, padded, prompts

CPU = torch.device("cpu")

_SMALL = {**_COMMON, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
_SPARSE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
_SHARED = {**_SPARSE, "shared_expert_intermediate_size": 16}
_LINEAR = {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_LATENT = {
    "q_lora_rank": 16,
    "kv_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
    "first_k_dense_replace": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_group": 2,
    "topk_group": 1,
}

_MAMBA = {
    "mamba_d_ssm": 32,
    "mamba_n_heads": 4,
    "mamba_d_head": 8,
    "mamba_d_state": 8,
    "mamba_chunk_size": 8,
    "ssm_multipliers": [0.5, 1.5, 0.7, 1.2, 0.9],
}

# What pages do not serve streams as well, with transformers' own cache.
MORE: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma": ("Gemma", {**_SHAPE, "head_dim": 8}),
    "stablelm": ("StableLm", _SHAPE),
    "bloom": ("Bloom", {**_COMMON, "hidden_size": 32, "n_layer": 3, "n_head": 4}),
    "falcon": ("Falcon", _SMALL),
    "mamba": ("Mamba", {**_SMALL, "state_size": 4}),
    "qwen2_moe": ("Qwen2Moe", {**_SHAPE, **_SHARED}),
    "qwen3_next": ("Qwen3Next", {**_SHAPE, **_SHARED, **_LINEAR, "head_dim": 8}),
    "falcon_h1": ("FalconH1", {**_SHAPE, **_MAMBA, "head_dim": 8}),
    "deepseek_v3": ("DeepseekV3", {**_MHA, **_LATENT}),
}
THIRTY = str.split(
    "llama mistral qwen2 qwen3 gemma gemma2 gemma3 phi phi3 olmo2 granite cohere starcoder2 "
    "stablelm smollm3 glm4 gpt2 opt bloom falcon gpt_oss mamba nemotron exaone4 gpt_neox mixtral "
    "qwen2_moe qwen3_moe qwen3_next deepseek_v3"
)
# Experts, states instead of pages, tied heads, layers of several kinds, keys renamed on the way.
VARIED = ["llama", "mixtral", "gpt2", "mamba", "gemma3", "qwen3_next", "falcon_h1"]
LAYERS = {"gpt2": {"n_layer": 3}, "bloom": {}, "mamba": {}, "falcon": {}, "qwen3_next": {}}
FOUR = {"num_hidden_layers": 4}
WITH_FOUR = {"gemma2", "gemma3", "exaone4", "gpt_oss", "qwen3_next"}  # their layers alternate


def make(family: str, **fields: Any) -> PreTrainedModel:
    """A random model with three layers, or four: one more or fewer than slots go into."""
    name, own = {**FAMILIES, **MORE}[family]
    layers = LAYERS.get(family, {"num_hidden_layers": 3})
    if family in WITH_FOUR:
        layers = FOUR
    if family == "smollm3":
        layers = {"num_hidden_layers": 3, "no_rope_layers": [1, 0, 1]}
    return build(name, **{**own, **layers, **fields})


def save(model: PreTrainedModel, folder: Path) -> Path:
    """Saves it in files of 20 kB, with what `save_pretrained` makes of its keys."""
    model.save_pretrained(folder, max_shard_size="20KB")
    return folder


def in_memory(folder: Path, cls: Any = None, **options: Any) -> PreTrainedModel:
    """The model as transformers loads it, in memory that torch allocated.

    The loader maps tensors where they lie in their files. Where a matrix has a single row, what
    torch multiplies with depends on such an address, and so do the last bits.
    """
    model = (cls or transformers.AutoModelForCausalLM).from_pretrained(folder, **options)
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return model


def ragged() -> dict[str, Tensor]:
    return padded(prompts(5, 9, 3))


def assert_bits(
    actual: PreTrainedModel,
    expected: PreTrainedModel,
    batch: dict[str, Tensor] | None = None,
    **options: Any,
) -> None:
    """Both generate the same tokens from the same logits, to the last bit, and they are numbers."""
    batch = ragged() if batch is None else batch
    a, e = generate(actual, batch, **options), generate(expected, batch, **options)
    assert torch.equal(a.sequences, e.sequences)
    for step, (x, y) in enumerate(zip(a.logits, e.logits, strict=True)):
        assert y.isfinite().all()
        assert torch.equal(x, y), f"step {step}: logits differ by {(x - y).abs().max():.1e}"


def decode(model: PreTrainedModel, tokens: Iterable[int]) -> list[Tensor]:
    """Logits of single tokens, one after another."""
    with torch.no_grad():
        return [model(torch.tensor([[token]]), use_cache=False).logits for token in tokens]


def stream(folder: Path, **options: Any) -> LayerStreamer:
    return LayerStreamer.from_pretrained(folder, device="cpu", **options)


def placed(folder, dtype="auto", images=False, **placing) -> LayerStreamer:
    """A streamer with weights where a plan might put them."""
    checkpoint = Checkpoint.open(folder)
    built = skeleton(checkpoint, dtype, images)
    model = built.model
    store = WeightStore.open(checkpoint, built)
    return LayerStreamer(model, store, device=CPU, **placing)


def on_read(streamer: LayerStreamer, monkeypatch: Any, at: int, act: Any, what: str = "") -> None:
    """Does something ahead of the n-th read of what has a name that begins so."""
    reader, count = streamer._store.reader, iter(range(10_000))
    read = reader.read

    def acting(name: str, run: Any, memory: memoryview) -> None:
        if name.startswith(what) and next(count) == at:
            act(run, memory)
        read(name, run, memory)

    monkeypatch.setattr(reader, "read", acting)


def fill_with_ones(run: Any, memory: memoryview) -> None:
    """Fills memory as a read does that fails half-way: something is there, and wrong."""
    for part in run.parts:
        memory[part.at : part.at + part.nbytes] = b"\xff" * part.nbytes


def fail(run: Any, memory: memoryview) -> None:
    """A read that fails half-way."""
    fill_with_ones(run, memory)
    raise CheckpointError("a disk fails")
