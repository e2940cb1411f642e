"""Images and audio of a job's rows: what a step is fed for them, and the positions of tokens."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from pagedkv.arrays import Ints
from pagedkv.errors import UnsupportedModelError
from pagedkv.hf.image_numbers import OF_TOKENS
from pagedkv.hf.images import PIXELS, SOUNDS, Features, Sense, Vision, on_device, sense_of
from pagedkv.hf.model import device_of
from pagedkv.kernels.sending import sent

from .image_prompts import ImagePrompt, as_tensor
from .packed import Inputs, PackedModel
from .results import GenerationStats
from .rows import Batch, Row
from .sampling import reason

# Further values that tokenizers return for a text when asked.
SAID_OF_TEXTS = ("special_tokens_mask", "offset_mapping", "length")
TEXT_ALONE = Sense("images", PIXELS, -1)  # for a model that takes neither: no token has the id -1


class StepImages:
    """Runs the model on images and audio, for the rows of a job.

    Args:
        stats: where it counts how often it ran the model for images or audio.
    """

    def __init__(self, packed: PackedModel, stats: GenerationStats) -> None:
        self._packed, self._stats = packed, stats

    @cached_property
    def vision(self) -> Vision:
        """The part of the model that sees, or hears."""
        return Vision(self._packed.model)

    @cached_property
    def _sense(self) -> Sense:
        return sense_of(self._packed.model) or TEXT_ALONE

    def prompt(self, ids: Ints, inputs: Mapping[str, Any]) -> ImagePrompt | None:
        """Makes a prompt with images, with its positions; `look` computes its images later.

        Returns None if it has no images.

        Raises:
            ValueError: its ids and inputs do not fit each other.
            UnsupportedModelError: the model takes no images.
        """
        inputs = {name: value for name, value in inputs.items() if value is not None}
        word, given, token = self._sense
        for name in inputs:
            heard = "audio" in name or name == SOUNDS
            if "video" in name or (heard and given != SOUNDS):
                raise ValueError(
                    f"{name}: expected {word}, packed rows serve nothing else; `PagedCache` with "
                    "`generate` may work"
                )
        if given not in inputs:
            _require_text(ids, inputs, self._sense)
            return None
        inputs = {name: as_tensor(name, value) for name, value in inputs.items()}
        vision, places = self.vision, np.flatnonzero(ids == token)
        if not places.size:
            raise ValueError(
                f"{given}: expected tokens {token} in the text where the {word} go, got none"
            )
        kinds = inputs.get("mm_token_type_ids")
        if kinds is not None and not np.array_equal(np.flatnonzero(np.asarray(kinds)), places):
            raise ValueError(
                f"mm_token_type_ids: expected 1 for the {len(places)} tokens of images and 0 for "
                "others"
            )
        positions = vision.positions(torch.from_numpy(ids), inputs)
        return ImagePrompt(ids.astype(np.int32), inputs, places, positions)

    @torch.inference_mode()
    def look(self, batch: Batch) -> list[Row]:
        """Lets the model look at images whose tokens a step is about to feed.

        Returns:
            Rows that cannot go on, each with its `error`.
        """
        failed = []
        for part in _parts(batch):
            if not part.places.size or part.images.features is not None:
                continue
            try:
                part.images.features = self._features(part.images)
                self._stats.vision_forwards += 1
            except UnsupportedModelError as error:
                part.row.error = str(error)
                failed.append(part.row)
            except Exception as error:  # mostly because pixels do not fit the text
                part.row.error = reason(error, f"computing its {self._sense.word}")
                failed.append(part.row)
        return failed

    def _features(self, images: ImagePrompt) -> Features:
        device = device_of(self._packed.model)
        ids, places = (sent(x, device).long() for x in (images.ids, images.places))
        inputs, cache = on_device(self._packed.model, images.inputs), self._packed.carrier
        return self.vision.features(ids, inputs, places, images.positions, cache)

    def inputs(self, batch: Batch) -> Inputs | None:
        """Returns the arguments of a step's forward; None if the step's ids and positions do."""
        if all(row.images is None for row in batch.rows):
            return None
        step, parts = batch.step, _parts(batch)
        positions, shown = self._positions(batch, parts), [p for p in parts if p.places.size]
        if not shown:
            return None if positions is None else Inputs(step.tokens[None], positions)
        positions = step.positions[None] if positions is None else positions
        places = np.concatenate([part.at + part.places - part.begin for part in shown])
        at = sent(places, step.positions.device)
        ids = step.tokens.index_fill(0, at, self._sense.token)
        features = Features.joined([part.features() for part in shown])
        return Inputs(ids[None], positions, self.vision.fed(at, features, self._packed.carrier))

    def _positions(self, batch: Batch, parts: list[ImagePart]) -> Tensor | None:
        """Returns positions `[axes, 1, T]`: a prompt's own; behind it the step's plus its offset.

        Returns None if the model counts images like text, so that the step's positions are right.
        """
        tables = [row.images.positions for row in batch.rows if row.images is not None]
        if (first := tables[0]) is None:
            return None
        step = batch.step
        offsets = np.array([0 if row.images is None else row.images.offset for row in batch.rows])
        ahead = sent(np.repeat(offsets, step.num_new), step.positions.device)
        positions = (step.positions + ahead).repeat(len(first), 1)
        for part in parts:
            own = part.images.positions
            assert own is not None, "all prompts of a model have them, or none"
            own = own[:, part.begin : part.end]
            positions[:, part.at : part.at + own.shape[1]] = own
        return positions[:, None]

    def forget(self, batch: Batch) -> None:
        """Drops the features of prompts whose last image token this step has fed."""
        for part in _parts(batch):
            if part.end > part.images.places[-1]:
                part.images.features = None


class ImagePart(NamedTuple):
    """The tokens that a step feeds of a prompt with images.

    Attributes:
        row, images: the row, and its prompt with images.
        begin, end: the range of the prompt's tokens.
        at: the place of the first of them in the step.
        places: the places, in the prompt, of image tokens among them.
    """

    row: Row
    images: ImagePrompt
    begin: int
    end: int
    at: int
    places: Ints

    def features(self) -> Features:
        """Returns the features of its image tokens."""
        assert self.images.features is not None, "somebody has looked"
        first = int(np.searchsorted(self.images.places, self.begin))
        return self.images.features.part(first, first + len(self.places))


def _require_text(ids: Ints, inputs: Mapping[str, Any], sense: Sense) -> None:
    """Raises if other inputs or image tokens show that a prompt's pixels are missing."""
    word, given, token = sense
    if more := sorted(inputs.keys() - {*OF_TOKENS, *SAID_OF_TEXTS}):
        raise ValueError(f"{', '.join(more)}: expected {given} with it, or a text without {word}")
    if count := int((ids == token).sum()):
        raise ValueError(
            f"{given}: the text has {count} tokens of {word}, so it needs the {word}, got none"
        )


def _parts(batch: Batch) -> list[ImagePart]:
    """Lists the parts of prompts with images that a step feeds."""
    if batch.counts is None:  # rows only decode
        return []
    found, ends = [], np.cumsum(batch.step.num_new).tolist()
    for row, count, stop in zip(batch.rows, batch.counts, ends):
        if row.images is not None and row.done < len(row.prompt):
            begin, end = row.done, row.done + count
            first, last = np.searchsorted(row.images.places, [begin, end]).tolist()
            places = row.images.places[first:last]
            found.append(ImagePart(row, row.images, begin, end, stop - count, places))
    return found
