"""Why a model cannot run packed rows: its forward, its positions, or its way to generate."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from transformers import GenerationMixin, PreTrainedModel

from pagedkv.config import field_of
from pagedkv.errors import UnsupportedModelError
from pagedkv.hf.foreign_hooks import KNOWN
from pagedkv.hf.images import SOUNDS
from pagedkv.hf.model import device_of, require_head, text_config
from pagedkv.hf.signature import (
    is_transformers_own,
    parameters_of,
    positions_matter,
    takes_positions,
)
from pagedkv.models import facts_of
from pagedkv.models.seen import seen_of

# Packed rows do not call these. The first choose tokens; the others make what a forward is given,
# which a comparison of forwards shows.
CHOOSE = "generate", "_sample"
FEED = (
    "_prefill",
    "prepare_inputs_for_generation",
    "_prepare_position_ids_for_generation",
    "_update_model_kwargs_for_generation",
)
TRY = '`unknown="check"` tries whether that makes a difference'


def require_packable(model: PreTrainedModel) -> set[str]:
    """Returns the names of the forward's parameters; raises if it cannot run packed rows."""
    require_head(model)
    if reason := _why_not_packed(model):
        raise UnsupportedModelError(
            f"{type(model).__name__} ({model.config.model_type}) cannot run packed rows: {reason}. "
            "`PagedCache` with `generate` works."
        )
    return parameters_of(model)


def _why_not_packed(model: PreTrainedModel) -> str | None:
    config = text_config(model)
    if facts_of(config.model_type).stepwise:
        return (
            "its recurrent layers (Mamba-1) lose their state before several tokens at once, so "
            "its prompts cannot be cut into steps"
        )
    tried = seen_of(config) is not None  # then packed rows are compared with rows alone
    unplaced, device = facts_of(config.model_type).unplaced, device_of(model)
    if not unplaced and not takes_positions(model, device):
        named = "position_ids" in parameters_of(model)
        what = "hands no position_ids on to its decoder" if named else "takes no position_ids"
        return f"its forward {what}, positions come from the mask"
    known = tried or unplaced or is_transformers_own(model)
    if not known and not positions_matter(model, device):
        return (
            "its forward computes the same whatever position_ids it is given, so it may count "
            f"positions itself; {TRY}"
        )
    if name := _overridden(model, tried):
        return (
            f"its own {name}() may choose or feed tokens in another way than transformers', and "
            "packed rows do not call it" + (f"; {TRY}" if name in FEED else "")
        )
    own = type(model).generate is not GenerationMixin.generate
    if own and SOUNDS in parameters_of(model) and getattr(model, "_hf_peft_config_loaded", False):
        return "its generate switches adapters on for audio and off for text, and rows share a step"
    if "longrope" in {str(value) for value in _leaves(field_of(config, "rope_parameters") or {})}:
        return "its rotary embedding (longrope) depends on the longest row of the batch"
    return None


def _leaves(tree: Any) -> Iterator[Any]:
    """Yields values of nested dictionaries: some models have rotary parameters by layer kind."""
    for value in tree.values() if isinstance(tree, Mapping) else (tree,):
        yield from _leaves(value) if isinstance(value, Mapping) else (value,)


def _overridden(model: PreTrainedModel, tried: bool) -> str | None:
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
