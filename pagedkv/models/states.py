"""Lists the tensors of a layer's recurrent state, by the form that a type's facts name.

For each number of a state in transformers' own cache, the convolution's part stands before the
recurrent one. Sums of delta rules and state spaces are kept in float32, whatever the model uses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pagedkv.errors import UnsupportedModelError

from .facts import facts_of
from .kinds import field_of, layer_kinds
from .seen import seen_of
from .shapes import layers_of

Tensors = tuple[tuple[tuple[int, ...], str], ...]  # shape and dtype of each


def state_tensors(text: Any, dtype: str) -> tuple[Tensors, ...]:
    """Returns the tensors of one sequence's state, for each state layer in the model's order.

    Args:
        text: a decoder's configuration.
        dtype: the dtype in which the model computes.

    Raises:
        UnsupportedModelError: the states of its family are not known.
        ValueError: a size of the states is missing.
    """
    if (seen := seen_of(text)) is not None:
        return tuple(seen.states)
    kinds = layer_kinds(text)
    if all(kind.state is None for kind in kinds):
        return ()
    family = str(field_of(text, "model_type"))
    form = facts_of(family).states
    if form is None:
        raise UnsupportedModelError(f"config: the recurrent states of {family} are not known")
    try:
        each = [FORMS[form](layer, dtype) for layer in layers_of(text, kinds)]
        grams = field_of(text, "ple_layer_ids") or ()  # counted from 1
        beside = _ngrams(text, dtype) if grams else ()
    except (AttributeError, TypeError) as error:  # a size that is absent, or None
        raise ValueError(
            f"config: a size for the states of {family} is missing: {error}"
        ) from error
    return tuple(
        tensors + beside if i in grams else tensors
        for i, (kind, tensors) in enumerate(zip(kinds, each), 1)
        if kind.state is not None
    )


def _delta_rule(c: Any, dtype: str) -> Tensors:
    keys = field_of(c, "linear_num_key_heads") or c.num_attention_heads
    values = field_of(c, "linear_num_value_heads") or c.num_attention_heads
    key_dim = field_of(c, "linear_key_head_dim") or int(0.75 * c.hidden_size / keys)
    value_dim = field_of(c, "linear_value_head_dim") or 2 * key_dim
    channels = 2 * keys * key_dim + values * value_dim
    convolved = (channels, c.linear_conv_kernel_dim), dtype
    return convolved, ((values, key_dim, value_dim), "float32")


def end_of(text: Any) -> int:
    """Returns the id that ends a text; n-grams at a text's beginning take it for earlier tokens."""
    told = field_of(text, "eos_token_id")
    return int((told[0] if isinstance(told, (list, tuple)) else told) or 0)


def _ngrams(c: Any, dtype: str) -> Tensors:
    """Lists the state of a module that embeds n-grams: its convolution's inputs, and its last ids.

    An id is kept as its distance from the id that ends a text. That one also stands before a text,
    so zeros are the state before the first token. Float32 is exact for ids below 2**24.
    """
    channels, last = c.hc_count * c.hidden_size, (c.ple_conv_kernel_size - 1) * c.ngram_size
    return ((channels, last), dtype), ((c.ngram_size - 1,), "float32")


def _kimi_delta(c: Any, dtype: str) -> Tensors:
    heads, dim = c.linear_num_heads, c.linear_head_dim
    convolved = (3 * heads * dim, c.linear_conv_kernel_dim), dtype
    return convolved, ((heads, dim, dim), "float32")


def _mamba2(c: Any, dtype: str) -> Tensors:
    count = _first(c, "mamba_n_heads", "n_mamba_heads", "mamba_num_heads")
    groups = _first(c, "mamba_n_groups", "mamba_ngroups", "n_groups")
    size = _first(c, "mamba_d_state", "ssm_state_size")
    each = field_of(c, "mamba_head_dim")
    width = field_of(c, "mamba_d_ssm") or (count * each if each else _expanded(c))
    channels = width + 2 * groups * size
    convolved = (channels, _first(c, "mamba_d_conv", "conv_kernel")), dtype
    return convolved, ((count, width // count, size), "float32")


def _first(c: Any, *names: str) -> Any:
    """Returns the first of these fields that a configuration has: families differ in names."""
    return next((value for name in names if (value := field_of(c, name)) is not None), None)


def _expanded(c: Any) -> int:
    return int(c.mamba_expand * c.hidden_size)


def _mamba1(c: Any, dtype: str) -> Tensors:
    width, heads = _expanded(c), field_of(c, "n_mamba_heads")
    split = (heads, width // heads) if heads else (width,)
    convolved = (width, c.mamba_d_conv), dtype
    return convolved, ((*split, c.mamba_d_state), "float32")


def _short_convolution(c: Any, dtype: str) -> Tensors:
    return (((c.hidden_size, c.conv_L_cache), dtype),)


def _four_convolutions(c: Any, dtype: str) -> Tensors:
    """K, V, and what attention and the feed-forward add, which are convolved in float32."""
    kv = c.num_key_value_heads * c.head_dim
    channels = kv, kv, c.hidden_size, c.hidden_size
    return tuple(((width, c.conv_kernel_size), "float32") for width in channels)


def _convolved_attention(c: Any, dtype: str) -> Tensors:
    """Lists Q and K that are still to be convolved, and the half of V that comes a token later."""
    channels = (c.num_attention_heads + c.num_key_value_heads) * c.head_dim
    convolved = (channels, c.cca_time0 + c.cca_time1 - 2), dtype
    return convolved, ((c.num_key_value_heads * c.head_dim // 2,), dtype)


FORMS: dict[str, Callable[[Any, str], Tensors]] = {
    "delta rule": _delta_rule,
    "kimi delta": _kimi_delta,
    "mamba1": _mamba1,
    "mamba2": _mamba2,
    "short convolution": _short_convolution,
    "four convolutions": _four_convolutions,
    "convolved attention": _convolved_attention,
}
