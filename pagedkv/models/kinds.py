"""What layers of a decoder keep: K and V of which shape, a recurrent state, both or neither."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple

from pagedkv.errors import UnsupportedModelError

from .facts import facts_of, types_with

Keeps = Literal["attention", "state", "both", "none"]

# By the names of transformers' configurations, and by older ones that files still have.
KEEPS: dict[str, Keeps] = {
    "full_attention": "attention", "sliding_attention": "attention", "attention": "attention",
    "linear_attention": "state", "conv": "state", "mamba": "state",
    "hybrid": "both", "hybrid_sliding": "both", "moe": "none", "mlp": "none",
}  # fmt: skip
WINDOWED = {"sliding_attention", "hybrid_sliding"}


class LayerKind(NamedTuple):
    """What one decoder layer keeps.

    Attributes:
        keeps: `attention` (K and V), `state`, `both` or `none`.
        window: tokens that its attention sees; None for all, or without attention.
        attention: its index among the layers with K and V; None if it has none.
        state: its index among the layers with a state; None if it has none.
    """

    keeps: Keeps
    window: int | None = None
    attention: int | None = None
    state: int | None = None


def layer_kinds(text: Any) -> list[LayerKind]:
    """What each decoder layer keeps, in the model's order.

    The last layers of a model may share the K and V of others: they keep nothing, and are left out.

    Args:
        text: a decoder's configuration, with the attributes of transformers' configurations.

    Raises:
        ValueError: a layer is of another kind.
    """
    names = _names(text)
    names = names[: len(names) - shared_layers(text)]
    strange = sorted(set(names) - set(KEEPS))
    if strange:
        raise ValueError(f"config: layers of kind {', '.join(strange)} keep no pages")
    window = field_of(text, "sliding_window")
    found: list[LayerKind] = []
    attentions = states = 0
    for name in names:
        keeps = KEEPS[name]
        attends, remembers = keeps in ("attention", "both"), keeps in ("state", "both")
        found.append(
            LayerKind(
                keeps,
                window if name in WINDOWED else None,
                attentions if attends else None,
                states if remembers else None,
            )
        )
        attentions += attends
        states += remembers
    return found


def _names(text: Any) -> list[str]:
    """The name of each layer's kind."""
    names = field_of(text, "layer_types")
    if names is not None:
        return list(names)
    window = field_of(text, "sliding_window")
    chunked = field_of(text, "attention_chunk_size") is not None
    kind = "sliding" if window else "chunked" if chunked else "full"
    return [f"{kind}_attention"] * text.num_hidden_layers


def shared_layers(text: Any) -> int:
    """How many of a decoder's last layers have no K and V but those of another layer."""
    return field_of(text, "num_kv_shared_layers") or 0


def field_of(config: Any, name: str) -> Any:
    """A field of a model's configuration, None where it has no such field.

    Raises:
        UnsupportedModelError: its value differs from layer to layer: reading it from such a
            configuration of transformers raises errors of several kinds.
    """
    try:
        return getattr(config, name, None)
    except Exception as error:
        raise UnsupportedModelError(f"config: {name} differs from layer to layer") from error


class KVShape(NamedTuple):
    """What a layer keeps of one token.

    Attributes:
        num_kv_heads: KV heads (G).
        head_dim: elements of K per head.
        v_head_dim: elements of V per head.
        v_is_k: V is the first `v_head_dim` elements of K and is not kept a second time.
    """

    num_kv_heads: int
    head_dim: int
    v_head_dim: int
    v_is_k: bool = False

    @property
    def elements(self) -> int:
        """Elements that are kept of one token."""
        return self.num_kv_heads * (self.head_dim + (0 if self.v_is_k else self.v_head_dim))

    def __str__(self) -> str:
        k = f"{self.num_kv_heads} x {self.head_dim}"
        if self.v_is_k:
            return f"{k}, of which V is {self.v_head_dim}"
        return k if self.v_head_dim == self.head_dim else f"K {k}, V {self.v_head_dim}"


def kv_shapes(text: Any, kinds: Sequence[LayerKind]) -> list[KVShape]:
    """The shape of K and V in each layer that has them.

    Args:
        text: a decoder's configuration, with the attributes of transformers' configurations.
        kinds: of its layers, as `layer_kinds` found them.

    Raises:
        UnsupportedModelError: latents in a form that pages do not keep.
    """
    if rank := field_of(text, "kv_lora_rank"):
        if not facts_of(field_of(text, "model_type")).latent:
            raise UnsupportedModelError(
                "config: latent attention (MLA) is served for "
                f"{', '.join(types_with('latent'))}, not for {field_of(text, 'model_type')}"
            )
        latent = KVShape(1, rank + field_of(text, "qk_rope_head_dim"), rank, v_is_k=True)
        return [latent for kind in kinds if kind.attention is not None]
    layers = _layers(text, len(kinds))
    return [_shape(layers[i], kind) for i, kind in enumerate(kinds) if kind.attention is not None]


def require_shape(text: Any) -> None:
    """Raises ValueError where a configuration does not say what a cache is made of."""
    names = {
        "num_hidden_layers": ("num_hidden_layers",),
        "num_attention_heads": ("num_attention_heads",),
        "head_dim (or hidden_size)": ("head_dim", "hidden_size"),
    }
    # Heads and dims may be said of each layer apart.
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
    dim = field_of(layer, "head_dim") or field_of(layer, "hidden_size") // query_heads
    if kind.window is not None and facts_of(field_of(layer, "model_type")).twice_in_windows:
        heads *= 2
    # Of mimo_v2_flash; others say head_dim by it, or nothing.
    return KVShape(heads, dim, field_of(layer, "v_head_dim") or dim)


def _layers(text: Any, count: int) -> Sequence[Any]:
    """The configuration of each layer, where what it says of one holds for that one alone."""
    each = field_of(text, "per_layer_config")
    if each is None:
        return [text] * count
    if not isinstance(each, Mapping):  # of transformers
        return list(each)[:count]
    mine = {int(layer): fields for layer, fields in each.items()}  # a file says "05"
    return [SimpleNamespace(**{**vars(text), **mine.get(i, {})}) for i in range(count)]
