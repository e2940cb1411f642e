"""The texts of a cache's rows: the ids of their tokens, as far as forwards were given them.

An image's tokens have numbers made of its digest (`image_numbers.py`), or are unknown.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from pagedkv.arrays import Bools, Ints, Tokens

from .adapters import without_adapter
from .model import device_of

UNKNOWN = -1
ALONE = -2  # a token with different positions on its axes, which is equal to no other
WAITING = 256  # most forwards whose ids stay on their device
# Tensors that a forward may be given beside its text; others, such as images, may be part of it.
BESIDE_TEXT = {"attention_mask", "position_ids", "cache_position", "logits_to_keep"}
TYPES = ("token_type_ids", "mm_token_type_ids", "moe_mm_token_type_ids")
# Names of ids that may stand for something else, such as an image; bounds and padding do not.
_PLACEHOLDER = re.compile(r"(?!(bos|eos|pad|sep|unk)_|.*_(start|end)_).*_token_(id|index)")


class Told(NamedTuple):
    """The ids, positions and types that a forward was given, `[B, q]` on the model's device.

    Attributes:
        ids: None if the forward was given embeddings.
        positions: `[..., B, q]`, one or several axes; None if the model counts columns.
        types: tensors of token types; 0 is text.
        stands_in: ids that may stand for something else than text, such as an image.
        numbers: on the host, numbers of image tokens, 0 for others; None if none are known.
    """

    ids: Tensor | None = None
    positions: Tensor | None = None
    types: tuple[Tensor, ...] = ()
    stands_in: tuple[int, ...] = ()
    numbers: Tokens | None = None

    @classmethod
    def of(cls, arguments: Mapping[str, Any], config: Any, numbers: Tokens | None = None) -> Told:
        """Reads them from a forward's named arguments and the model's configuration."""
        ids, places = arguments.get("input_ids"), arguments.get("position_ids")
        positions = kept_copy(places) if isinstance(places, Tensor) else None
        if not isinstance(ids, Tensor) or ids.ndim != 2 or "inputs_embeds" in arguments:
            return cls(None, positions)
        types = tuple(kept_copy(one) for one in types_of(arguments, TYPES, ids.shape[1]))
        if numbers is not None or not beside_text(arguments):
            return cls(kept_copy(ids), positions, types, (), numbers)
        stands_in = placeholders(config)  # if none is named, every id may be one
        return cls(kept_copy(ids) if stands_in else None, positions, types, stands_in)


class Texts:
    """The ids and positions of rows, on the host; `UNKNOWN` for ids that no forward gave.

    Ids of the latest forwards stay on their device until somebody asks: fetching them in each
    forward would wait for the device.
    """

    def __init__(self, rows: Sequence[Ints] = ()) -> None:
        self._lengths = np.array([len(row) for row in rows], np.int64)
        self._table = np.full((2, len(rows), int(self._lengths.max(initial=0))), UNKNOWN, np.int32)
        self._table[1] = np.arange(self._table.shape[-1])
        for i, row in enumerate(rows):
            self._table[0, i, : len(row)] = row
        self._waiting: list[tuple[Told, int, int, Bools | None]] = []  # what `add` was given

    @classmethod
    def unknown(cls, lengths: Sequence[int]) -> Texts:
        """Makes rows of these lengths whose tokens are unknown."""
        return cls([np.full(length, UNKNOWN) for length in lengths])

    @property
    def lengths(self) -> Ints:
        """`[B]`, tokens of each row."""
        self._settle()
        return self._lengths

    @property
    def ids(self) -> Tokens:
        """`[B, longest]`; values behind the end of a row mean nothing."""
        return self._held[0]

    @property
    def positions(self) -> Tokens:
        """`[B, longest]`, where tokens were computed; the furthest if there are several axes."""
        return self._held[1]

    @property
    def ahead(self) -> Ints:
        """`[B]`, how far the positions behind each row are ahead of a count of its tokens."""
        within = np.arange(self.positions.shape[1]) < self.lengths[:, None]
        return np.where(within, self.positions, -1).max(1, initial=-1) + 1 - self.lengths

    @property
    def _held(self) -> Tokens:
        self._settle()
        return self._table[..., : int(self._lengths.max(initial=0))]

    @property
    def known(self) -> bool:
        """Whether any token of any row is known."""
        ids = self.ids
        return bool(((ids >= 0) & (np.arange(ids.shape[1]) < self._lengths[:, None])).any())

    def add(self, told: Told, column: int, columns: int, added: Bools | None, batch: int) -> None:
        """Adds the tokens of a forward to the rows, of which there are `batch`.

        Args:
            column: the column of the first token that it was given, of `columns`.
            added: `[B, q]`, which tokens are new; None for all.
        """
        if len(self._lengths) != batch and not self._waiting:
            self._table = np.empty((2, batch, 0), np.int32)
            self._lengths = np.zeros(batch, np.int64)
        self._waiting.append((told, column, columns, added))
        if len(self._waiting) == WAITING:
            self._settle()

    def select(self, index: Sequence[int]) -> None:
        """Makes row i a copy of the former row `index[i]`."""
        self._settle()
        self._table, self._lengths = self._table[:, list(index)], self._lengths[list(index)]

    def cut(self, lengths: Ints) -> None:
        """Takes back the tokens behind these lengths, `[B]`."""
        self._settle()
        self._lengths = np.minimum(self._lengths, lengths)

    def repeated(self, n: int) -> Texts:
        """Makes N rows of each row."""
        made = Texts()
        made._table, made._lengths = self._held.repeat(n, axis=1), self.lengths.repeat(n)
        return made

    def _settle(self) -> None:
        """Fetches the ids that wait on their device."""
        waiting, self._waiting = self._waiting, []
        for forward in waiting:
            self._write(*forward)

    def _write(self, told: Told, column: int, columns: int, added: Bools | None) -> None:
        batch = len(self._lengths)
        new = np.ones((batch, columns), bool) if added is None else added
        made = np.full((2, batch, columns), UNKNOWN, np.int32)
        made[1] = np.arange(column, column + columns)
        even: Any = True
        if told.positions is not None:
            made[1], even = furthest(told.positions[..., -columns:])
        if told.ids is not None and told.ids.shape == (batch, columns):
            said = told.ids.cpu().numpy()
            plain = np.logical_and.reduce([one.cpu().numpy() == 0 for one in told.types], axis=0)
            plain = plain & ~np.isin(said, told.stands_in)
            made[0] = np.where(plain, np.where(even, said, ALONE), UNKNOWN)
            if told.numbers is not None:
                made[0] = np.where(told.numbers > 0, told.numbers, made[0])
        places = self._lengths[:, None] + new.cumsum(1) - 1
        rows, at = np.nonzero(new)
        self._make_room(int(places.max(initial=-1)) + 1)
        self._table[:, rows, places[rows, at]] = made[:, rows, at]
        self._lengths = self._lengths + new.sum(1)

    def _make_room(self, length: int) -> None:
        _, batch, room = self._table.shape
        if length > room:
            wider = np.full((2, batch, max(length, 2 * room, 64)), UNKNOWN, np.int32)
            wider[..., :room] = self._table
            self._table = wider


def ids_of(given: Any, model: PreTrainedModel) -> Tensor:
    """Returns token ids `[B, n]` for a model, also from a mapping that a tokenizer returned."""
    ids = given.get("input_ids") if isinstance(given, Mapping) else given
    mask = given.get("attention_mask") if isinstance(given, Mapping) else None
    try:
        ids = torch.as_tensor(ids, device=device_of(model))
        padded = mask is not None and not torch.as_tensor(mask, device="cpu").all()
    except (TypeError, ValueError, RuntimeError):  # torch makes no tensor of it
        raise TypeError(
            "ids: expected [n] or [1, n] token ids, or what a tokenizer or its chat template "
            f"returns, got {given!r:.80}"
        ) from None
    if not ids.numel():
        raise ValueError("ids: expected at least one token, got none")
    if padded:
        raise ValueError(
            "ids: expected a prefix without padding, got an attention_mask with zeros; encode it "
            "alone, or without padding=True"
        )
    embedding: Any = without_adapter(model.get_input_embeddings())
    most = getattr(embedding, "num_embeddings", 1 << 31) - 1
    low, high = ids.min().item(), ids.max().item()  # others would crash a card's context
    if ids.is_floating_point() or not 0 <= low <= high <= most:
        raise ValueError(f"ids: expected integers from 0 to {most}, got {low}..{high}")
    return ids[None] if ids.ndim == 1 else ids


def types_of(arguments: Mapping[str, Any], names: Sequence[str], columns: int) -> list[Tensor]:
    """Returns the last tokens' types by each name, `[B, columns]`; drafts, without any, get 0."""
    given = (arguments.get(name) for name in names)
    types = [one[..., -columns:] for one in given if isinstance(one, Tensor)]
    return [torch.nn.functional.pad(one, (0, columns - one.shape[-1])) for one in types]


