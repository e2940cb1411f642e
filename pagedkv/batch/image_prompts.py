"""Prompts with images: their ids and inputs, and the text by which their prefixes are found."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from pagedkv.arrays import Ints, Tokens
from pagedkv.hf.image_numbers import numbers_of
from pagedkv.hf.images import Features


class ImagePrompt:
    """A prompt with images.

    Attributes:
        ids: `[n]`, the ids of the prompt.
        text: `[n]`, the ids, with a number made of its image in place of each image token.
        inputs: what a processor made of the prompt beside its ids.
        places: `[m]`, where image tokens are.
        positions: `[axes, n]` of its tokens; None if these are counted like text.
        offset: how far positions behind the prompt are ahead of a count of tokens; mostly below 0.
        features: the features of image tokens, while its rows are computing them.
    """

    def __init__(
        self,
        ids: Tokens,
        inputs: dict[str, Any],
        places: Ints,
        positions: tuple[Tensor, int] | None,
    ) -> None:
        self.ids, self.inputs, self.places = ids, inputs, places
        self.text = ids.copy()
        for at, number in numbers_of(ids, inputs, places):
            self.text[at] = number
        self.positions: Tensor | None
        self.positions, self.offset = (None, 0) if positions is None else positions
        self.features: Features | None = None


def as_tensor(name: str, value: Any) -> Any:
    """Returns a processor's value as a tensor, or as a plain value of Python."""
    if isinstance(value, (np.ndarray, list, tuple)):
        try:
            return torch.as_tensor(np.asarray(value), device="cpu")
        except (TypeError, ValueError) as error:
            raise ValueError(
                f'{name}: expected a tensor, got {type(value).__name__}; return_tensors="pt" makes '
                "the processor return one"
            ) from error
    if value is None or isinstance(value, (Tensor, bool, int, float, str)):
        return value
    raise ValueError(f"{name}: expected a tensor, got {type(value).__name__}")
