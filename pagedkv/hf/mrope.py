"""Positions of models that see images: how far they differ from a row's token count.

An image takes fewer positions than tokens. Such a model keeps the difference for its latest prompt
as an attribute, and adds it to the positions of any row that goes on. So each cache gives the model
the differences of its own rows before anything asks for positions. While a model is attached, each
thread has an attribute of its own: `generate` sets it before the forward takes its turn, and cannot
be stopped in between.

`generate` asks for positions of whole rows before it looks at its cache. Behind tokens of a cache,
transformers counts on from the difference, or places new images without the ones before them. So a
cache that knows its rows answers here: it lets the model place whole rows, as without a cache, and
if their images are not given again, it goes on from the images that it holds.
"""

from __future__ import annotations

import threading
import types
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from pagedkv.arrays import Tokens
from pagedkv.errors import UnsupportedModelError

from .forward_cache import ForwardCache
from .image_numbers import FIRST_IMAGE_NUMBER, numbers_in
from .images import GRID, image_token_of
from .texts import UNKNOWN, Texts, beside_text, placeholders

PREPARE = "_prepare_position_ids_for_generation"
WHOLE_ROWS = (
    "transformers does not place images behind cached tokens. Give `generate` the whole "
    "conversation with all of its images, as the processor returns it, with {} cache"
)

# The part of each model that keeps the difference, None for models without one.
_HOLDERS: weakref.WeakKeyDictionary[PreTrainedModel, weakref.ref[torch.nn.Module] | None] = (
    weakref.WeakKeyDictionary()
)


def holder_of(model: PreTrainedModel) -> Any:
    """Returns the part of a model that has `rope_deltas`, `[B, 1]` or None; most have no part."""
    if model not in _HOLDERS:
        found = next((part for part in model.modules() if "rope_deltas" in vars(part)), None)
        _HOLDERS[model] = None if found is None else weakref.ref(found)
    holder = _HOLDERS[model]
    return None if holder is None else holder()


class _PerThread:
    """The first base of a holder's class while each thread has its own `rope_deltas`.

    Attributes:
        own: has the `deltas` that each thread gave the holder. A thread that gave none sees those
            that the holder had before.
        users: how many attachments of models have the holder as a part.
    """

    own: threading.local
    users: int

    @property
    def rope_deltas(self) -> Tensor | None:
        deltas: Tensor | None = getattr(self.own, "deltas", vars(self)["rope_deltas"])
        return deltas

    @rope_deltas.setter
    def rope_deltas(self, deltas: Tensor | None) -> None:
        self.own.deltas = deltas

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Makes copies of the model's own class, with the deltas of this thread."""
        reduced: Any = super().__reduce_ex__(protocol)
        own = type(self).__mro__[2]
        return object.__new__, (own,), {**reduced[2], "rope_deltas": self.rope_deltas}


class DeltasPerThread:
    """Gives each thread its own `rope_deltas`, until the last object for a holder is removed."""

    def __init__(self, holder: torch.nn.Module) -> None:
        self._holder = weakref.ref(holder)
        own = type(holder)
        if not issubclass(own, _PerThread):  # else another model with this part has done it
            members = {"own": threading.local(), "users": 0}
            holder.__class__ = type(own.__name__, (_PerThread, own), members)
        type(holder).users += 1  # type: ignore[attr-defined]

    def remove(self) -> None:
        """Leaves the model with the deltas of this thread."""
        holder: Any = self._holder()
        if holder is None:
            return
        type(holder).users -= 1
        if not holder.users:
            deltas = holder.rope_deltas
            holder.__class__ = type(holder).__mro__[2]
            holder.rope_deltas = deltas


