"""Models whose layers are spread over devices, by accelerate's own hooks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from accelerate import dispatch_model
from transformers import PreTrainedModel

LAST = {"norm", "ln_f", "final_layernorm", "norm_f", "embedding_norm", "final_norm"}


def spread(
    model: PreTrainedModel, places: Sequence[torch.device], behind: torch.device | None = None
) -> PreTrainedModel:
    """The model, each decoder layer on its device, what is behind them with the last.

    As `from_pretrained(device_map=...)` does it; what is tied stays with the first.

    Args:
        behind: where what is behind the layers goes instead.
    """
    names = [name for name, _ in model.named_modules() if name.endswith(("layers", ".h"))]
    layers = min(names, key=len)
    base = layers.rpartition(".")[0]
    first, last = str(places[0]), str(behind or places[-1])
    mapped = {f"{layers}.{i}": str(place) for i, place in enumerate(places)}
    inner = model.get_submodule(base)
    for name, parameter in inner.named_parameters(recurse=False):
        mapped[f"{base}.{name}"] = first
        parameter.data = parameter.data.to(first)  # there is no hook of it
    for name, _ in inner.named_children():
        if f"{base}.{name}" != layers:
            mapped[f"{base}.{name}"] = last if name in LAST else first
    tied = getattr(model.config.get_text_config(), "tie_word_embeddings", False)
    mapped |= {name: first if tied else last for name, _ in model.named_children() if name != base}
    kept = model._skip_keys_device_placement
    return dispatch_model(model, mapped, main_device=first, skip_keys=kept, force_hooks=True)
