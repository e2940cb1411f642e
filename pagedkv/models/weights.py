"""One weight of a model: which part it belongs to, and how passes use it."""

from __future__ import annotations

from math import prod
from typing import Literal, NamedTuple

Part = Literal["layer", "embedding", "tables", "head", "tower", "rest"]


class Weight(NamedTuple):
    """A parameter.

    Attributes:
        name: in the model.
        part: it belongs to.
        layers: that multiply a token with it; several share some. None if it is in none.
        shape: its lengths.
        is_expert: whether it belongs to experts that tokens are routed to.
        alone: whether these can be read one by one, as their class has them.
        packable: whether a quantised checkpoint may have it in fewer bits.
        cut: whether processes that share out the model have a part of it each.
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
