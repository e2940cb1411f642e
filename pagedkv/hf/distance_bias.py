"""Biases that a model learns for how far a key stands in front of its query.

A module makes one of the states of queries and of how far each key is, as a matrix of queries and
keys. Between a layer's `update` and its attention it is asked for distances from 0 up to its reach
instead: so attention gets `[B, H, q, n]` of it, by distance, as pages take it, and the model may
scale it by query on the way.
"""

from __future__ import annotations

import inspect
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from pagedkv.errors import UnsupportedModelError

from .forward_cache import uncompiled, waiting

PLACES = "query_positions", "key_positions"
DISTANCES = "relative_distance"


def watch_distances(model: nn.Module) -> list[RemovableHandle]:
    """Puts the hooks on the modules of a model that make a bias by distance."""
    handles = []
    for module in model.modules():
        kind: Any = type(module)
        makes = hasattr(module, "rel_extent") and not hasattr(module, "layer_idx")
        if makes and _told_by(kind) is not None:
            handles.append(module.register_forward_pre_hook(by_distance, with_kwargs=True))
    return handles


@cache
def _told_by(kind: Any) -> tuple[inspect.Signature, bool] | None:
    """The signature of a module's forward, if it is told how far keys are.

    Returns:
        with it, whether it is told distances, else places; None for other modules.
    """
    signature = inspect.signature(kind.forward)
    if DISTANCES in signature.parameters:
        return signature, True
    return (signature, False) if {*PLACES} <= signature.parameters.keys() else None


@uncompiled
def by_distance(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
    """Hook that such a module runs before its forward; the arguments that it gets instead."""
    staged = waiting.last() if waiting.last is not None else None
    if staged is None:
        return None
    kind: Any = type(module)
    told = _told_by(kind)
    assert told is not None, "only such modules have the hook"
    signature, are_distances = told
    reach: Any = module.rel_extent
    bound = signature.bind(module, *args, **kwargs)
    given: Tensor = bound.arguments[DISTANCES if are_distances else PLACES[0]]
    distances = torch.arange(reach, device=given.device)
    if are_distances:
        bound.arguments[DISTANCES] = distances.expand(given.shape[-2], -1)
    else:
        names = torch.zeros_like(given), -distances
        bound.arguments.update(zip(PLACES, names))
    staged.reach = reach
    return bound.args[1:], bound.kwargs


def packed_bias(staged: Any, bias: Tensor) -> Tensor:
    """`[T, H, n]`, the bias of the tokens of a step that are computed.

    Args:
        staged: K and V of the layer.
        bias: `[B, H, q, n]`, as attention was given it.

    Raises:
        UnsupportedModelError: it was not made by a module that was asked for distances.
    """
    if bias.ndim != 4 or bias.shape[-1] != staged.reach:
        raise UnsupportedModelError(
            f"position_bias: layer {staged.layer.index} has a bias of shape {[*bias.shape]} that "
            "none of its modules made by distance, which is what pages tell"
        )
    packed: Tensor = staged.layer.cache.packed(bias)
    return packed.contiguous()
