"""Finds which layers of a decoder have K and V, a recurrent state, both or neither."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

from pagedkv.errors import UnsupportedModelError

from .facts import facts_of
from .layer_names import NEWER
from .seen import seen_of

Keeps = Literal["attention", "state", "both", "none"]

# By the names in transformers' configurations, and by older names that files still have.
KEEPS: dict[str, Keeps] = {
    "full_attention": "attention", "sliding_attention": "attention", "attention": "attention",
    "chunked_attention": "attention", "indexed_attention": "attention",
    "qwen_sparse_attention": "attention", "minimax_m3_sparse": "attention",
    "linear_attention": "state", "conv": "state", "mamba": "state",
    "hybrid": "both", "hybrid_sliding": "both", "moe": "none", "mlp": "none",
}  # fmt: skip
WINDOWED = {"sliding_attention", "hybrid_sliding"}
CHUNKED = "chunked_attention"
# Layers that choose the tokens they read, by an indexer that the facts of their type name.
INDEXED = {"indexed_attention", "qwen_sparse_attention", "minimax_m3_sparse"}


class Sight(NamedTuple):
    """How far a layer's queries see.

    Attributes:
        window: tokens, the query's own included; None for all.
        chunked: the window begins anew at every multiple of it.
    """

    window: int | None = None
    chunked: bool = False

    def __str__(self) -> str:
        if self.window is None:
            return "all tokens"
        return f"chunks of {self.window}" if self.chunked else f"a window of {self.window}"


class LayerKind(NamedTuple):
    """Whether one decoder layer keeps K and V, a state, both or neither.

    Attributes:
        keeps: `attention` (K and V), `state`, `both` or `none`.
        window: tokens that its attention sees; None for all, or without attention.
        attention: its index among the layers with K and V; None if it has none.
        state: its index among the layers with a state; None if it has none.
        chunked: the window begins anew at every multiple of it.
        indexer: the layer of the cache that has the index keys by which its tokens are chosen;
            None if it reads all. Such layers stand behind all with K and V, and may be shared.
        source: the layer of the cache to whose K and V it attends, if it has none of its own.
    """

    keeps: Keeps
    window: int | None = None
    attention: int | None = None
    state: int | None = None
    chunked: bool = False
    indexer: int | None = None
    source: int | None = None


def layer_kinds(text: Any) -> list[LayerKind]:
    """Returns the kind of each decoder layer, in the model's order.

    The last layers of a model may share the K and V of others: they keep nothing, and are left out.

    Args:
        text: a decoder's configuration, with the attributes of transformers' configurations.

    Raises:
        ValueError: a layer is of a kind that keeps no pages.
    """
    if (seen := seen_of(text)) is not None:
        return list(seen.kinds)
    names = _names(text)
    names = names[: len(names) - shared_layers(text)]
    kind = field_of(text, "model_type")
    if strange := strange_kinds(names, kind):
        raise ValueError(f"config: layers of kind {', '.join(strange)} keep no pages")
    found: list[LayerKind] = []
    attentions = states = 0
    sources = field_of(text, "kv_source_layers") or range(len(names))
    choices = field_of(text, "indexer_types") or ["full"] * len(names)
    for field, told in (("kv_source_layers", sources), ("indexer_types", choices)):
        if len(told) < len(names):
            raise ValueError(f"config: expected {field} of {len(names)} layers, got {len(told)}")
    for i, name in enumerate(names):
        if sources[i] != i:
            found.append(LayerKind("none", source=found[sources[i]].attention))
            continue
        keeps = KEEPS[name]
        attends, remembers = keeps in ("attention", "both"), keeps in ("state", "both")
        found.append(
            LayerKind(
                keeps,
                window_of(text, name),
                attentions if attends else None,
                states if remembers else None,
                name == CHUNKED,
            )
        )
        attentions += attends
        states += remembers
    if facts_of(kind).indexer is None:
        return found
    own = [name == "full" for name in choices]
    choosing = INDEXED.intersection(names) or {*names}  # old files give them no name of their own
    last = attentions - 1
    for i, layer in enumerate(found):
        attends = layer.attention is not None or layer.source is not None
        if attends and names[i] in choosing:
            last += own[i]
            found[i] = layer._replace(indexer=last)
    return found


def index_layers(kinds: Iterable[LayerKind]) -> list[int]:
    """Returns the layers of a cache that have index keys, ascending."""
    return sorted({kind.indexer for kind in kinds if kind.indexer is not None})


def strange_kinds(names: Iterable[str], kind: object) -> list[str]:
    """Returns the kinds of layers, sorted, that pages do not serve in a type of model."""
    served = KEEPS.keys() if facts_of(kind).indexer else KEEPS.keys() - INDEXED
    return sorted(set(names) - served)


def window_of(text: Any, name: str) -> int | None:
    """Returns the window of a decoder's layers of a kind; None if they see all tokens."""
    if name == CHUNKED:
        chunk: int | None = field_of(text, "attention_chunk_size")
        return chunk
    names = ("sliding_window", "window_size") if name in WINDOWED else ()
    return next((x for x in (field_of(text, n) for n in names) if x is not None), None)


def _names(text: Any) -> list[str]:
    """The name of each layer's kind."""
    if (names := field_of(text, "layer_types")) is not None:
        return list(names)
    if (names := field_of(text, "attention_layers")) is not None:
        return [NEWER.get(name, name) for name in names]
    window = field_of(text, "sliding_window")
    chunked = field_of(text, "attention_chunk_size") is not None
    kind = "sliding" if window else "chunked" if chunked else "full"
    return [f"{kind}_attention"] * text.num_hidden_layers


def shared_layers(text: Any) -> int:
    """Counts a decoder's last layers that have no K and V and attend to another layer's."""
    return field_of(text, "num_kv_shared_layers") or 0


def attending_again(text: Any) -> int:
    """Counts a decoder's layers that attend to the K and V of another layer."""
    return shared_layers(text) + sum(kind.source is not None for kind in layer_kinds(text))


def field_of(config: Any, name: str) -> Any:
    """Returns a field of a model's configuration, None if it has no such field.

    Raises:
        UnsupportedModelError: its value differs from layer to layer: then transformers'
            configurations raise errors of several kinds when it is read.
    """
    try:
        return getattr(config, name, None)
    except Exception as error:
        raise UnsupportedModelError(f"config: {name} differs from layer to layer") from error