class Offsets:
    """The `rope_deltas` of a cache's rows, read off their texts when they are first needed."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.holder = holder_of(model)
        self._deltas: Tensor | None = None

    def restore(self, texts: Texts) -> None:
        """Gives the model the deltas of these rows: it may have seen other prompts in between."""
        if self.holder is None:
            return
        if self._deltas is None:
            place = next(self.holder.parameters()).device
            self._deltas = torch.from_numpy(texts.ahead).to(place)[:, None]
        self.holder.rope_deltas = self._deltas

    def forget(self) -> None:
        """Forgets the deltas when rows or images have changed; they are read anew."""
        self._deltas = None

    def require_placed(self, arguments: Mapping[str, Any], config: Any) -> None:
        """Raises if a forward behind cached tokens is given images and no positions."""
        if self.holder is None or arguments.get("position_ids") is not None:
            return
        beside, ids = beside_text(arguments), arguments.get("input_ids")
        if beside and (ids is None or np.isin(ids.cpu().numpy(), placeholders(config)).any()):
            raise UnsupportedModelError(
                f"{', '.join(beside)}: got new images behind the tokens of a cache; "
                + WHOLE_ROWS.format("this")
            )


# ------------------------------------------------------------------ what generate asks


class Prepared(NamedTuple):
    """Positions and image numbers that a `generate` has prepared for the rows of its prompts.

    Newer releases compute features of images before the first forward, which is no longer given
    the images. Its tokens and positions show that it is the forward that was prepared.

    Attributes:
        ids, positions: `[B, n]` and `[axes, B, n]`.
        numbers: `[B, n]`, numbers of image tokens, 0 for others.
    """

    ids: Tensor
    positions: Tensor
    numbers: Tokens

    def of(self, arguments: Mapping[str, Any], begin: int) -> Tokens | None:
        """Returns the numbers of a forward's tokens, `[rows, q]`; None if others were prepared.

        Args:
            begin: the column of the forward's first token.

        Raises:
            UnsupportedModelError: the forward leaves out tokens of images that were not given.
        """
        ids, places = arguments.get("input_ids"), arguments.get("position_ids")
        columns = slice(begin, begin + (0 if ids is None else ids.shape[1]))
        said, at = self.ids[:, columns], self.positions[..., columns]
        if ids is None or places is None or not said.numel() or len(ids) % len(said):
            return None
        n, width = len(ids) // len(said), said.shape[1]  # drafts may stand behind
        said, at = said.repeat_interleave(n, 0), at.repeat_interleave(n, -2)
        same = (ids[:, :width].cpu() == said.cpu()).all()
        if places[..., :width].shape != at.shape or not same:
            return None
        if not torch.equal(places[..., :width].cpu(), at.cpu()):
            return None
        if self.numbers[:, columns.stop :].any() and not beside_text(arguments):
            raise UnsupportedModelError(
                "prefill_chunk_size: images that the cache holds were not given again, and their "
                "tokens are behind the first chunk, which would be computed anew; leave it out"
            )
        numbers = np.zeros(ids.shape, np.int32)
        numbers[:, :width] = self.numbers[:, columns].repeat(n, 0)
        return numbers


class Placing:
    """Asks a cache for the positions of whole rows, until it is removed."""

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = weakref.ref(model)
        setattr(model, PREPARE, partial(_prepare, model))  # a copy can be made of it

    def remove(self) -> None:
        """Gives the model its own method back."""
        model = self._model()
        if model is not None:
            vars(model).pop(PREPARE, None)


def placing(model: PreTrainedModel) -> list[Placing]:
    """The hooks by which `generate` asks a cache for positions; most models need none."""
    return [] if holder_of(model) is None or not hasattr(model, PREPARE) else [Placing(model)]


def _prepare(model: Any, inputs: Tensor, arguments: dict[str, Any]) -> Tensor:
    make: Callable[..., Tensor] = types.MethodType(getattr(type(model), PREPARE), model)
    cache = next((x for x in arguments.values() if isinstance(x, ForwardCache)), None)
    if cache is None:
        return make(inputs, arguments)
    whole = {name: value for name, value in arguments.items() if value is not cache}
    beside, ids = beside_text(whole), whole.get("input_ids")
    ids = inputs if ids is None or not ids.shape[1] else ids
    if cache.rows and not cache.knows_texts:
        if beside:
            raise UnsupportedModelError(
                f"{', '.join(beside)}: got images beside a cache whose tokens nobody told of; "
                + WHOLE_ROWS.format("a new")
            )
        return make(inputs, arguments)
    try:
        positions = make(inputs, whole)
    except Exception as error:
        if not beside or not cache.rows:
            raise
        raise ValueError(
            f"{GRID}: expected the grids of all images of the rows, the model raised "
            f"{type(error).__name__} {error}; " + WHOLE_ROWS.format("this or a new")
        ) from error
    numbers = None
    if not ids.is_floating_point():
        if beside:
            numbers = numbers_in(ids, beside, model.config)
        elif cache.rows and not len(cache.rows) % len(ids):
            positions, numbers = _going_on(
                model, cache, ids, whole.get("attention_mask"), positions
            )
    cache.prepared = None if numbers is None else Prepared(ids, positions, numbers)
    return positions


def _going_on(
    model: PreTrainedModel, cache: ForwardCache, ids: Tensor, mask: Any, positions: Tensor
) -> tuple[Tensor, Tokens | None]:
    """Returns positions of whole rows that go on behind a cache, and numbers of its images."""
    every = len(cache.rows) // len(ids)  # each prompt becomes so many rows
    texts = cache.texts
    held, lengths, at = texts.ids[::every], texts.lengths[::every], texts.positions[::every]
    real = np.ones(ids.shape, bool) if mask is None else (mask != 0).cpu().numpy()
    places = np.where(real, real.cumsum(1) - 1, -1)
    within = (places >= 0) & (places < lengths[:, None])
    there = places.clip(0, held.shape[1] - 1)
    said = np.take_along_axis(held, there, 1)
    first = real.shape[1] - ids.shape[1]  # columns before it are not given: the cache holds them
    told = np.concatenate([said[:, :first], ids.cpu().numpy()], axis=1)
    numbered = said >= FIRST_IMAGE_NUMBER
    image = numbered & (told == image_token_of(model.config))
    same = (said == told) | image | (said == UNKNOWN)
    shared = np.where(within & ~same, places, lengths[:, None]).min(1)
    going = (places >= 0) & (places < shared[:, None])
    end = np.where(np.arange(held.shape[1]) < shared[:, None], at, -1).max(1) + 1
    if (end == shared).all() and not (going & numbered).any():
        return positions, None
    counted = np.where(going, np.take_along_axis(at, there, 1), places + (end - shared)[:, None])
    where = torch.from_numpy(real).to(positions.device)
    positions = torch.where(where, torch.from_numpy(counted).to(positions), positions)
    return positions, None if first else np.where(going & numbered, said, 0)
