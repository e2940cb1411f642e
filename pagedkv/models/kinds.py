"""Finds which layers of a decoder have K and V, a recurrent state, both or neither."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

from pagedkv.errors import UnsupportedModelError

from .facts import facts_of
from .layer_names import NEWER
from .seen import seen_of

Keeps = Literal["attention", "state", "both", "none"]

# By the names of transformers' configurations, and by older ones that files still have.
KEEPS: dict[str, Keeps] = {
    "full_attention": "attention", "sliding_attention": "attention", "attention": "attention",
    "chunked_attention": "attention", "indexed_attention": "attention",
    "qwen_sparse_attention": "attention", "minimax_m3_sparse": "attention",
    "linear_attention": "state", "conv": "state", "mamba": "state",
    "hybrid": "both", "hybrid_sliding": "both", "moe": "none", "mlp": "none",
}  # fmt: skip
WINDOWED = {"sliding_attention", "hybrid_sliding"}
CHUNKED = "chunked_attention"
# Of layers that choose the tokens they read, by an indexer that the facts of their type name.
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
        indexer: the layer of the cache that has the index keys by which its tokens are chosen,
            behind all with K and V; None if it reads all. Layers may share one.
        source: the layer of the cache to whose K and V it attends, where it has none of its own.
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
        ValueError: a layer is of another kind.
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
    own = [name == "full" for name in field_of(text, "indexer_types") or ["full"] * len(found)]
    choosing = INDEXED.intersection(names) or {*names}  # old files call them as all others
    last = attentions - 1
    for i, layer in enumerate(found):
        attends = layer.attention is not None or layer.source is not None
        if attends and names[i] in choosing:
            last += own[i]
            found[i] = layer._replace(indexer=last)
    return found


def index_layers(kinds: Iterable[LayerKind]) -> list[int]:
    """The layers of a cache that have index keys, ascending."""
    return sorted({kind.indexer for kind in kinds if kind.indexer is not None})


def strange_kinds(names: Iterable[str], kind: object) -> list[str]:
    """Returns which of these kinds of layers keep what no pages do in a type of model, sorted."""
    served = KEEPS.keys() if facts_of(kind).indexer else KEEPS.keys() - INDEXED
    return sorted(set(names) - served)


def window_of(text: Any, name: str) -> int | None:
    """The window of a decoder's layers of a kind; None where they see all."""
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
    """How many of a decoder's last layers have no K and V but those of another layer."""
    return field_of(text, "num_kv_shared_layers") or 0


def attending_again(text: Any) -> int:
    """How many of a decoder's layers attend to the K and V of another layer."""
    return shared_layers(text) + sum(kind.source is not None for kind in layer_kinds(text))


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
