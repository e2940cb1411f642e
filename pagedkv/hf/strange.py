"""Refuses arguments of attention that pages do not know, instead of ignoring them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import Cache

from pagedkv.config import field_of
from pagedkv.errors import UnsupportedModelError
from pagedkv.models.refusals import of_sinks

# Arguments that models pass along, and that do not change the mathematics of attention.
HARMLESS = {
    "cache_position",
    "is_causal",
    "labels",
    "logits_to_keep",
    "num_items_in_batch",
    "output_hidden_states",
    "output_router_logits",
    "position_embeddings",
    "position_ids",
    "return_dict",
    "use_cache",
}


def refuse_strange(dropout: float, kwargs: dict[str, Any]) -> None:
    """Raises if a model passes arguments that would change the mathematics of attention."""
    if dropout:
        raise UnsupportedModelError(f"dropout: expected 0, got {dropout}; call model.eval()")
    if kwargs.get("is_causal") is False:
        raise UnsupportedModelError("is_causal: expected causal attention, got False")
    for name, value in kwargs.items():
        said = value is not None and value is not False and not isinstance(value, Cache)
        if said and name not in HARMLESS:
            raise UnsupportedModelError(f"{name}: paged attention does not know this argument")


def refuse_strange_sinks(module: torch.nn.Module, sinks: Tensor | None) -> None:
    """Raises if a model passes sinks whose meaning in this model was not verified."""
    config = getattr(module, "config", None)
    if sinks is not None and (reason := of_sinks(config)):
        raise UnsupportedModelError(f"s_aux: {reason}, not for {field_of(config, 'model_type')}")
