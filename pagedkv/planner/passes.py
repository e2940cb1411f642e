"""Counts the numbers that a token has at once in a pass: behind attention and in state layers."""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version
from types import SimpleNamespace

from pagedkv.models import facts_of, state_tensors


def channels_at_once(c: SimpleNamespace) -> int:
    """Counts the channels that a token has at once behind attention, in the widest layer.

    These are gate, up and product; in experts also the input, the output and the sum.
    """
    at_once, h = facts_of(c.model_type).at_once, c.hidden_size
    # Some Gemma 4 have twice as many in layers that attend to another layer's K and V.
    wide = 1 + bool(getattr(c, "use_double_wide_mlp", False))
    dense = (at_once or 3) * c.intermediate_size * wide
    if not c.experts or getattr(c, "is_moe", None) is False:
        return dense
    size = getattr(c, "moe_intermediate_size", None) or c.intermediate_size
    shared = c.shared_expert_intermediate_size or (c.shared_experts or 0) * size
    expert = max((at_once or 4) * size + h, 4 * h)
    return (c.experts_per_token or 1) * expert + 3 * shared


def mixer_bytes(c: SimpleNamespace, width: int, tokens: int) -> int:
    """Counts the bytes that a pass has at once in a state layer, all that surrounds it included.

    They are the bytes of transformers' own torch code, which runs if its kernels are not installed.
    Its Mamba-2 multiplies matrices from 5.18 on; 5.17 holds a number for each pair of tokens of a
    chunk and each channel of a head. `tests/hf/test_planner.py` measures it.

    Args:
        width: bytes of a number that the model computes with.
        tokens: tokens of the pass.
    """
    form = facts_of(c.model_type).states
    (convolved, _), *sums = state_tensors(c, "float32")[0]
    channels = convolved[0]
    if form in ("short convolution", "convolved attention"):
        return int(5.2 * width * 2 * channels * tokens)
    if form == "four convolutions":
        return tokens * _convolved_bytes(c, width)
    shape = sums[0][0]
    heads, (*_, rows, columns) = shape[0], shape
    if form in ("delta rule", "kimi delta"):
        return 4 * 7 * heads * 2 * (rows + columns) * tokens
    if form == "mamba1":
        return int(4 * 3.8 * channels * columns * tokens)
    chunk = getattr(c, "mamba_chunk_size", None) or getattr(c, "chunk_size", None) or 256
    padded = -(-tokens // chunk) * chunk
    if _holds_pairs_by_channel():
        return 4 * padded * (chunk * heads * max(rows, columns) + 12 * (channels + heads * rows))
    return 4 * padded * (heads * (3 * chunk + 5 * columns) + 7 * (channels + heads * rows))


def _convolved_bytes(c: SimpleNamespace, width: int) -> int:
    """Bytes at once of a token in a layer with four convolutions.

    Where layers attend to sums of earlier ones, in float32, they convolve K and V by weights of
    each token.
    """
    states = state_tensors(c, "float32")
    kv, hidden = max(tensors[0][0][0] for tensors in states), c.hidden_size
    bias, kernel = _bias_bytes(c, width), states[0][0][0][1]
    every = getattr(c, "n_layers_per_attn_res_block", None)
    if not every:
        widest = max(width * channels_at_once(c), bias)
        return max(4 * width * hidden + 20 * max(kv, hidden), 5 * width * hidden + widest)
    blocks = -(-c.num_hidden_layers // every)
    q = c.num_attention_heads * max(shape.head_dim for shape in c.shapes)
    beside = 48 * hidden + 3 * width * q
    of_sums = (47 + (12 + width) * blocks) * hidden
    expert = 24 * c.moe_intermediate_size + 4 * hidden  # softcaps, in float32
    of_experts = (42 + 2 * width * blocks) * hidden + 18 * q + c.experts_per_token * expert
    return max(of_sums, of_experts, beside + max(kv * (14 + 15 * kernel), bias))


def _bias_bytes(c: SimpleNamespace, width: int) -> int:
    """Bytes at once of a token's bias by distance.

    They are those of its distances, and of the bias of each head: as products, gathered and cut, or
    scaled in float32.
    """
    reach: int = max(kind.window or c.rel_extent for kind in c.kinds)
    heads: int = c.num_attention_heads
    return reach * (17 + heads * max(3 * width, width + 8))


@cache
def _holds_pairs_by_channel() -> bool:
    """Whether the installed transformers is older than 5.18; without it, the newest is assumed."""
    try:
        major, minor, *_ = version("transformers").split(".")
    except PackageNotFoundError:
        return False
    return (int(major), int(minor)) < (5, 18)
