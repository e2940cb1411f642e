"""Says which of transformers' experts can be read alone, and how many slots they may have."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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


def require_index(index: Any) -> None:
    """Raises UnsupportedModelError unless a call's second argument is `[T, k]` ids of experts."""
    if not isinstance(index, Tensor) or index.is_floating_point():
        raise UnsupportedModelError(
            f"experts: expected an index of tokens' experts as second argument, got "
            f"{type(index).__name__}; expert_slots=0 streams whole layers"
        )


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
