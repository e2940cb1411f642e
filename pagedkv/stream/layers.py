"""Where a model holds its tensors, and which tensors belong to which layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from pagedkv.errors import StreamError, UnsupportedModelError

from .lazy_tensor import Absent

GLUE = -1  # in place of a layer's index, for tensors that are in no layer or in several


@dataclass(frozen=True, eq=False)
class TensorSite:
    """The place in a module where it holds a parameter or buffer.

    Attributes:
        owner: the module.
        where: the module's dictionary that holds the tensor.
        key: the tensor's key in this dictionary.
        name: the tensor's name in the model.
        parameter: whether the tensor is a parameter; else it is a buffer.
        empty: the tensor that was there first, which a streamed layer has between passes.
    """

    owner: nn.Module
    where: dict[str, Any]
    key: str
    name: str
    parameter: bool
    empty: Tensor

    @property
    def tensor(self) -> Tensor:
        """The tensor that stands there now."""
        return self.where[self.key]

    def set(self, tensor: Tensor) -> None:
        """Puts a tensor there."""
        self.where[self.key] = tensor

    def bind(self, view: Tensor) -> None:
        """Puts a streamed weight there, until `take_back`."""
        if view.requires_grad != self.empty.requires_grad:  # it has changed since
            view.requires_grad_(self.empty.requires_grad)
        self.set(view)

    def take_back(self, view: Tensor) -> None:
        """Takes a bound weight back; a tensor that other code put there stays. Idempotent."""
        if self.where.get(self.key) is view:
            self.set(self.empty)

    def require_empty(self) -> None:
        """Raises StreamError if another tensor was put there."""
        if self.where.get(self.key) is not self.empty:
            raise StreamError(
                f"{self.name} is streamed and was replaced; the next pass would read its file "
                "again. Replace the whole module, or load the model in memory"
            )

    def like(self, tensor: Tensor) -> Tensor:
        """Makes a tensor of the kind that was there first: a parameter or a plain tensor.

        It requires gradients if the first one did: with such weights torch multiplies in other
        shapes, even under `no_grad`, and bits must be those of the model in memory.
        """
        if not self.parameter:
            return tensor
        return nn.Parameter(tensor, requires_grad=self.empty.requires_grad)


def forget_casts() -> None:
    """Makes `torch.autocast` cast anew: it keeps casts by tensor, but contents change.

    Call it whenever other weights are bound.
    """
    torch.clear_autocast_cache()


def sites_of(model: nn.Module) -> list[TensorSite]:
    """Returns all sites of a model that hold a tensor; a tied tensor has several."""
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
    """Puts an `Absent` wherever a tensor has no storage; tied sites share one.

    Args:
        device: where the model computes.
        elements: reads some elements of a tensor by its name in the model.

    Raises:
        UnsupportedModelError: a tensor is not plain.
    """
    made: dict[int, Absent] = {}
    for site in sites_of(model):
        like = site.empty
        if not like.is_meta or isinstance(like, Absent):
            continue
        if type(like.data) is not Tensor:
            raise UnsupportedModelError(
                f"{site.name}: {type(like.data).__name__} is no plain tensor of bytes"
            )
        if id(like) not in made:
            read = partial(elements, site.name, like)
            made[id(like)] = Absent.of(like, site.name, site.parameter, device, read)
        site.set(made[id(like)])


def by_layer(model: nn.Module, layers: nn.ModuleList) -> dict[int, list[TensorSite]]:
    """Returns sites by the index of their layer; tensors that several layers use are glue."""
    homes: dict[int, int] = {}
    for index, layer in enumerate(layers):
        for module in layer.modules():
            homes[id(module)] = index if homes.get(id(module), index) == index else GLUE
    sites = sites_of(model)
    users: dict[int, int] = {}
    for site in sites:
        home = homes.get(id(site.owner), GLUE)
        users[id(site.tensor)] = home if users.get(id(site.tensor), home) == home else GLUE
    groups: dict[int, list[TensorSite]] = {GLUE: []}
    for site in sites:
        groups.setdefault(users[id(site.tensor)], []).append(site)
    return groups
