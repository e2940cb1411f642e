"""Scales, codes and settings that quantised weights carry beside their elements.

Libraries keep them as attributes: of the weight (bitsandbytes, torchao), or of the module around it
(bitsandbytes after its first forward, HQQ). Weights with the same elements may differ by these.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .adapters import parts_of, tensors_of

DEEPEST = 4  # levels of attributes in attributes: a scale that is quantised itself is at 2
# Tensors of these dtypes belong to a computation: libraries keep columns of the latest input so.
PASSING = torch.int32, torch.int64


def carried_by(model: nn.Module) -> tuple[list[str], list[str], list[Tensor]]:
    """Finds the settings of a model's quantised weights, and the tensors beside their elements.

    Returns:
        Sorted settings, the path of each tensor's module, and the tensors, in any order. Tensors
        have no name of their own, because a library may move them within their module.
    """
    held = list(tensors_of(model))
    seen = {id(each.tensor) for each in held}
    settings: list[str] = []
    paths: list[str] = []
    tensors: list[Tensor] = []
    for part in parts_of(model):
        own = [one for one in part.module._parameters.values() if one is not None]
        found: list[Any] = [_attributes(one) for one in own if _is_foreign(one)]
        if found or any(not one.is_floating_point() for one in own):
            named = vars(part.module).copy().items()
            found.append({k: v for k, v in named if not (k[0] == "_" or k == "training")})
        for name, value in _walked(found, seen, DEEPEST):
            if isinstance(value, Tensor):
                paths.append(part.path)
                tensors.append(value)
            else:
                settings.append(f"{part.path} {name.rpartition('.')[2]} {value}")
    for each in held:
        if _is_foreign(each.tensor) and is_traceable_wrapper_subclass(each.tensor):
            said = _walked(each.tensor.__tensor_flatten__()[1], set(), DEEPEST, whole=True)
            settings.append(f"{each.name} {type(each.tensor).__qualname__} {[*said]}")
    return sorted(settings), paths, tensors


def _is_foreign(tensor: Tensor) -> bool:
    """Whether a tensor's class is neither torch's nor this package's."""
    return type(tensor).__module__.partition(".")[0] not in ("torch", "pagedkv")


def _attributes(value: Any) -> dict[str, Any]:
    return dict(getattr(value, "__dict__", {}))


def _walked(
    value: Any, seen: set[int], depth: int, name: str = "", whole: bool = False
) -> Iterator[tuple[str, Any]]:
    """Yields tensors and numbers within a value, each with its name.

    Args:
        seen: tensors that were found already, by `id`.
        whole: include truth values and dtypes, some of which libraries set in the first forward.
    """
    if value is None or isinstance(value, (nn.Module, type)) or callable(value):
        return
    if isinstance(value, (int, float, str, Enum, torch.dtype)):
        if whole or not isinstance(value, (bool, torch.dtype)):
            yield name, str(value)
        return
    if isinstance(value, Tensor):
        if not (id(value) in seen or _is_foreign(value) or value.dtype in PASSING):
            seen.add(id(value))
            yield name, value
        return
    if depth < 0:
        return
    if isinstance(value, (list, tuple)):
        value = dict(enumerate(value))
    inner = value if isinstance(value, Mapping) else _attributes(value)
    if whole and inner is not value:
        yield name, type(value).__qualname__
    for key, each in inner.items():
        yield from _walked(each, seen, depth - 1, f"{name}.{key}", whole)
