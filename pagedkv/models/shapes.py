"""Reads the shapes of one token's K and V in each layer from a decoder's configuration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

from pagedkv.errors import UnsupportedModelError

from .facts import facts_of, types_with
from .kinds import LayerKind, field_of, index_layers
from .seen import seen_of

OF_WINDOWS = "num_attention_heads", "num_key_value_heads", "head_dim"


class KVShape(NamedTuple):
    """The shape of one token's K and V in a layer.

    Attributes:
        num_kv_heads: KV heads (G).
        head_dim: elements of K per head.
        v_head_dim: elements of V per head.
        v_is_k: V is the first `v_head_dim` elements of K, and is not kept separately.
    """

    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    v_is_k: bool = False

    @property
    def elements(self) -> int:
        """The number of elements that are kept of one token."""
        return self.num_kv_heads * (self.head_dim + (0 if self.v_is_k else self.v_head_dim))

    def __str__(self) -> str:
        k = f"{self.num_kv_heads} x {self.head_dim}"
        if self.v_is_k:
            return f"{k}, of which V is {self.v_head_dim}"
        return k if self.v_head_dim == self.head_dim else f"K {k}, V {self.v_head_dim}"


def kv_shapes(text: Any, kinds: Sequence[LayerKind]) -> list[KVShape]:
    """Returns the shape of K and V of each layer that has them, then the shapes of index keys.

    Args:
        text: a decoder's configuration, with the attributes of transformers' configurations.
        kinds: the kinds of its layers, as `layer_kinds` found them.

    Raises:
        UnsupportedModelError: latents in a form that pages do not keep.
    """
    if (seen := seen_of(text)) is not None:
        return list(seen.shapes)
    index = [_index_shape(text) for _ in index_layers(kinds)]
    layers = layers_of(text, kinds)
    ranks = [field_of(layer, "kv_lora_rank") for layer in layers]
    if any(ranks):
        if not facts_of(field_of(text, "model_type")).latent:
            raise UnsupportedModelError(
                "config: latent attention (MLA) is served for "
                f"{', '.join(types_with('latent'))}, not for {field_of(text, 'model_type')}"
            )
        if not all(ranks):
            raise ValueError(f"config: expected kv_lora_rank of every layer, got {ranks}")
        rotates = field_of(text, "no_rope_layers") or [True] * len(kinds)  # 0: a layer does not
        rotated = [field_of(x, "qk_rope_head_dim") * bool(r) for x, r in zip(layers, rotates)]
        return [
            KVShape(1, rank + more, rank, v_is_k=True)
            for rank, more, kind in zip(ranks, rotated, kinds)
            if kind.attention is not None
        ] + index
    own = [_shape(layers[i], kind) for i, kind in enumerate(kinds) if kind.attention is not None]
    return own + index


def require_shape(text: Any) -> None:
    """Raises ValueError if a configuration lacks a size from which a cache is made."""
    if seen_of(text) is not None:
        return
    names = {
        "num_hidden_layers": ("num_hidden_layers",),
        "num_attention_heads": ("num_attention_heads",),
        "head_dim (or hidden_size)": ("head_dim", "hidden_size"),
    }
    # Heads and dims may be said for each layer separately.
    count = field_of(text, "num_hidden_layers")
    first = _layers(text, count)[0] if count else text
    missing = [
        name
        for name, told in names.items()
        if all(field_of(first, attribute) is None for attribute in told)
    ]
    if missing:
        raise ValueError(
            f"config: {type(text).__name__} has no {', '.join(missing)}; say what it is: "
            "CacheConfig(num_layers=..., num_kv_heads=..., head_dim=..., dtype=..., max_tokens=...)"
        )


def _shape(layer: Any, kind: LayerKind) -> KVShape:
    query_heads = field_of(layer, "num_attention_heads")
    heads = field_of(layer, "num_key_value_heads") or query_heads
    wide = field_of(layer, "new_decoder_architecture")  # falcon: a cache gets all heads
    if wide is not None:
        heads = 1 if field_of(layer, "multi_query") and not wide else query_heads
    dim = field_of(layer, "head_dim") or field_of(layer, "hidden_size") // query_heads
    if kind.window is not None and facts_of(field_of(layer, "model_type")).twice_in_windows:
        heads *= 2
    # Only mimo_v2_flash means another width by it; other types say head_dim by it, or nothing.
    return KVShape(heads, dim, field_of(layer, "v_head_dim") or dim)


def _index_shape(text: Any) -> KVShape:
    """Returns the shape of a token's index key; blocks add its rotation, pools its gate."""
    width = field_of(text, "indexer_head_dim") or field_of(text, "index_head_dim")
    form = facts_of(field_of(text, "model_type")).indexer
    if width is None:
        raise ValueError("config: expected index_head_dim, the width of its index keys, got None")
    heads = field_of(text, "index_n_heads")
    if form == "blocks by head" and heads != text.num_key_value_heads:
        raise UnsupportedModelError(
            f"config: expected {text.num_key_value_heads} index_n_heads, as many as KV heads, "
            f"since each of these chooses its tokens, got {heads}"
        )
    if form == "pools":
        width *= 2
    if form == "blocks":
        told = field_of(text, "rope_parameters") or {}
        dim = field_of(text, "head_dim") or text.hidden_size // text.num_attention_heads
        width += int(dim * told.get("partial_rotary_factor", 1.0))
    return KVShape(1, width, width, v_is_k=True)


def layers_of(text: Any, kinds: Sequence[LayerKind]) -> list[Any]:
    """The configuration of each layer, with what is said of layers with a window alone."""
    return [_within(layer, kind) for layer, kind in zip(_layers(text, len(kinds)), kinds)]


def _within(layer: Any, kind: LayerKind) -> Any:
    """A layer's configuration, in which `swa_` fields stand for those of layers with a window."""
    if kind.window is None or facts_of(field_of(layer, "model_type")).twice_in_windows:
        return layer
    told = {name: field_of(layer, f"swa_{name}") for name in OF_WINDOWS}
    own = {name: value for name, value in told.items() if value is not None}
    return SimpleNamespace(**{**vars(layer), **own}) if own else layer


def _layers(text: Any, count: int) -> Sequence[Any]:
    """Returns a configuration for each layer, with the fields that hold for that layer alone."""
    each = field_of(text, "per_layer_config")
    if each is None:
        return [text] * count
    if not isinstance(each, Mapping):  # a list made by transformers
        return list(each)[:count]
    mine = {int(layer): fields for layer, fields in each.items()}  # a file may say "05"
    return [SimpleNamespace(**{**vars(text), **mine.get(i, {})}) for i in range(count)]
