"""Finds the methods of `generate` that a model has from neither transformers nor torch."""

from __future__ import annotations

from functools import partial
from typing import Any

from transformers import PreTrainedModel

from pagedkv.hf.foreign_hooks import KNOWN

# Packed rows do not call these. The first choose tokens; the others make what a forward is given,
# which a comparison of forwards shows.
CHOOSE = "generate", "_sample"
FEED = (
    "_prefill",
    "prepare_inputs_for_generation",
    "_prepare_position_ids_for_generation",
    "_update_model_kwargs_for_generation",
)
WAYS = dict.fromkeys(FEED, '; `unknown="check"` tries whether that makes a difference')


def overridden(model: PreTrainedModel, tried: bool) -> str | None:
    """Names the first such method; None without.

    Args:
        tried: whether the forwards of `generate` and of packed rows are compared.
    """
    names = CHOOSE if tried else (*CHOOSE, *FEED)
    return next((name for name in names if _is_foreign(getattr(model, name, None))), None)


def _is_foreign(method: Any) -> bool:
    """Whether a method was written elsewhere, or is wrapped by code from elsewhere."""
    function = getattr(method, "__func__", method)
    if isinstance(function, partial):  # `hf/mrope.py` makes some of functions of its own
        return not str(function.func.__module__).startswith("pagedkv.")
    homes = [getattr(function, "__module__", None)]
    homes.append(getattr(function, "__globals__", {}).get("__name__"))
    return any(home and home.partition(".")[0] not in KNOWN for home in homes)
