"""Finds transformers' modules of experts, and reads the arguments of their calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedModel

from pagedkv.errors import UnsupportedModelError
from pagedkv.models.names import ALIASES
from pagedkv.models.skeleton import experts_in
from pagedkv.planner.experts import can_read_alone, require_slots
from pagedkv.stream.weights import WeightStore


def size_read_alone(model: PreTrainedModel, layers: Iterable[nn.Module], store: WeightStore) -> int:
    """Returns the bytes of an expert's largest tensor; 0 if experts cannot be read alone."""
    names = {module: name for name, module in model.named_modules()}
    sizes = [
        tensor[0].nbytes * store.origins.has_rows(f"{names[module]}.{key}")
        for layer in layers
        for module in experts_in(layer)
        for key, tensor in module.named_parameters(recurse=False)
    ]
    return max(sizes) if sizes and all(sizes) else 0


def index_of_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """Returns the routing of a call `experts(hidden, index, weights)`: `[T, k]` ids."""
    found = kwargs.get("top_k_index", args[1] if len(args) > 1 else None)
    if not isinstance(found, Tensor) or found.is_floating_point():
        raise UnsupportedModelError(
            f"experts: expected an index of tokens' experts as second argument, got "
            f"{type(found).__name__}; expert_slots=0 streams whole layers"
        )
    return found


def renumbered(
    args: tuple[Any, ...], kwargs: dict[str, Any], change: Callable[[Tensor], Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments of a call of experts with a changed index."""
    if "top_k_index" in kwargs:
        return args, kwargs | {"top_k_index": change(kwargs["top_k_index"])}
    return (args[0], change(args[1]), *args[2:]), kwargs


def require_supported(
    slots: Any, modules: Sequence[nn.Module], model: PreTrainedModel, device: Any
) -> None:
    """Raises if a model or this system cannot have so many slots.

    Raises:
        ValueError: it is no count, fewer than a token needs, or more than there are experts.
        UnsupportedModelError: the model has no such experts, or the system no such memory.
    """
    require_slots(slots, 0, slots)  # raises unless it is a count
    if not slots:
        return
    name = type(model).__name__
    if not modules:
        raise UnsupportedModelError(
            f"expert_slots: {name} has no experts that are called with their routing; "
            "expert_slots=0 streams whole layers"
        )
    if not can_read_alone(on_cpu=device.type == "cpu"):
        raise UnsupportedModelError(
            "expert_slots: on a CPU experts are read alone under Linux only; 0 streams whole layers"
        )
    count = min(next(m.parameters()).shape[0] for m in modules)
    config = model.config.get_text_config(decoder=True)
    least = [1]
    for key in (*ALIASES["experts_per_token"], "top_k"):
        value = getattr(config, key, None) or 0
        least += value if isinstance(value, (list, tuple)) else [value]  # a list: one a layer
    require_slots(slots, max(least), count)
