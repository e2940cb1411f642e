"""Where a model holds its tensors, which of them belong to which layer, and where it says it is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

GLUE = -1  # what is in no layer, or in several


@dataclass(frozen=True, eq=False)
class Spot:
    """A parameter or buffer of a module.

    Attributes:
        where, key: the module's dictionary that holds it, and as what.
        name: of the tensor in the model.
        empty: the tensor that stood there first; what a streamed layer has between passes.
    """

    owner: nn.Module
    where: dict[str, Any]
    key: str
    name: str
    parameter: bool
    empty: Tensor

    @property
    def tensor(self) -> Tensor:
        """What stands there now."""
        return self.where[self.key]

    def set(self, tensor: Tensor) -> None:
        """Puts a tensor there."""
        self.where[self.key] = tensor

    def like(self, tensor: Tensor) -> Tensor:
        """A tensor as what stood there.

        Where weights require gradients torch multiplies other shapes by them, even under
        `no_grad`, so that bits differ; theirs do in memory.
        """
        if not self.parameter:
            return tensor
        return nn.Parameter(tensor, requires_grad=self.empty.requires_grad)


def spots_of(model: nn.Module) -> list[Spot]:
    """All spots of a model that hold a tensor; tied ones each for itself."""
    found = []
    for prefix, module in model.named_modules():
        for where, parameter in ((module._parameters, True), (module._buffers, False)):
            for key, tensor in where.items():
                if tensor is not None:
                    name = f"{prefix}.{key}".removeprefix(".")
                    found.append(Spot(module, where, key, name, parameter, tensor))
    return found


def by_layer(model: nn.Module, layers: nn.ModuleList) -> dict[int, list[Spot]]:
    """Spots by the index of their layer; those of tensors that several layers use are glue."""
    homes: dict[int, int] = {}
    for index, layer in enumerate(layers):
        for module in layer.modules():
            homes[id(module)] = index if homes.get(id(module), index) == index else GLUE
    spots = spots_of(model)
    users: dict[int, int] = {}
    for spot in spots:
        home = homes.get(id(spot.owner), GLUE)
        users[id(spot.tensor)] = home if users.get(id(spot.tensor), home) == home else GLUE
    groups: dict[int, list[Spot]] = {GLUE: []}
    for spot in spots:
        groups.setdefault(users[id(spot.tensor)], []).append(spot)
    return groups


def show_device(model: PreTrainedModel, device: torch.device) -> Callable[[], None]:
    """Has a model name the device it runs on, though its first weight may be on none.

    `device` is a property, so the instance gets a class of its own; what is returned undoes it.
    """
    if model.device == device:
        return lambda: None
    before = type(model)
    shown = type(before.__name__, (before,), {"device": property(lambda _: device)})
    shown.__module__, shown.__qualname__ = before.__module__, before.__qualname__
    model.__class__ = shown

    def undo() -> None:
        model.__class__ = before

    return undo
