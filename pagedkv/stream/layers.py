"""Finding the layers of any decoder."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from pagedkv.errors import LayersNotFound


def find_layers(
    model: PreTrainedModel, layers_path: str | None = None
) -> tuple[str, nn.ModuleList]:
    """The list of a model's decoder layers, and its name in the model.

    It is the only list of checkpointing layers that is as long as the configuration says; else the
    one that the model's pipeline plan names; else the only list of that length.

    Args:
        layers_path: its name, for a model in which it cannot be told.

    Raises:
        LayersNotFound: there is none, or there are several.
    """
    lists = {n: m for n, m in model.named_modules() if isinstance(m, nn.ModuleList) and len(m)}
    if layers_path is not None:
        if layers_path not in lists:
            raise LayersNotFound(
                f"layers_path: expected a list of modules in {type(model).__name__}, got "
                f"{layers_path!r}; lists are {', '.join(lists) or 'none'}"
            )
        return layers_path, lists[layers_path]
    config = model.config.get_text_config(decoder=True)
    count = getattr(config, "num_hidden_layers", None)
    found = [
        name
        for name, modules in lists.items()
        if len(modules) == count and all(isinstance(m, GradientCheckpointingLayer) for m in modules)
    ]
    if len(found) != 1:
        found = [name for name in found or lists if name in _planned(model)] or found
    if not found:  # older code, whose layers are plain modules
        found = [name for name, modules in lists.items() if len(modules) == count]
    if len(found) != 1:
        what = f"several: {', '.join(found)}" if found else f"none of {', '.join(lists) or 'no'}"
        raise LayersNotFound(
            f"{type(model).__name__}: expected one list of {count} layers, got {what}; name it "
            "with layers_path="
        )
    return found[0], lists[found[0]]


def _planned(model: PreTrainedModel) -> set[str]:
    """Lists that pipeline plans inside the model name."""
    names = set()
    for prefix, module in model.named_modules():
        if isinstance(module, PreTrainedModel):
            plan = getattr(module.config, "base_model_pp_plan", None) or {}
            names |= {f"{prefix}.{part}".removeprefix(".") for part in plan}
    return names