def beside_ids(given: Any, accepted: Iterable[str]) -> dict[str, Any]:
    """Returns a processor's values that the model accepts beside ids, such as images."""
    if not isinstance(given, Mapping):
        return {}
    names = [name for name in given if name in accepted and name not in ("input_ids", *BESIDE_TEXT)]
    if not {*names} - {*TYPES}:
        return {}  # a text alone
    every = {name: given[name] for name in names if given[name] is not None}
    return {
        name: value if isinstance(value, Tensor) else torch.as_tensor(value, device="cpu")
        for name, value in every.items()
    }


def beside_text(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a forward's arguments that may be part of its text, such as images, but no tokens."""
    known = {"input_ids", "inputs_embeds", *BESIDE_TEXT, *TYPES}
    return {k: value for k, value in arguments.items() if k not in known and _holds_tensors(value)}


def placeholders(config: Any) -> tuple[int, ...]:
    """Returns the ids named in a configuration that may stand for images, videos and sounds."""
    named = ((name, value) for name, value in vars(config).items() if isinstance(value, int))
    return tuple(value for name, value in named if _PLACEHOLDER.fullmatch(name))


def furthest(positions: Tensor) -> tuple[Ints, Any]:
    """Returns the furthest position on any axis, `[B, q]`, and whether all rotating axes agree.

    Of four axes the first counts tokens, for masks, and does not rotate.
    """
    if positions.ndim == 2:
        return positions.cpu().numpy(), True
    axes = positions[-3:].cpu().numpy()
    return axes.max(0), axes.max(0) == axes.min(0)


def kept_copy(x: Tensor) -> Tensor:
    """Copies a tensor, since callers may write into theirs."""
    return x.detach().to(torch.int32, copy=True)


def _holds_tensors(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_holds_tensors, value.values()))
    if isinstance(value, (list, tuple)):
        return any(map(_holds_tensors, value))
    return isinstance(value, Tensor)
