"""Why a model cannot run packed rows: its forward, its angles, or its way to generate.

Code that others have written is tried as well (`tried.py`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

from transformers import GenerationMixin, PreTrainedModel

from pagedkv.config import field_of
from pagedkv.errors import UnsupportedModelError
from pagedkv.hf.foreign_code import KNOWN
from pagedkv.hf.images import SOUNDS
from pagedkv.hf.model import require_head, text_config
from pagedkv.hf.signature import parameters_of
from pagedkv.models import facts_of

CHOOSE = "generate", "_sample"  # these choose tokens; packed rows do not call them


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
    if not facts_of(config.model_type).unplaced and "position_ids" not in parameters_of(model):
        return "its forward takes no position_ids, positions come from the mask"
    if name := next((name for name in CHOOSE if _is_foreign(getattr(model, name, None))), None):
        return (
            f"its own {name}() may choose tokens in another way than transformers', and packed "
            "rows do not call it"
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


def _is_foreign(method: Any) -> bool:
    """Whether a method was written elsewhere, or is wrapped by code from elsewhere."""
    function = getattr(method, "__func__", method)
    if isinstance(function, partial):  # `hf/mrope.py` makes some of functions of its own
        return not str(function.func.__module__).startswith("pagedkv.")
    homes = [getattr(function, "__module__", None)]
    homes.append(getattr(function, "__globals__", {}).get("__name__"))
    return any(home and home.partition(".")[0] not in KNOWN for home in homes)
