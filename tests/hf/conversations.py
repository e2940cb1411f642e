"""Conversations with images in them, turn by turn, and how they are given to `generate`."""

from __future__ import annotations

import random
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tests.hf.images import seeing
from tests.hf.tiny import CLOSE_CALL, generate, padded

NAMES = ("start_token_id", "end_token_id", "_token_id", "_token_index")


class Image(NamedTuple):
    """A square of so many patches a side; the seed draws its pixels."""

    patches: int
    seed: int


Row = list[Tensor | Image]  # texts and images, one behind the other


def encoded(model: PreTrainedModel, rows: list[Row], shown: str = "all") -> dict[str, Tensor]:
    """Rows as a processor returns them, padded on the left.

    Args:
        shown: "all" images of the rows, "none" of them, or the "last" of each.
    """
    ids, pixels, grids = [], [], []
    for row in rows:
        parts: list[Tensor] = [torch.tensor([1, 5])]
        images = []
        for piece in row:
            if isinstance(piece, Tensor):
                parts.append(piece)
                continue
            made = seeing(model, torch.tensor([], dtype=torch.long), **piece._asdict())
            parts.append(made["input_ids"][0, 2:])
            images.append((made["pixel_values"], made["image_grid_thw"]))
        ids.append(torch.cat(parts))
        images = images[-1:] if shown == "last" else images
        pixels += [one for one, _ in images]
        grids += [grid for _, grid in images]
    batch = padded(ids)
    if pixels and shown != "none":
        batch["pixel_values"], batch["image_grid_thw"] = torch.cat(pixels), torch.cat(grids)
        batch["mm_token_type_ids"] = (batch["input_ids"] == model.config.image_token_id).int()
    return batch


def answers(model: PreTrainedModel, batch, cache=None, new: int = 5, **options):
    """Returns the tokens that `generate` adds to each row, none of an image, and their scores."""
    never = {value for name, value in vars(model.config).items() if name.endswith(NAMES)}
    options["suppress_tokens"] = sorted(x for x in never if isinstance(x, int) and x > 1)
    found = generate(model, batch, cache, max_new_tokens=new, **options)
    return found.sequences[:, batch["input_ids"].shape[1] :], found.scores


def alone(model: PreTrainedModel, row: Row, **options):
    """Answers a row by itself, over a cache of transformers' own."""
    said, scores = answers(model, encoded(model, [row]), **options)
    return said[0], [step[0] for step in scores]


def require_right(model: PreTrainedModel, rows: list[Row], said: Tensor) -> None:
    """Holds answers against those of rows alone, but for close calls."""
    for row, ids in zip(rows, said, strict=True):
        expected, scores = alone(model, row, new=said.shape[1])
        if torch.equal(ids, expected):
            continue
        best = scores[int((ids != expected).nonzero()[0])].topk(2).values
        assert best[0] - best[1] < CLOSE_CALL, f"{ids.tolist()}, expected {expected.tolist()}"


def drawn(draw: random.Random, low: int = 1, high: int = 6) -> Tensor:
    return torch.tensor([draw.randint(2, 90) for _ in range(draw.randint(low, high))])


def turned(row: Row, draw: random.Random) -> Row:
    """The next text of a row that ends in an answer."""
    row, more, at = [*row], drawn(draw), draw.randrange(len(row))
    image = Image(draw.choice([4, 8]), draw.randrange(3))
    texts = [i for i, piece in enumerate(row) if isinstance(piece, Tensor)]
    images = [i for i, piece in enumerate(row) if isinstance(piece, Image)]
    ways = ["append"] * 3 + ["see"] * 2 + ["regenerate", "edit", "swap", "drop", "other"]
    way = draw.choice(ways)
    if sum(len(x) if isinstance(x, Tensor) else x.patches**2 // 4 for x in row) > 110:
        way = "other"
    if way == "regenerate":
        return row[:-1] if len(row) > 1 else row
    if way == "other":
        return [more, image, drawn(draw)] if draw.random() < 0.4 else [more]
    if way == "edit":
        i = draw.choice(texts)
        text = row[i].clone()
        text[draw.randrange(len(text))] = draw.randint(2, 90)
        row[i] = text
    if way == "swap" and images:
        row[draw.choice(images)] = image
    if way == "drop" and len(row) > 1:
        del row[at]
    return [*row, image, more] if way == "see" else [*row, more]
