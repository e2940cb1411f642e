"""Where a model holds its tensors, its list of layers, and which tensors belong to which layer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from pagedkv.errors import LayersNotFound, StreamError, UnsupportedModelError

from .absent import Absent

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
        empty: the tensor that stood there first, which a streamed layer has between passes.
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

    def require_empty(self) -> None:
        """Raises StreamError where another tensor was put there."""
        if self.where.get(self.key) is not self.empty:
            raise StreamError(
                f"{self.name} is streamed and was replaced; the next pass would read its file "
                "again. Replace the whole module, or load the model in memory"
            )

    def like(self, tensor: Tensor) -> Tensor:
        """A tensor of the kind that stood there first: a parameter or a plain tensor.

        It requires gradients if the first one did: for such weights torch multiplies in other
        shapes, even under `no_grad`, and bits would differ from those of the model in memory.
        """
        if not self.parameter:
            return tensor
        return nn.Parameter(tensor, requires_grad=self.empty.requires_grad)


def forget_casts() -> None:
    """Has `torch.autocast` cast anew: it knows weights by their tensors, and these change contents.

    To be called whenever other weights are bound.
    """
    torch.clear_autocast_cache()


def sites_of(model: nn.Module) -> list[TensorSite]:
    """All sites of a model that hold a tensor; a tied tensor has several."""
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
    """Sites by the index of their layer; tensors that several layers use are glue."""
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


def find_layers(
    model: PreTrainedModel, layers_path: str | None = None
) -> tuple[str, nn.ModuleList]:
    """The list of a model's decoder layers, and its name in the model.

    It is the only list of checkpointing layers that is as long as the configuration says; else the
    list that the model's pipeline plan names; else the only list of that length. Lists beside the
    model's decoder, as those of a tower for images, are left out if the decoder has one.

    Args:
        layers_path: the list's name, for a model in which these rules do not find it.

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
    parts = set(model.get_decoder().modules())
    lists = {n: m for n, m in lists.items() if m in parts and len(m) == count} or lists
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
