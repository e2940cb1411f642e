"""One weight of a model: which part it belongs to, and how passes use it."""

from __future__ import annotations

from math import prod
from typing import Literal, NamedTuple

Part = Literal["layer", "embedding", "tables", "head", "tower", "rest"]


class Weight(NamedTuple):
    """A parameter.

    Attributes:
        name: its name in the model.
        part: the part of the model that it belongs to.
        layers: the layers that multiply a token with it; several may share it. Empty for none.
        shape: its shape.
        is_expert: whether it belongs to experts that tokens are routed to.
        alone: whether these experts can be read one by one, as their class stores them.
        packable: whether a quantised checkpoint may have it in fewer bits.
        cut: whether each of the processes that share out the model has a part of it.
    """

    name: str
    part: Part
    layers: tuple[int, ...]
    shape: tuple[int, ...]
    is_expert: bool = False
    alone: bool = False
    packable: bool = False
    cut: bool = False

    @property
    def elements(self) -> int:
        """How many numbers it has."""
        return prod(self.shape)
