"""Where a model holds its tensors, and which of them belong to which layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pagedkv.errors import StreamError, UnsupportedModelError

from .absent import Absent

GLUE = -1  # what is in no layer, or in several


@dataclass(frozen=True, eq=False)
class TensorSite:
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

    def require_empty(self) -> None:
        """Raises StreamError where somebody put something else."""
        if self.where.get(self.key) is not self.empty:
            raise StreamError(
                f"{self.name} is streamed and was replaced; its file would win. Put another module "
                "in the place of its own, or load the model in memory"
            )

    def like(self, tensor: Tensor) -> Tensor:
        """A tensor as what stood there.

        Where weights require gradients torch multiplies other shapes by them, even under
        `no_grad`, so that bits differ; theirs do in memory.
        """
        if not self.parameter:
            return tensor
        return nn.Parameter(tensor, requires_grad=self.empty.requires_grad)


def spots_of(model: nn.Module) -> list[TensorSite]:
    """All spots of a model that hold a tensor; tied ones each for itself."""
    found = []
    for prefix, module in model.named_modules():
        for where, parameter in ((module._parameters, True), (module._buffers, False)):
            for key, tensor in where.items():
                if tensor is not None:
                    name = f"{prefix}.{key}".removeprefix(".")
                    found.append(TensorSite(module, where, key, name, parameter, tensor))
    return found


def make_absent(
    model: nn.Module, device: torch.device, elements: Callable[[str, Tensor, range], Tensor]
) -> None:
    """Puts an `Absent` wherever a tensor has no storage; one where several spots share a tensor.

    Args:
        device: where the model computes.
        elements: reads some of a tensor by its name in the model.

    Raises:
        UnsupportedModelError: a tensor that is not plain.
    """
    made: dict[int, Absent] = {}
    for spot in spots_of(model):
        like = spot.empty
        if not like.is_meta or isinstance(like, Absent):
            continue
        if type(like.data) is not Tensor:
            raise UnsupportedModelError(
                f"{spot.name}: {type(like.data).__name__} is no plain tensor of bytes"
            )
        if id(like) not in made:
            read = partial(elements, spot.name, like)
            made[id(like)] = Absent.of(like, spot.name, spot.parameter, device, read)
        spot.set(made[id(like)])


def by_layer(model: nn.Module, layers: nn.ModuleList) -> dict[int, list[TensorSite]]:
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
    groups: dict[int, list[TensorSite]] = {GLUE: []}
    for spot in spots:
        groups.setdefault(users[id(spot.tensor)], []).append(spot)
    return groups
