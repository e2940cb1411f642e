"""Numbers that stand for tokens of images or audio where texts are compared.

An image is the same token many times over, whatever it shows. So in the text by which prefixes are
found, a number made of the image's digest replaces each of these tokens: two rows share an image
only if pixels and grid agree, and audio only if features and masks do. The model gets the original
tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from hashlib import sha256, shake_256
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pagedkv.arrays import Ints, Tokens

from .images import GRID, PIXELS, SOUNDS, image_token_of

# No vocabulary has ids from here on; numbers of image tokens are between this and 2**31.
FIRST_IMAGE_NUMBER = 2**30
# Inputs that processors make for each token, not for an image.
KINDS_OF_TOKENS = ("mm_token_type_ids", "token_type_ids")
OF_TOKENS = (*KINDS_OF_TOKENS, "attention_mask")


def numbers_in(ids: Tensor, inputs: Mapping[str, Any], config: Any) -> Tokens | None:
    """Returns `[B, n]`, the numbers of image tokens among the ids of rows, and 0 for all others.

    None if it is unknown which tokens stand for which image: without a grid, or with videos.

    Args:
        inputs: the other inputs of a forward for these ids, without those about the text itself.
    """
    token = image_token_of(config)
    if token is None or not inputs.keys() >= {PIXELS, GRID} or any("video" in x for x in inputs):
        return None
    flat = np.asarray(ids.reshape(-1).cpu().numpy())
    found = np.zeros(flat.shape, np.int32)
    places = np.flatnonzero(flat == token)
    if places.size:
        for at, numbers in numbers_of(flat, inputs, places):
            found[at] = numbers
    return found.reshape(ids.shape)


def numbers_of(
    ids: Tokens, inputs: Mapping[str, Any], places: Ints
) -> Iterator[tuple[Ints, Tokens]]:
    """Yields the places of each image's tokens, and the numbers by which they are found."""
    for at, parts in _images(ids, inputs, places):
        digest = sha256(str(len(at)).encode())
        for name, part in sorted(parts.items()):
            is_tensor = isinstance(part, Tensor)
            said = f"{part.dtype} {list(part.shape)}" if is_tensor else repr(part)
            digest.update(f"{name} {said}".encode())
            if is_tensor:
                # The mask that Whisper's processor returns may be a view that skips elements.
                flat = part.flatten().cpu().clone(memory_format=torch.contiguous_format)
                digest.update(flat.view(torch.uint8).numpy().tobytes())
        for name in KINDS_OF_TOKENS:  # some models read an image both ways by them
            if name in inputs:
                kinds = np.asarray(inputs[name]).reshape(-1)[at[0] : at[-1] + 1]
                digest.update(f"{name} {kinds.tolist()}".encode())
        drawn = np.frombuffer(shake_256(digest.digest()).digest(4 * len(at)), np.uint32)
        yield at, (drawn % FIRST_IMAGE_NUMBER + FIRST_IMAGE_NUMBER).astype(np.int32)


def _images(
    ids: Tokens, inputs: Mapping[str, Any], places: Ints
) -> Iterator[tuple[Ints, dict[str, Any]]]:
    """Yields each image's token places and inputs; all together if they cannot be told apart."""
    parts = {name: value for name, value in inputs.items() if name not in OF_TOKENS}
    grid, pixels = parts.get(GRID), parts.get(PIXELS, parts.get(SOUNDS))
    runs = np.split(places, np.flatnonzero(np.diff(places) > 1) + 1)
    if isinstance(grid, Tensor) and isinstance(pixels, Tensor) and grid.ndim == 2:
        patches = grid.prod(-1).cpu().numpy()
        run_ends, rows = np.cumsum([len(run) for run in runs]), np.cumsum(patches)
        for counts in _counts(grid.cpu().numpy(), len(places)):
            ends = np.cumsum(counts)
            apart = np.isin(ends, run_ends).all()
            if ends[-1] == len(places) and rows[-1] == len(pixels) and apart:
                for i, (end, row) in enumerate(zip(ends, rows)):
                    own = {PIXELS: pixels[row - patches[i] : row], GRID: grid[i]}
                    yield places[end - counts[i] : end], {**parts, **own}
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


def _counts(grid: Ints, tokens: int) -> Iterator[Ints]:
    """Yields the ways to share out so many tokens among images: how many each image may have.

    Either every token stands for equally many patches, or for a square of patches, and each line of
    squares ends with one more token.
    """
    frames, lines, columns = grid.T
    patches = grid.prod(-1)
    yield patches // max(1, int(patches.sum()) // tokens)
    # The side of the squares, solved from `tokens = patches / side**2 + lines / side`.
    all_lines, all_patches = int((frames * lines).sum()), int(patches.sum())
    root = (all_lines**2 + 4 * tokens * all_patches) ** 0.5
    side = max(1, round((all_lines + root) / (2 * tokens)))
    yield frames * (lines // side) * (columns // side + 1)
