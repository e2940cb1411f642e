"""Models that no list knows: transformers' cache shows what they keep, then pages are tried.

Names of types and fields say nothing here: a forward of a few tokens fills transformers' cache, and
its layers show their parts. A model of known parts is compared over pages (`likeness.py`) before it
is served. Other parts, or other outputs over pages, are refused, and the error names the layer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel, cache_utils

from pagedkv.models import KVShape, LayerKind, shared_layers
from pagedkv.models.kinds import Keeps
from pagedkv.models.seen import Seen, forget, remember, seen_of
from pagedkv.models.states import Tensors
from pagedkv.ranks import ranks_of

from .adapters import without_adapters
from .foreign_code import unmarked
from .likeness import COMMON, Rows, Truth, compared, not_alike
from .model import (
    device_of,
    named_model,
    require_head,
    require_model,
    text_config,
    why_never,
    why_unlisted,
)
from .release import cache_argument
from .telling import warn

# The layers of transformers' cache whose contents are known parts; others keep more.
KNOWN = {
    "DynamicLayer", "DynamicSlidingWindowLayer", "LinearAttentionLayer", "DummyLayer",
    "LinearAttentionAndFullAttentionLayer", "LinearAttentionAndSlidingWindowAttentionLayer",
}  # fmt: skip
# By whether a layer has K and V, and whether it has a state.
_KEEPS: dict[tuple[bool, bool], Keeps] = {
    (True, True): "both", (True, False): "attention", (False, True): "state",
    (False, False): "none",
}  # fmt: skip
TOKENS = 8
PAGES: dict[str, Any] = {"max_tokens": 512, "max_sequences": 16, "fingerprint": b"tried"}


def admit(model: Any, unknown: str | None, over: Any) -> None:
    """Tries a model that no list knows, if this is asked for, and warns that it did.

    Args:
        over: `PagedCache`, whose own constructor calls this.

    Raises:
        UnsupportedModelError: pages cannot serve it, or it gives something else over them.
        ValueError: `unknown` is neither None nor "check".
    """
    if unknown not in (None, "check"):
        raise ValueError(f"unknown: expected None or 'check', got {unknown!r}")
    if unknown is not None and (said := look_at(without_adapters(model), over)):
        warn(f"model: {said}")


@torch.no_grad()
def look_at(model: PreTrainedModel, over: Any) -> str | None:
    """Tries an unlisted model over pages; returns a line about it, None if there was no need to.

    Raises:
        UnsupportedModelError: pages cannot serve it, or it gives something else over them.
    """
    require_model(model)
    text = text_config(model)
    seen, dtype = seen_of(text), str(model.dtype).removeprefix("torch.")
    if (seen is not None and seen.dtype == dtype) or why_never(model):
        return None
    own = type(model).__module__.startswith("transformers.models.")
    if own and seen is None and why_unlisted(model) is None:  # a list knows it
        return None
    require_head(model)
    if ranks_of(model).size > 1:
        raise not_alike(model, "it can only be tried in one process")
    forget(text)
    remember(text, found := _seen(model, dtype))
    try:
        with unmarked(model):
            truth = compared(model, partial(_compare, over))
    except BaseException:
        forget(text)
        raise
    return (
        f"no list knows {named_model(model)}. Held against transformers' own cache (prompts, "
        f"steps, padding, forks) it differs by {truth.far:.1e} at most, and is served: "
        f"{_said(found)}"
    )


def _seen(model: PreTrainedModel, dtype: str) -> Seen:
    """Reads what each layer keeps from a cache that the model fills."""
    text, ids = text_config(model), Truth(model).texts[0][None, :TOKENS].to(device_of(model))
    try:
        own = DynamicCache(config=text)
        model(input_ids=ids, use_cache=True, **{cache_argument(model): own})
    except Exception as error:  # of any kind: it may want another cache, or images
        raise not_alike(model, f"it does not fill one ({type(error).__name__}: {error})") from error
    latents = {
        module.layer_idx
        for module in model.modules()
        if hasattr(module, "expand_kv") and hasattr(module, "layer_idx")
    }
    found = Seen([], [], [], dtype)
    layers = list(own.layers)
    for _ in range(shared_layers(text)):  # some releases have a layer of the cache for them
        if type(layers[-1]).__name__ == "DummyLayer":
            layers.pop()
    for i, layer in enumerate(layers):
        if (kind := type(layer)).__name__ not in KNOWN or kind.__module__ != cache_utils.__name__:
            raise not_alike(model, f"layer {i} keeps what no pages do ({kind.__name__})")
        k, state = getattr(layer, "keys", None), _state_of(layer)
        if k is None and isinstance(layer, cache_utils.DynamicLayer):
            raise not_alike(
                model,
                f"layer {i} keeps 0 of {TOKENS} tokens: it attends to what another layer keeps, "
                "or keeps it elsewhere",
            )
        if state is None:
            raise not_alike(
                model, f"layer {i} keeps a recurrent state without that of a convolution"
            )
        keeps = _KEEPS[k is not None, bool(state)]
        at = None if k is None else len(found.shapes), len(found.states) if state else None
        window = None if k is None else getattr(layer, "sliding_window", None)
        found.kinds.append(LayerKind(keeps, window, *at))
        found.shapes += [] if k is None else [_shape(k, layer.values, i in latents)]
        found.states += [state] if state else []
    if not found.shapes:
        raise not_alike(model, "none of its layers keeps K and V")
    return found


def _shape(k: Tensor, v: Tensor, latent: bool) -> KVShape:
    """Returns the shape of K and V `[B, G, n, D]`, or of latents and rotated keys joined."""
    (heads, dim), width = k.shape[1::2], v.shape[3]
    return KVShape(heads, dim + width, dim, True) if latent else KVShape(heads, dim, width)


def _state_of(layer: Any) -> Tensors | None:
    """Returns shapes and dtypes of a layer's state; None if it has no convolution's part."""
    found = []
    for i, conv in getattr(layer, "conv_states", {}).items():
        both = [x for x in (conv, layer.recurrent_states[i]) if x is not None]
        if both and conv is None:
            return None
        found += [(tuple(x.shape[1:]), str(x.dtype).removeprefix("torch.")) for x in both]
    return tuple(found)


def _compare(over: Any, truth: Truth) -> None:
    """Compares rows alone, forks and padded rows in pages with transformers' cache."""

    def new() -> Any:
        return over(truth.model, **PAGES)

    def forked() -> Any:
        with over.prefill(truth.model, truth.texts[0][:COMMON], **PAGES) as prefix:
            return prefix.fork(2)

    def give(cache_of: Callable[[], Any], rows: Sequence[int]) -> Rows:
        with cache_of() as cache:
            return truth.given(rows, cache)

    for way, cache_of, rows, expected in (
        ("rows alone in pages", new, range(1), "alone"),
        ("forks in pages", forked, range(2), "alone"),
        ("padded rows in pages", new, range(3), "padded"),
    ):
        truth.require_like(way, partial(give, cache_of, rows), getattr(truth, expected))


def _said(seen: Seen) -> str:
    """Describes what the layers of a model keep."""
    counts: Counter[str] = Counter()
    for kind in seen.kinds:
        parts = [] if kind.attention is None else [f"K and V of {seen.shapes[kind.attention]}"]
        parts += [] if kind.window is None else [f"a window of {kind.window}"]
        if kind.state is not None:
            shapes = " and ".join(" x ".join(map(str, x)) for x, _ in seen.states[kind.state])
            parts.append(f"states {shapes}")
        counts[", ".join(parts) or "nothing"] += 1
    return "; ".join(f"{n} layer{'s' * (n > 1)} with {what}" for what, n in counts.items())
