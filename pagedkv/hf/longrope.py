"""Angles that a model's own forwards write: longrope takes others for texts beyond a length."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from pagedkv.errors import ModelChangedError

BORDER = "original_max_position_embeddings"


def angles_of(model: nn.Module) -> set[int]:
    """Returns the `id()` of the buffers that longrope writes in every forward."""
    return {id(buffer) for module in _longrope_in(model) for buffer in module._buffers.values()}


def require_before_border(model: nn.Module, length: int) -> None:
    """Raises ModelChangedError if K and V of texts this long may have angles of both lengths."""
    for module in _longrope_in(model):
        if length > (border := min(_borders(module.config.rope_parameters), default=0)):
            raise ModelChangedError(
                f"model: its angles (longrope) are others beyond {border} tokens, and this "
                f"PagedCache had rows of {length}; `reset()` it or start a new one"
            )


def _longrope_in(model: nn.Module) -> Iterator[Any]:
    for module in model.modules():
        kinds = getattr(module, "rope_type", None)
        if "longrope" in (kinds.values() if isinstance(kinds, Mapping) else (kinds,)):
            yield module


def _borders(parameters: Mapping[str, Any]) -> Iterator[int]:
    """Yields the borders in a configuration, which may have parameters by layer kind."""
    for name, value in parameters.items():
        if isinstance(value, Mapping):
            yield from _borders(value)
        elif name == BORDER:
            yield value
