"""Whole rows over texts that are computed already: how far each agrees with its text, and the rest.

`generate` cuts the ids of a batch at the length that its cache reports: one column for all rows.
But with padding the text of each row ends in a column of its own, and a row may leave its text
early: behind a prefix, an answer that is edited or generated again, a chat that drops thoughts. So
a cache that knows the texts of its rows reports no tokens to `generate`, is given whole rows, and
cuts them itself: it compares tokens by their place in their row's text, not by their column.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from pagedkv.arrays import Bools, Ints, Tokens
from pagedkv.cache.cache import PagedKVCache
from pagedkv.errors import UnsupportedModelError

from .adapters import of_rows
from .image_numbers import FIRST_IMAGE_NUMBER
from .images import image_token_of
from .model import text_config
from .release import CACHE
from .texts import TYPES, UNKNOWN, Texts, beside_text, furthest, placeholders, types_of

# Arguments with a value for each token a forward computes; embeddings have one more dimension.
_OF_TOKENS = ("input_ids", "position_ids", *TYPES, "cache_position")

SHARES_NOTHING = (
    "generate was given rows that share no token with what its cache holds of them, which is given "
    "up: whole rows are expected, for example torch.cat([prefix, question], dim=-1)"
)


class Entry:
    """How the rows of a batch enter a cache that holds a text for each of them.

    Args:
        texts: what the rows hold.
        arguments: the forward's: ids or embeddings of the rows, or of their last columns, and the
            mask of all columns.
        model: the cache's model; its embedding compares given embeddings with ids.
        numbers: `[B, q]`, numbers of image tokens among the ids, 0 for others; None for none.

    Attributes:
        lengths: `[B]`, how many tokens each row shares with its held text.
        shares_nothing: whether whole rows were given and none begins like its held text.

    Raises:
        UnsupportedModelError: a row leaves its text among or behind tokens with unknown ids.
    """

    def __init__(
        self,
        texts: Texts,
        arguments: Mapping[str, Any],
        model: PreTrainedModel,
        numbers: Tokens | None = None,
    ) -> None:
        self._arguments, self._beside = arguments, beside_text(arguments)
        self._held, self._ids = held, ids = texts.lengths, texts.ids
        self._positions, self._adapters = texts.positions, dict(enumerate(of_rows(model)))
        given: Tensor = given_to(arguments)
        self._real = real = _real_tokens(arguments, texts)
        self._first = real.shape[1] - given.shape[1]  # the first column that is given
        self._places = places = np.where(real, real.cumsum(1) - 1, -1)[:, self._first :]
        within = (places >= 0) & (places < held[:, None])
        expected = np.take_along_axis(ids, places.clip(0, ids.shape[1] - 1), 1)
        # Ids that stand for something beside the text, and have no number.
        stands_in = _stands_in(given, model, numbers is not None)
        numbers = np.zeros_like(expected) if numbers is None else numbers
        self._stands_in = stands_in & (numbers == 0)
        untold = (expected == UNKNOWN) & ~bool(self._beside)
        plain = (expected >= 0) & (expected < FIRST_IMAGE_NUMBER)
        told = torch.from_numpy(np.where(plain, expected, 0)).to(given.device)
        same = _same(given, told, model) & plain & (numbers == 0) | untold
        if self._beside:
            same &= ~self._stands_in
        at: Any = arguments.get("position_ids")
        if at is None:  # the model counts columns
            at, even = np.arange(self._first, real.shape[1]), True
        else:
            at, even = furthest(at[..., -given.shape[1] :])
        same &= even & _untyped(arguments, given.shape[1], model)
        same |= (numbers > 0) & (numbers == expected)
        same &= at == np.take_along_axis(texts.positions, places.clip(0, ids.shape[1] - 1), 1)
        self._numbered = numbers > 0
        apart = within & ~same
        until = np.minimum(np.where(apart, places, ids.shape[1]).min(1), held)
        if not given.is_floating_point() and not self._beside:
            whole = real.sum(1)
            self._require_told(np.minimum(until, whole), (until < held) | (whole <= held))
        keep = arguments.get("logits_to_keep")
        self._logits = keep if isinstance(keep, int) and keep else 1
        self._hidden = real[:, : self._first].sum(1)
        self.lengths = np.maximum(np.minimum(until, real.sum(1) - self._logits), self._hidden)
        self.shares_nothing = not self._first and not until.any() and bool(held.all())
        self.spare: dict[Any, int] = {}

    def _require_told(self, until: Ints, leaves: Bools) -> None:
        """Raises if a row leaves its text next to a token whose id is unknown."""
        untold = (self._ids == UNKNOWN) & self._within_held
        behind = np.where(untold.any(1), self._ids.shape[1] - untold[:, ::-1].argmax(1), 0)
        if (leaves & (until <= behind) & (behind > 0)).any():
            raise UnsupportedModelError(
                f"{CACHE}: a row differs from what is held of it next to tokens that were given as "
                "embeddings, images or audio, which ids cannot be compared with; start a new cache"
            )

    def _require_seen(self) -> None:
        """Raises if tokens of images are left to compute, but no images were given."""
        holds = ((self._ids >= FIRST_IMAGE_NUMBER) & self._within_held).any(1)
        left = (self._numbered | self._stands_in) & self._todo
        if not self._beside and (left.any(1) & holds).any():
            raise UnsupportedModelError(
                f"{CACHE}: tokens of an image have to be computed, and no image was given: a row "
                "differs from what is held of it before the image, or has one more. Give generate "
                "whole rows with all of their images, as the processor returns them: what the "
                "cache holds of these it does not compute again"
            )

    def allow(self, kv: PagedKVCache, rows: list[int]) -> None:
        """Shortens what rows share where the cache cannot be cut."""
        before = self.lengths.copy()
        for i, row in enumerate(rows):
            try:
                kv.require_truncatable(row, int(self.lengths[i]))
            except ValueError:
                self.lengths[i] = 0
        # A recurrent state takes in every computed column, even one that it has taken in before.
        if kv.config.states and not self.left.all():
            self.lengths[:] = 0
        if not given_to(self._arguments).is_floating_point() and not self._beside:
            self._require_told(self.lengths, self.lengths < before)
        self._require_seen()
        if (self.lengths < self._hidden).any():
            raise UnsupportedModelError(
                f"{CACHE}: rows differ from the text in this cache, and it cannot be cut "
                "where they do; pass whole rows with their attention_mask, or start a new cache"
            )

    @property
    def _within_held(self) -> Bools:
        return np.arange(self._ids.shape[1]) < self._held[:, None]

    @property
    def _todo(self) -> Bools:
        return self._places >= self.lengths[:, None]

    @property
    def _cut(self) -> int:
        """How many of the given columns no row needs computed.

        Images are given for all of their tokens, so these are cut off together or not at all.
        """
        if not self.lengths.any():
            return 0
        needed, columns = self._todo.any(0), self._places.shape[1]
        most = max(0, columns - self._logits)
        cut = min(int(needed.argmax()), most) if needed.any() else most
        shown = (self._numbered | self._stands_in).any(0)
        return min(cut, int(shown.argmax())) if self._beside and shown[cut:].any() else cut

    @property
    def seen(self) -> int:
        """How many columns stand before the computed ones."""
        return self._first + self._cut

    @property
    def kept(self) -> Bools | None:
        """`[B, seen]`, which tokens of these columns are no padding; None for all."""
        kept = self._real[:, : self.seen]
        return None if kept.all() else kept

    @property
    def left(self) -> Bools:
        """`[B, q]`, which tokens of the computed columns the cache does not hold."""
        return self._todo[:, self._cut :]

    @property
    def arguments(self) -> dict[str, Any]:
        """The arguments of a forward of the computed columns alone."""
        cut, columns, found = self._cut, self._places.shape[1], dict(self._arguments)
        for name in _OF_TOKENS:
            if isinstance(found.get(name), Tensor) and found[name].shape[-1] == columns:
                found[name] = found[name][..., cut:]
        if found.get("inputs_embeds") is not None:
            found["inputs_embeds"] = found["inputs_embeds"][:, cut:]
        if self._numbered.any() and not (self._numbered | self._stands_in)[:, cut:].any():
            for name in self._beside:  # these images are held
                del found[name]
        return found

    def cut(self, kv: PagedKVCache, rows: list[int]) -> None:
        """Cuts each row where it leaves its text.

        Raises:
            TooManySequencesError: no sequence is free to keep a text whole meanwhile.
        """
        shorter = self.lengths < self._held
        for key, alike in self._alike().items():
            if shorter[alike].all():
                self.spare[key] = kv.fork(rows[alike[0]])[0]
        for i in np.flatnonzero(shorter):
            kv.truncate(rows[i], int(self.lengths[i]))

    def _alike(self) -> dict[Any, list[int]]:
        """Groups rows by what K and V depend on; a row with unknown tokens is like no other."""
        found: dict[Any, list[int]] = {}
        for i, length in enumerate(self._held):
            text, at = self._ids[i, :length], self._positions[i, :length]
            same = text.tobytes(), at.tobytes(), self._adapters.get(i)
            key = (i, None) if (text == UNKNOWN).any() else same
            found.setdefault(key, []).append(i)
        return found

    def undo(self, kv: PagedKVCache, rows: list[int]) -> list[int]:
        """Restores the rows as they were before `cut`; returns their ids, which may be new."""
        restored = [*rows]
        for key, alike in self._alike().items():
            short = [i for i in alike if kv.length(rows[i]) < self._held[i]]
            whole = [rows[i] for i in alike if i not in short]
            if short:
                kv.free([rows[i] for i in short])
                for i, row in zip(short, kv.fork(self.spare.get(key, *whole[:1]), len(short))):
                    restored[i] = row
        self.end(kv)
        return restored

    def end(self, kv: PagedKVCache) -> None:
        """Gives back the sequences that were kept for `undo`."""
        kv.free([*self.spare.values()])
        self.spare.clear()


def require_new(
    arguments: Mapping[str, Any], seen: int, least: int, model: PreTrainedModel
) -> None:
    """Raises if `generate` feeds a cache that knows no ids some of its tokens again.

    The width of the mask shows it, or positions: newer releases pass no mask without padding.

    Args:
        seen: tokens that the cache holds, padding included.
        least: how far the next position is ahead of `seen` at least.
    """
    places, mask = arguments.get("position_ids"), arguments.get("attention_mask")
    given = given_to(arguments)
    new = given.shape[1] if isinstance(given, Tensor) else None
    if mask is not None and new != 0:
        if new is not None and mask.ndim == 2 and mask.shape[1] < new:
            raise ValueError(
                f"attention_mask: expected a column for each of {new} tokens, got "
                f"{list(mask.shape)}; the cache holds {seen} tokens already, and they count as well"
            )
        return
    if places is None:
        raise UnsupportedModelError(
            f"{CACHE}: {type(model).__name__} is told neither a mask nor positions by which to see "
            f"whether it is fed any of the {seen} tokens that are held again; start a new cache "
            "for each turn"
        )
    if new == 0 or not places.numel() or int(places.min()) < seen + least:
        raise ValueError(
            f"{CACHE}: holds {seen} tokens, and generate feeds some of them again: the ids are no "
            "longer than what it holds, or drafts are asked for (assistant_model, "
            "prompt_lookup_num_tokens) behind it. Pass longer ids, crop the cache, or start a new "
            "one"
        )


def can_enter(arguments: Mapping[str, Any], whole: bool) -> bool:
    """Whether a forward is given enough of its rows to compare them with a prefix.

    Args:
        whole: whether whole rows were asked for.
    """
    given, mask = given_to(arguments), arguments.get("attention_mask")
    places = arguments.get("position_ids")
    if given is None or (places is not None and places.ndim not in (2, 3)):
        return False
    if mask is None:
        return whole or places is not None
    return bool(mask.ndim == 2 and mask.shape[1] >= given.shape[1])


def given_to(arguments: Mapping[str, Any]) -> Any:
    """Returns the ids of a forward, `[B, q]`, or its embeddings, `[B, q, width]`."""
    ids = arguments.get("input_ids")
    return arguments.get("inputs_embeds") if ids is None else ids


def _real_tokens(arguments: Mapping[str, Any], texts: Texts) -> Bools:
    """Returns which tokens of all columns are no padding: `[B, total]`."""
    mask, given = arguments.get("attention_mask"), given_to(arguments)
    if mask is not None:
        return np.asarray((mask != 0).cpu().numpy())
    # Newer releases drop a mask of ones; then positions tell whole rows from rows behind a prefix.
    places, cached = arguments.get("position_ids"), texts.ids.shape[1]
    behind = texts.lengths + texts.ahead
    rest = places is not None and bool((furthest(places[..., :1])[0][:, 0] == behind).all())
    return np.ones((len(given), given.shape[1] + cached * rest), bool)


def _stands_in(given: Tensor, model: PreTrainedModel, images: bool) -> Bools:
    """Returns which ids may stand for something else than text, `[B, q]`; none of embeddings.

    Args:
        images: whether only image tokens may do so.
    """
    if given.is_floating_point():
        return np.zeros(given.shape[:2], bool)
    ids: Any = [image_token_of(model.config)] if images else placeholders(model.config)
    return np.isin(given.cpu().numpy(), ids) if ids else np.ones(given.shape, bool)


def _untyped(arguments: Mapping[str, Any], columns: int, model: PreTrainedModel) -> Any:
    """Returns which tokens have type 0, as the prefix had: `[B, q]`, or a bool for all.

    Type 0 is text where other types are images. In a decoder of text alone, types have embeddings.
    """
    if arguments.get("token_type_ids") is not None and text_config(model) is model.config:
        return False
    types = types_of(arguments, ("token_type_ids", "mm_token_type_ids"), columns)
    texts = [(one == 0).cpu().numpy() for one in types]
    return np.logical_and.reduce(texts) if texts else True


def _same(given: Tensor, expected: Tensor, model: PreTrainedModel) -> Bools:
    """Returns where ids or embeddings of a forward agree with the expected ids: `[B, q]`."""
    if given.is_floating_point():
        table = model.get_input_embeddings()
        return np.asarray((given == table(expected)).all(-1).cpu().numpy())
    return np.asarray((given == expected).cpu().numpy())
