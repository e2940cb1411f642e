"""Layer groups and state layers: the form in which a cache is told of a model's layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

from .kinds import LayerKind, index_layers
from .shapes import KVShape

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True)
class LayerGroup:
    """Layers that keep the same tokens, in the same shape, and therefore share page tables.

    Attributes:
        layers: layer indices, ascending.
        window: tokens a query sees including itself, or None for all.
        num_kv_heads: KV heads per layer (G); 0 for the number in the `CacheConfig`.
        head_dim: elements of K per head; 0 for the number in the `CacheConfig`.
        v_head_dim: elements of V per head; 0 for as many as K's.
        v_is_k: V is the first `v_head_dim` elements of K, as in latent attention (MLA): pages keep
            K alone.
        chunked: the window begins anew at every multiple of it (chunked attention, Llama 4); then
            the window is a multiple of the page size.
    """

    layers: tuple[int, ...]
    window: int | None = None
    num_kv_heads: int = 0
    head_dim: int = 0
    v_head_dim: int = 0
    v_is_k: bool = False
    chunked: bool = False


@dataclass(frozen=True)
class StateLayer:
    """A layer that remembers a state of fixed size for each sequence, beside or instead of K and V.

    Attributes:
        tensors: shape and dtype of each tensor of one sequence's state, as `((64, 4), "float32")`.
    """

    tensors: tuple[tuple[tuple[int, ...], str], ...]

    @property
    def nbytes(self) -> int:
        """Bytes of one sequence's state."""
        return sum(prod(shape) * DTYPE_BYTES[dtype] for shape, dtype in self.tensors)


def paged_layers(
    kinds: Sequence[LayerKind], shapes: Sequence[KVShape], alone: bool = False
) -> dict[str, Any]:
    """Makes fields of a `CacheConfig`: how many layers have K and V, their shape and their groups.

    A group has layers with the same window and shape; groups without a window come first. Index
    keys are layers of their own, behind all others.

    Args:
        shapes: from `kv_shapes`; a group says only what differs from the first shape.
        alone: each layer without a window is a group, so that it evicts pages of its own.
    """
    sights = [(kind.window, kind.chunked) for kind in kinds if kind.attention is not None]
    sights += [(None, False)] * len(index_layers(kinds))
    members: dict[Any, list[int]] = {}
    for i, (sight, shape) in enumerate(zip(sights, shapes)):
        own = i if alone and sight[0] is None else None
        members.setdefault((*sight, shape, own), []).append(i)
    first = shapes[0]
    groups = []
    for (window, chunked, shape, _), layers in members.items():
        groups.append(
            LayerGroup(
                tuple(layers),
                window,
                num_kv_heads=shape.num_kv_heads if shape.num_kv_heads != first.num_kv_heads else 0,
                head_dim=shape.head_dim if shape.head_dim != first.head_dim else 0,
                v_head_dim=shape.v_head_dim if shape.v_head_dim != shape.head_dim else 0,
                v_is_k=shape.v_is_k,
                chunked=chunked,
            )
        )
    return {
        "num_layers": len(shapes),
        "num_kv_heads": first.num_kv_heads,
        "head_dim": first.head_dim,
        "groups": tuple(sorted(groups, key=lambda group: group.window is not None)),
    }
