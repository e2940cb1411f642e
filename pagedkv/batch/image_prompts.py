"""Prompts with images, and what their prefixes are found by.

An image is the same token many times over, whatever it shows. So in the text by which prefixes are
found each of these tokens is a number made of the image's digest instead: two rows share an image
only if pixels and grid agree. The model gets the tokens that stand in the prompt.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from hashlib import sha256, shake_256
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pagedkv.arrays import Ints, Tokens
from pagedkv.hf.images import GRID, PIXELS, Features

# No vocabulary has ids from here on; numbers of image tokens are between this and 2**31.
FIRST_IMAGE_NUMBER = 2**30
# What processors say of each token, and not of an image.
KINDS_OF_TOKENS = ("mm_token_type_ids", "token_type_ids")
OF_TOKENS = (*KINDS_OF_TOKENS, "attention_mask")


class ImagePrompt:
    """A prompt with images.

    Attributes:
        ids: `[n]`, what stands in the prompt.
        text: `[n]`, the same with numbers of their image for image tokens.
        inputs: what a processor made of the prompt beside its ids.
        places: `[m]`, where image tokens are.
        positions: `[axes, n]` of its tokens; None where these are counted like text.
        offset: how far what follows is ahead of a count of tokens; mostly below 0.
        features: what stands for image tokens, while its rows are computing them.
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


def numbers_of(
    ids: Tokens, inputs: Mapping[str, Any], places: Ints
) -> Iterator[tuple[Ints, Tokens]]:
    """The tokens of each image, and the numbers by which they are found."""
    for at, parts in _images(ids, inputs, places):
        digest = sha256(str(len(at)).encode())
        for name, part in sorted(parts.items()):
            digest.update(f"{name} {_described(part)}".encode())
            if isinstance(part, Tensor):
                digest.update(part.reshape(-1).cpu().view(torch.uint8).numpy().tobytes())
        for name in KINDS_OF_TOKENS:  # by them some models read an image both ways
            if name in inputs:
                kinds = np.asarray(inputs[name]).reshape(-1)[at[0] : at[-1] + 1]
                digest.update(f"{name} {kinds.tolist()}".encode())
        drawn = np.frombuffer(shake_256(digest.digest()).digest(4 * len(at)), np.uint32)
        yield at, (drawn % FIRST_IMAGE_NUMBER + FIRST_IMAGE_NUMBER).astype(np.int32)


def as_tensor(name: str, value: Any) -> Any:
    """A processor's value: a tensor, or one of Python's plain ones."""
    if isinstance(value, (np.ndarray, list, tuple)):
        try:
            return torch.as_tensor(np.asarray(value))
        except (TypeError, ValueError) as error:
            raise ValueError(
                f'{name}: expected a tensor, got {type(value).__name__}; return_tensors="pt" makes '
                "the processor return one"
            ) from error
    if value is None or isinstance(value, (Tensor, bool, int, float, str)):
        return value
    raise ValueError(f"{name}: expected a tensor, got {type(value).__name__}")


def _described(part: Any) -> str:
    return f"{part.dtype} {list(part.shape)}" if isinstance(part, Tensor) else repr(part)


def _images(
    ids: Tokens, inputs: Mapping[str, Any], places: Ints
) -> Iterator[tuple[Ints, dict[str, Any]]]:
    """The tokens and inputs of each image; of all together, where it is not known whose is what."""
    parts = {name: value for name, value in inputs.items() if name not in OF_TOKENS}
    grid, pixels = parts.get(GRID), parts.get(PIXELS)
    runs = np.split(places, np.flatnonzero(np.diff(places) > 1) + 1)
    if isinstance(grid, Tensor) and isinstance(pixels, Tensor) and grid.ndim == 2:
        patches = grid.prod(-1).cpu().numpy()
        per_token = max(1, int(patches.sum()) // len(places))
        ends, rows = np.cumsum(patches // per_token), np.cumsum(patches)
        apart = np.isin(ends, np.cumsum([len(run) for run in runs])).all()
        if ends[-1] == len(places) and rows[-1] == len(pixels) and apart:
            for i, (end, row) in enumerate(zip(ends, rows)):
                own = {PIXELS: pixels[row - patches[i] : row], GRID: grid[i]}
                yield places[end - patches[i] // per_token : end], {**parts, **own}
            return
    elif isinstance(pixels, Tensor) and len(pixels) == len(runs):
        for i, run in enumerate(runs):
            own = {
                name: value[i]
                for name, value in parts.items()
                if isinstance(value, Tensor) and len(value) == len(runs)
            }
            yield run, {**parts, **own}
        return
    yield places, parts
