"""Why a model cannot use pages, as far as its configuration tells; caches and plans ask alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from .facts import facts_of, types_with
from .kinds import KEEPS, field_of, strange_kinds
from .seen import seen_of

ENCODER_DECODER = "encoder-decoder models keep a second cache for cross-attention"
CROSS = "its cross-attention layers keep states of images, not of tokens"
NO_CACHE = "its forward takes no cache"
BOTH_WAYS = "its attention is not causal"
OTHER_STATES = "it keeps a recurrent state beside K and V"


def of_attention(text: Any, whole: Any) -> str | None:
    """Returns why pages cannot serve a decoder's attention; None if they can.

    Args:
        text: the decoder's configuration.
        whole: the configuration of the model that has this decoder.
    """
    if field_of(whole, "is_encoder_decoder"):
        return ENCODER_DECODER
    if field_of(text, "cross_attention_layers"):
        return CROSS
    encodes = facts_of(field_of(text, "model_type")).encoder and not field_of(text, "is_decoder")
    return BOTH_WAYS if encodes or field_of(text, "is_causal") is False else None


# Only a list of types knows these, or trying the model.


def of_latents(text: Any) -> str | None:
    """Returns why the latents of a decoder are not served; None if they are."""
    known = facts_of(field_of(text, "model_type")).latent or seen_of(text)
    if known or not field_of(text, "kv_lora_rank"):
        return None
    return f"its latent attention (MLA) is not one of {', '.join(types_with('latent'))}"


def of_sinks(text: Any) -> str | None:
    """Returns why the sinks of a decoder are not served; None if they are."""
    served = types_with("sinks")
    if field_of(text, "model_type") in served or seen_of(text):
        return None
    return f"attention sinks are served for {', '.join(served)} only"


def of_states(text: Any) -> str | None:
    """Returns why the recurrent states of a decoder are not served; None if they are."""
    known = facts_of(field_of(text, "model_type")).states or seen_of(text)
    return None if known else OTHER_STATES


def of_type(found: Mapping[str, Any], outer: Mapping[str, Any], kinds: Sequence[str]) -> str | None:
    """Returns why a model cannot be served, by its configuration alone.

    A model in memory is checked further when it is attached and called.

    Args:
        kinds: the kind of each layer, if the configuration tells.
    """
    kind, whole = (str(config.get("model_type", "")) for config in (found, outer))
    facts = facts_of(kind)
    states = {name for name in kinds if KEEPS.get(name) in ("state", "both")}
    strange = strange_kinds(kinds, kind) + ([] if facts.states else sorted(states))
    text, model = SimpleNamespace(**found), SimpleNamespace(**{**found, **outer})
    if reason := of_attention(text, model) or of_latents(text):
        return reason
    if _is_bidirectional(found, whole):
        return BOTH_WAYS
    if _differs_in_width(found):
        return "its layers differ in their width"
    if strange:
        return f"layers of kind {', '.join(strange)} keep no pages"
    if kinds and all(KEEPS[name] in ("state", "none") for name in kinds):
        return "none of its layers has K and V"
    if not kinds and (facts.states or facts.layers == "listed"):
        return "its configuration does not list its layers, which differ"
    return facts.refused or facts_of(whole).refused or None


def _is_bidirectional(found: Mapping[str, Any], outer: str) -> bool:
    both_ways = found.get("use_bidirectional_attention")
    if both_ways is None:
        both_ways = facts_of(outer).both_ways
    return both_ways in (True, "all")


def _differs_in_width(found: Mapping[str, Any]) -> bool:
    """Whether layers differ in more than their heads."""
    layers = found.get("per_layer_config") or {}
    each = layers.values() if isinstance(layers, Mapping) else layers
    return any("hidden_size" in layer for layer in each)
