"""Facts about a model: its decoder's configuration, where it computes, and why it is refused."""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
from transformers import PreTrainedModel

from pagedkv.config import CacheConfig, field_of
from pagedkv.errors import ModelChangedError, UnsupportedModelError
from pagedkv.models import facts_of, layer_kinds
from pagedkv.models.refusals import (
    BOTH_WAYS,
    NO_CACHE,
    of_attention,
    of_latents,
    of_sinks,
    of_states,
)
from pagedkv.ranks import dimensions_of

from .placement import devices_of, why_not_placed
from .release import NAMES
from .shards import on_this_rank
from .signature import parameters_of

# Ways to share out a model among processes by which none of them computes whole rows.
SHARED_OUT = {
    "pp": "its layers are shared out among processes (pp_size), and none of them passes all; "
    "share out heads by tp_size instead",
    "fsdp": "its weights are gathered from processes that compute rows of their own (fsdp_size); "
    "share out heads by tp_size instead",
}
# Objects that hold a model have it under these names: wrappers of torch, pipelines, heads of TRL.
HOLDERS = "module", "model", "pretrained_model"
ATTENTION_KINDS = {"full_attention", "sliding_attention"}


def text_config(model: PreTrainedModel) -> Any:
    """The configuration of a model's decoder."""
    return model.config.get_text_config(decoder=True)


def longest_of(model: PreTrainedModel) -> int:
    """Returns how many tokens of a text a model takes; `sys.maxsize` if it sets no limit."""
    return field_of(text_config(model), "max_position_embeddings") or sys.maxsize


def query_heads(model: PreTrainedModel) -> int | None:
    """Returns how many query heads its layers have; None if layers differ in it."""
    try:
        count: int = field_of(text_config(model), "num_attention_heads")
    except UnsupportedModelError:
        return None
    return count


Kind = tuple[torch.dtype, torch.device]


def kind_of(model: PreTrainedModel) -> Kind:
    """The dtype and device that a model's pages have to share with it."""
    return model.dtype, device_of(model)


def require_same_kind(model: PreTrainedModel, made: Kind, maker: str) -> None:
    """Raises ModelChangedError if the model's dtype or device has changed since pages were made."""
    for name, before, now in zip(("dtype", "device"), made, kind_of(model)):
        if now != before:
            raise ModelChangedError(
                f"model: its {name} has changed from {before} to {now} since these pages were "
                f"made; make a new {maker}"
            )


def device_of(model: PreTrainedModel) -> torch.device:
    """The device on which a model takes its ids."""
    device = model.device  # of the first parameter that is found, anew each time
    return device if device.type != "meta" else next(iter(devices_of(model).values()), device)


def dtype_of(model: PreTrainedModel) -> torch.dtype:
    """The dtype in which a model's K and V reach attention now: autocast makes it another one.

    For latents and states it stays the model's, as some modules escape autocast; it is refused.
    """
    place = device_of(model).type
    if not torch.is_autocast_enabled(place):
        return model.dtype
    config = text_config(model)
    states = any(kind.state is not None for kind in layer_kinds(config))
    latents = field_of(config, "kv_lora_rank")
    return model.dtype if states or latents else torch.get_autocast_dtype(place)


def cache_config(model: PreTrainedModel, max_tokens: int, **fields: Any) -> CacheConfig:
    """Returns the cache that a model needs on this rank, in the dtype it computes in."""
    return on_this_rank(model, _whole_config(model, max_tokens, **fields))


def _whole_config(model: PreTrainedModel, max_tokens: int, **fields: Any) -> CacheConfig:
    """The configuration for all heads, wherever they are computed."""
    dtype = str(dtype_of(model)).removeprefix("torch.")
    return CacheConfig.from_model(
        text_config(model), **{"dtype": dtype, "max_tokens": max_tokens, **fields}
    )


def require_model(given: Any, argument: str = "model") -> None:
    """Raises TypeError for an object that is no model; the error says where in it a model is."""
    if not isinstance(given, PreTrainedModel):
        got = type(given).__name__ + _instead_of(given)
        raise TypeError(f"{argument}: expected a transformers model, got {got}")


