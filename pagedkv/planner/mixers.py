"""Layers with a recurrent state: which they are where a file does not list them, and their weights.

transformers' classes fill in what `config.json` leaves out; a plan does without them.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from types import SimpleNamespace
from typing import Any

from pagedkv.layers import state_tensors

NEWER = {"attention": "full_attention", "mamba": "linear_attention"}
NEMOTRON = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}
EVERY_NTH_ATTENDS = {
    "qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "olmo_hybrid",
}  # fmt: skip
# Attention whose output has a gate, which the matrix of q computes as well.
GATED = {"qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"}


def layer_names(found: Mapping[str, Any]) -> list[str] | None:
    """The kind of each layer by its newer name; None for a model whose layers all attend.

    Args:
        found: a decoder's configuration.
    """
    listed = found.get("layer_types") or found.get("layers_block_type")
    if listed is not None:
        return [NEWER.get(name, name) for name in listed]
    kind, count = found.get("model_type"), found.get("num_hidden_layers")
    if kind == "nemotron_h" and found.get("hybrid_override_pattern"):
        return [NEMOTRON.get(letter, letter) for letter in found["hybrid_override_pattern"]]
    if not isinstance(count, int):
        return None
    layers, attends, other = range(count), "full_attention", "linear_attention"
    if kind in EVERY_NTH_ATTENDS:
        every = found.get("full_attention_interval") or 4
        chosen = {i for i in layers if (i + 1) % every == 0}
    elif kind == "bamba":
        chosen = set(found.get("attn_layer_indices") or ())
    elif kind == "jamba":
        period, offset = found.get("attn_layer_period", 8), found.get("attn_layer_offset", 4)
        chosen = {i for i in layers if i % period == offset}
    elif kind == "granitemoehybrid":
        chosen = set()
    elif kind in ("lfm2", "lfm2_moe"):
        chosen, other = set(found.get("full_attn_idxs") or layers), "conv"
    elif kind in ("falcon_h1", "zaya"):
        chosen, attends = set(layers), "hybrid"
    elif kind == "kimi_linear":
        told = (found.get("linear_attn_config") or {}).get("full_attn_layers")
        chosen = {i - 1 for i in told} if told else {i for i in layers if i and i % 4 == 0}
    elif kind == "mimo_v2_flash":
        chosen = {i for i in layers if i == 0 or (i + 1) % 6 == 0}
        other = "sliding_attention"
    else:
        return None
    return [attends if i in chosen else other for i in layers]


def add_sizes(found: dict[str, Any], kind: str) -> None:
    """Adds sizes that a family derives from others."""
    if kind in ("zamba", "zamba2"):
        heads = found["num_attention_heads"]
        found["head_dim"] = found.get("attention_head_dim") or 2 * found["hidden_size"] // heads
    if kind == "kimi_linear":
        told = found.get("linear_attn_config") or {}
        names = {"head_dim": 128, "num_heads": 32, "short_conv_kernel_size": 4}
        ours = "linear_head_dim", "linear_num_heads", "linear_conv_kernel_dim"
        for name, (theirs, usual) in zip(ours, names.items()):
            found[name] = told.get(theirs) or found.get(name) or usual
    if kind == "hunyuan_v1_moe":
        found["shared_experts"] = 1
    if kind in ("granitemoehybrid", "granitemoeshared", "granitemoe_swa"):
        found["shared_expert_intermediate_size"] = found.get("shared_intermediate_size")
        found["moe_intermediate_size"] = found["intermediate_size"]
    if kind == "nemotron_h":
        found["shared_expert_intermediate_size"] = found.get("moe_shared_expert_intermediate_size")
    if kind in ("lfm2", "lfm2_moe") and found.get("block_auto_adjust_ff_dim"):
        size = int(
            2 * found["intermediate_size"] / 3 * (found.get("block_ffn_dim_multiplier") or 1)
        )
        unit = found.get("block_multiple_of") or 1
        found["intermediate_size"] = -(-size // unit) * unit


def mixer_weights(c: SimpleNamespace) -> tuple[list[int], int]:
    """Elements of the matrices of one layer with a state, and of all else in it."""
    (channels, kernel), wide, heads = _sizes(c)
    h = c.hidden_size
    if c.model_type in ("lfm2", "lfm2_moe"):
        return [3 * h * h, h * h], channels * kernel
    if c.model_type == "zaya":  # beside the matrices of its attention
        return [], channels * (c.head_dim + 2)
    if c.model_type in ("jamba", "zamba"):
        rank = -(-h // 16) if c.mamba_dt_rank == "auto" else c.mamba_dt_rank
        state, parts = 2 * c.mamba_d_state + rank, wide * rank
        return [2 * h * wide, wide * state, parts, wide * h], wide * (kernel + 3 + c.mamba_d_state)
    if c.model_type == "kimi_linear":  # whose gates are of low rank
        low = c.linear_head_dim
        gates = [h * low, low * wide] * 2
        matrices = [h * channels, *gates, h * heads, wide * h]
        return matrices, channels * kernel + wide + heads + low
    gate, rates = wide, heads if _sums_inputs(c) else 2 * heads
    bias = channels + wide if _sums_inputs(c) else 0
    return [h * (channels + gate + rates), wide * h], channels * kernel + bias + 3 * heads


def mixer_bytes(c: SimpleNamespace, width: int, tokens: int) -> int:
    """Bytes at once of a pass through a layer with a state, all that surrounds it included.

    They are those of transformers' own torch code, which is what runs where its kernels are not
    installed. Mamba-2 multiplies matrices from 5.18 on; 5.17 holds each pair of tokens of a chunk
    times every channel of a head. `tests/hf/test_planner.py` measures it.

    Args:
        width: bytes of a number that the model computes with.
        tokens: of the pass.
    """
    (channels, _), wide, heads = _sizes(c)
    if not heads:
        return int(5.2 * width * (channels + wide) * tokens)
    *_, rows, columns = state_tensors(c, "float32")[0][1][0]
    if not _sums_inputs(c):
        return 4 * 7 * heads * 2 * (rows + columns) * tokens
    if c.model_type in ("jamba", "zamba"):
        return int(4 * 3.8 * wide * columns * tokens)
    chunk = getattr(c, "mamba_chunk_size", None) or getattr(c, "chunk_size", None) or 256
    padded = -(-tokens // chunk) * chunk
    if _holds_pairs_by_channel():
        return 4 * padded * (chunk * heads * max(rows, columns) + 12 * (channels + wide))
    return 4 * padded * (heads * (3 * chunk + 5 * columns) + 7 * (channels + wide))


@cache
def _holds_pairs_by_channel() -> bool:
    """Whether the installed transformers is older than 5.18; without one the newest is meant."""
    try:
        major, minor, *_ = version("transformers").split(".")
    except PackageNotFoundError:
        return False
    return (int(major), int(minor)) < (5, 18)


def _sums_inputs(c: SimpleNamespace) -> bool:
    """Whether the layer is a Mamba-2 and no delta rule."""
    return not hasattr(c, "linear_conv_kernel_dim")


def _sizes(c: SimpleNamespace) -> tuple[tuple[int, ...], int, int]:
    """Channels and kernel of the convolution, width of the output, and heads, 0 without sums."""
    (convolved, _), *rest = state_tensors(c, "float32")[0]
    if not rest or c.model_type == "zaya":
        return convolved, convolved[0], 0
    shape = rest[0][0]
    if c.model_type in ("jamba", "zamba"):
        return convolved, convolved[0], 1
    heads = shape[0]
    return convolved, heads * (shape[1] if _sums_inputs(c) else shape[2]), heads
