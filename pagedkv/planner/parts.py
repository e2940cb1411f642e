"""Bytes of the parts of a model: layers, embedding, head and the rest."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pagedkv.models.weights import Weight

ALIGNMENT = 256  # bytes; where a tensor may begin in a buffer of the device


@dataclass(frozen=True)
class Parts:
    """Bytes of each layer and of its experts, of embedding, head and the rest, tower included.

    Attributes:
        active: weights that a token is multiplied with.
    """

    layers: tuple[int, ...]
    experts: tuple[int, ...]
    embedding: int
    head: int
    rest: int
    tower: int
    active: int


def parts_of(weights: Iterable[tuple[Weight, int]], count: int, routed: float) -> Parts:
    """The parts that weights of so many bytes make up.

    Args:
        count: layers of the decoder.
        routed: the share of a layer's experts that a token is routed to.
    """
    layers, experts, active = [0] * count, [0] * count, 0.0
    parts = {"embedding": 0, "head": 0, "rest": 0, "tower": 0}
    for weight, nbytes in weights:
        size = aligned(nbytes)
        if weight.part == "layer":
            (layer,) = weight.layers
            layers[layer] += size
            experts[layer] += size * weight.alone
        else:
            parts[weight.part] += size
        if is_matrix(weight):
            share = routed if weight.is_expert else 1.0
            active += share * len(weight.layers) * weight.elements
    parts["rest"] += parts["tower"]
    return Parts(tuple(layers), tuple(experts), **parts, active=round(active))


def is_matrix(weight: Weight) -> bool:
    """Whether a token is multiplied with a weight of a layer; others are norms, biases, kernels."""
    return bool(weight.layers) and (len(weight.shape) == 2 or weight.is_expert)


def aligned(nbytes: int) -> int:
    """Bytes of a tensor with what is left free behind it."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