def require_head(model: PreTrainedModel, argument: str = "model") -> None:
    """Raises TypeError for a model that has no language model head."""
    if not model.can_generate():
        raise TypeError(
            f"{argument}: expected one that generates, as AutoModelForCausalLM loads it, got "
            f"{type(model).__name__}, which has no language model head"
        )


def _instead_of(given: Any) -> str:
    """Returns advice on what to give instead of something that a model was put into."""
    if isinstance(given, (str, os.PathLike)):
        return f"; load it first: AutoModelForCausalLM.from_pretrained({str(given)!r})"
    if hasattr(given, "_orig_mod"):
        return "; `model.compile()` compiles in place"
    inner = {name: getattr(given, name, None) for name in HOLDERS}
    found = [name for name, one in inner.items() if isinstance(one, torch.nn.Module)]
    if found and "FullyShardedDataParallel" in type(given).__name__:
        return "; its weights are shards: give its `.module` within its `summon_full_params`"
    return f"; give its `.{found[0]}`" if found else ""


def require_supported(model: PreTrainedModel) -> None:
    """Raises `UnsupportedModelError` with the reason, TypeError for an object that is no model."""
    require_model(model)
    instead = "Use transformers' own cache for it."
    try:
        reason = why_never(model)
        if reason is None and (reason := why_unlisted(model)):
            instead = '`unknown="check"` looks at what it keeps, and serves it if that is right.'
        reason = reason or _why_not_here(model)
    except UnsupportedModelError as error:  # a field differs from layer to layer
        reason = str(error)
    if reason:
        raise UnsupportedModelError(
            f"{named_model(model)} cannot use paged attention: {reason}. {instead}"
        )


def named_model(model: PreTrainedModel) -> str:
    """A model's class and type, as errors name it."""
    return f"{type(model).__name__} ({model.config.model_type})"


def why_never(model: PreTrainedModel) -> str | None:
    """Returns why pages cannot serve a model, even if its type is known."""
    config = text_config(model)
    if reason := of_attention(config, model.config):
        return reason
    written = facts_of(config.model_type).written
    decoder = [module for module in model.modules() if getattr(module, "config", None) is config]
    taken = [parameters_of(part) for part in decoder if isinstance(part, PreTrainedModel)]
    if taken and all(names.isdisjoint(NAMES) for names in taken):
        return NO_CACHE
    if not written and not any(
        isinstance(part, PreTrainedModel) and part._can_set_attn_implementation()
        for part in decoder
    ):
        return "its attention does not go through transformers' attention interface"
    # One that knows of no layer has no cache: it attends to something else than tokens.
    of_layers = (part for part in decoder if hasattr(part, "layer_idx"))
    if any(getattr(part, "is_causal", None) is False for part in of_layers):
        return BOTH_WAYS
    if cut := SHARED_OUT.keys() & dimensions_of(model):
        return SHARED_OUT[cut.pop()]
    if device_of(model).type == "meta":
        return "its weights are not there (meta device); `LayerStreamer` brings them layer by layer"
    return None


def why_unlisted(model: PreTrainedModel) -> str | None:
    """Returns why the contents of a model's layers are unknown, by its type and configuration."""
    config = text_config(model)
    if reason := of_latents(config):
        return reason
    try:
        whole = _whole_config(model, max_tokens=1)
    except Exception as error:  # a class of the model's own may read its configuration
        return f"its configuration does not tell the shape of its K and V ({error})"
    kinds = field_of(config, "layer_types") or [None]
    stateful = whole.states or (model._is_stateful and not ATTENTION_KINDS.issuperset(kinds))
    if stateful and (reason := of_states(config)):
        return reason
    parameters = {name.rpartition(".")[2] for name, _ in model.named_parameters()}
    return of_sinks(config) if parameters & {"sinks", "sink"} else None


def _why_not_here(model: PreTrainedModel) -> str | None:
    """Why the pages of a model that is known cannot lie where it computes."""
    if reason := why_not_placed(model):
        return reason
    on_this_rank(model, _whole_config(model, max_tokens=1))
    return None
