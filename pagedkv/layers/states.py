"""The tensors of a layer's recurrent state, by the family of the model.

For each state number of transformers' own cache the convolution's state stands before the recurrent
one. The sums of delta rules and state spaces are kept in float32 whatever the model computes in.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pagedkv.errors import UnsupportedModelError

from .kinds import field_of, layer_kinds

Tensors = tuple[tuple[tuple[int, ...], str], ...]  # shape and dtype of each


def state_tensors(text: Any, dtype: str) -> tuple[Tensors, ...]:
    """The tensors of one sequence's state, for each state layer in the model's order.

    Args:
        text: a decoder's configuration.
        dtype: the model computes in.

    Raises:
        UnsupportedModelError: it is of no family whose states are known.
        ValueError: a size of theirs is missing.
    """
    count = sum(kind.state is not None for kind in layer_kinds(text))
    if not count:
        return ()
    family = str(field_of(text, "model_type"))
    if family not in FAMILIES:
        raise UnsupportedModelError(f"config: the recurrent states of {family} are not known")
    try:
        tensors = FAMILIES[family](text, dtype)
    except (AttributeError, TypeError) as error:  # a size that is absent, or None
        raise ValueError(
            f"config: a size for the states of {family} is missing: {error}"
        ) from error
    return (tensors,) * count


def _delta_rule(c: Any, dtype: str) -> Tensors:
    keys = field_of(c, "linear_num_key_heads") or c.num_attention_heads
    values = field_of(c, "linear_num_value_heads") or c.num_attention_heads
    key_dim = field_of(c, "linear_key_head_dim") or int(0.75 * c.hidden_size / keys)
    value_dim = field_of(c, "linear_value_head_dim") or 2 * key_dim
    channels = 2 * keys * key_dim + values * value_dim
    convolved = (channels, c.linear_conv_kernel_dim), dtype
    return convolved, ((values, key_dim, value_dim), "float32")


def _kimi_delta(c: Any, dtype: str) -> Tensors:
    heads, dim = c.linear_num_heads, c.linear_head_dim
    convolved = (3 * heads * dim, c.linear_conv_kernel_dim), dtype
    return convolved, ((heads, dim, dim), "float32")


def _mamba2(
    heads: str, groups: str, state: str, kernel: str, inner: Callable[[Any], int]
) -> Callable[[Any, str], Tensors]:
    """The tensors of a Mamba-2 layer, where a family names its sizes so."""

    def tensors(c: Any, dtype: str) -> Tensors:
        size, count, width = getattr(c, state), getattr(c, heads), inner(c)
        channels = width + 2 * getattr(c, groups) * size
        convolved = (channels, getattr(c, kernel)), dtype
        return convolved, ((count, width // count, size), "float32")

    return tensors


def _expanded(c: Any) -> int:
    return int(c.mamba_expand * c.hidden_size)


def _mamba1(c: Any, dtype: str) -> Tensors:
    width, heads = _expanded(c), field_of(c, "n_mamba_heads")
    split = (heads, width // heads) if heads else (width,)
    convolved = (width, c.mamba_d_conv), dtype
    return convolved, ((*split, c.mamba_d_state), "float32")


def _short_convolution(c: Any, dtype: str) -> Tensors:
    return (((c.hidden_size, c.conv_L_cache), dtype),)


def _convolved_attention(c: Any, dtype: str) -> Tensors:
    """Q and K that are still convolved, and the half of V that comes one token later."""
    channels = (c.num_attention_heads + c.num_key_value_heads) * c.head_dim
    convolved = (channels, c.cca_time0 + c.cca_time1 - 2), dtype
    return convolved, ((c.num_key_value_heads * c.head_dim // 2,), dtype)


_NAMES = "mamba_n_heads", "mamba_n_groups", "mamba_d_state", "mamba_d_conv"
FAMILIES: dict[str, Callable[[Any, str], Tensors]] = {
    "qwen3_next": _delta_rule,
    "qwen3_5_text": _delta_rule,
    "qwen3_5_moe_text": _delta_rule,
    "olmo_hybrid": _delta_rule,
    "kimi_linear": _kimi_delta,
    "bamba": _mamba2(*_NAMES, _expanded),
    "granitemoehybrid": _mamba2(*_NAMES, _expanded),
    "falcon_h1": _mamba2(*_NAMES, lambda c: field_of(c, "mamba_d_ssm") or _expanded(c)),
    "nemotron_h": _mamba2(
        "mamba_num_heads",
        "n_groups",
        "ssm_state_size",
        "conv_kernel",
        lambda c: c.mamba_num_heads * c.mamba_head_dim,
    ),
    "zamba2": _mamba2("n_mamba_heads", "mamba_ngroups", "mamba_d_state", "mamba_d_conv", _expanded),
    "jamba": _mamba1,
    "zamba": _mamba1,
    "lfm2": _short_convolution,
    "lfm2_moe": _short_convolution,
    "zaya": _convolved_attention,
}
