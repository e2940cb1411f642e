"""Layers with a recurrent state: what they weigh, and what a pass through them takes."""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version
from types import SimpleNamespace

from pagedkv.models import facts_of, state_tensors


def mixer_weights(c: SimpleNamespace) -> tuple[list[int], int]:
    """Elements of the matrices of one layer with a state, and of all else in it."""
    (channels, kernel), wide, heads = _sizes(c)
    h = c.hidden_size
    if _form(c) == "short convolution":
        return [3 * h * h, h * h], channels * kernel
    if _form(c) == "convolved attention":  # beside the matrices of its attention
        return [], channels * (c.head_dim + 2)
    if _form(c) == "mamba1":
        rank = -(-h // 16) if c.mamba_dt_rank == "auto" else c.mamba_dt_rank
        state, parts = 2 * c.mamba_d_state + rank, wide * rank
        return [2 * h * wide, wide * state, parts, wide * h], wide * (kernel + 3 + c.mamba_d_state)
    if _form(c) == "kimi delta":  # whose gates are of low rank
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
    if _form(c) == "mamba1":
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


def _form(c: SimpleNamespace) -> str | None:
    return facts_of(c.model_type).states


def _sums_inputs(c: SimpleNamespace) -> bool:
    """Whether the layer is a Mamba-2 and no delta rule."""
    return not hasattr(c, "linear_conv_kernel_dim")


def _sizes(c: SimpleNamespace) -> tuple[tuple[int, ...], int, int]:
    """Channels and kernel of the convolution, width of the output, and heads, 0 without sums."""
    (convolved, _), *rest = state_tensors(c, "float32")[0]
    if not rest or _form(c) == "convolved attention":
        return convolved, convolved[0], 0
    shape = rest[0][0]
    if _form(c) == "mamba1":
        return convolved, convolved[0], 1
    heads = shape[0]
    return convolved, heads * (shape[1] if _sums_inputs(c) else shape[2]), heads
