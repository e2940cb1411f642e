"""Finds where the layers of a model compute, so that their pages and states lie there as well.

Accelerate's hooks move a module's arguments to its device (`device_map`). Weights that are kept
elsewhere, in host memory or on disk, are brought to that device for the call. `hf_device_map` would
not do: it says where weights are kept, and omits hooks that a caller added by hand.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from pagedkv.config import field_of
from pagedkv.models import facts_of, layer_kinds
from pagedkv.models.kinds import index_layers
from pagedkv.storage import Placement

WAYS_OUT = (
    "`torchrun` shares a model out among cards, `LayerStreamer` runs one of any size through one "
    "device"
)


def devices_of(model: PreTrainedModel) -> dict[str, torch.device]:
    """Returns the devices to which accelerate's hooks move tensors, by the module called there."""
    found: dict[str, torch.device] = {}
    for name, module in model.named_modules():
        hook = getattr(module, "_hf_hook", None)
        for one in getattr(hook, "hooks", (hook,)):
            place = getattr(one, "execution_device", None)
            if place is not None:
                found[name] = _device(place)
    return found


def is_plain(module: nn.Module) -> bool:
    """Whether a module's forward computes as its class's does, if perhaps on moved tensors."""
    own = vars(module)
    if "forward" not in own or getattr(own["forward"], "is_of_class", False):
        return True
    hook: Any = own.get("_hf_hook")
    moving = getattr(own["forward"], "func", None)
    return (
        getattr(moving, "__module__", "") == "accelerate.hooks"
        and getattr(own.get("_old_forward"), "__func__", None) is type(module).forward
        and all(
            type(one).__name__ == "AlignDevicesHook" and not one.offload
            for one in getattr(hook, "hooks", (hook,))
        )
    )


def _device(place: int | str | torch.device) -> torch.device:
    """Returns a device as tensors name it; accelerate may give the number of a card."""
    device = torch.device("cuda", place) if isinstance(place, int) else torch.device(place)
    return torch.empty(0, device=device).device


def placement_of(model: PreTrainedModel, home: torch.device) -> Placement:
    """Returns the device of every layer of a model to which `why_not_placed` does not object.

    Args:
        home: the device on which the model takes its ids.
    """
    kinds, found = layer_kinds(_text(model)), _of_layers(model, home)
    each = [min(found.get(i, {home}), key=str) for i in range(len(kinds))]
    layers = [place for kind, place in zip(kinds, each) if kind.attention is not None]
    of_keys = dict(reversed([(kind.indexer, place) for kind, place in zip(kinds, each)]))
    layers += [of_keys[layer] for layer in index_layers(kinds)]
    states = (place for kind, place in zip(kinds, each) if kind.state is not None)
    return Placement(home, tuple(layers), tuple(states))


def why_not_placed(model: PreTrainedModel) -> str | None:
    """Returns why pages cannot lie where a model computes; None if they can."""
    devices = set(devices_of(model).values())
    if len(devices) < 2:
        return None
    if len({device.type for device in devices}) > 1:
        names = ", ".join(sorted(map(str, devices)))
        return f"it computes on devices of several kinds ({names}); {WAYS_OUT}"
    if facts_of(_text(model).model_type).shares_block:
        return f"its layers share a block, which is on one device; {WAYS_OUT}"
    layers = _of_layers(model, model.device)
    for layer, places in layers.items():
        if len(places) > 1:
            names = ", ".join(sorted(map(str, places)))
            return f"its layer {layer} computes on several devices ({names}); {WAYS_OUT}"
    own, types = len(layer_kinds(_text(model))), field_of(_text(model), "layer_types") or []
    for layer in range(own, len(types)):  # layers that share the K and V of others
        source = max(i for i in range(own) if types[i] == types[layer])
        if layers.get(layer) != layers.get(source):
            return (
                f"layer {layer} attends to the K and V of layer {source}, which is on another "
                f"device; {WAYS_OUT}"
            )
    return None


def _of_layers(model: PreTrainedModel, home: torch.device) -> dict[int, set[torch.device]]:
    """Returns the devices of each layer, from the innermost modules that know a layer's index.

    A block with several layers of K and V (LongCat) has an index, too, but counts otherwise.
    """
    hooked, text = devices_of(model), _text(model)
    found: dict[int, set[torch.device]] = {}
    if len({home, *hooked.values()}) == 1:
        return found
    indices = {
        name: int(index)
        for name, module in model.named_modules()
        if (index := getattr(module, "layer_idx", getattr(module, "layer_id", None))) is not None
        and getattr(module, "config", text) is text
    }
    around = {name[:i] for name in indices for i, sign in enumerate(name) if sign == "."}
    for name in indices.keys() - around:
        found.setdefault(indices[name], set()).add(_nearest(name, hooked, home))
    return found


def _nearest(name: str, hooked: dict[str, torch.device], home: torch.device) -> torch.device:
    """Returns the device of the innermost hooked module among this one and those around it."""
    while name and name not in hooked:
        name = name.rpartition(".")[0]
    return hooked.get(name, home)


def _text(model: PreTrainedModel) -> Any:
    return model.config.get_text_config(decoder=True)
