"""Positions of models that see images: how far they differ from a row's token count.

An image takes fewer positions than tokens. Such a model keeps the difference of the prompt it saw
last as an attribute, and adds it to the positions of any row that goes on. So each cache keeps the
differences of its own rows, and while a model is attached each thread has an attribute of its own:
`generate` sets it before the forward that has its turn, and cannot be stopped in between.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

# The part of each model that keeps the difference, None for models without one.
_HOLDERS: weakref.WeakKeyDictionary[PreTrainedModel, weakref.ref[torch.nn.Module] | None] = (
    weakref.WeakKeyDictionary()
)


def holder_of(model: PreTrainedModel) -> Any:
    """The part of a model that has `rope_deltas`, `[B, 1]` or None; None for most models."""
    if model not in _HOLDERS:
        found = next((part for part in model.modules() if "rope_deltas" in vars(part)), None)
        _HOLDERS[model] = None if found is None else weakref.ref(found)
    holder = _HOLDERS[model]
    return None if holder is None else holder()


class _Thread(threading.local):
    """The deltas that this thread has given to models."""

    def __init__(self) -> None:
        self.deltas: weakref.WeakKeyDictionary[Any, Tensor | None] = weakref.WeakKeyDictionary()


_thread = _Thread()


class _PerThread:
    """What the class of a holder is made to begin with."""

    @property
    def rope_deltas(self) -> Tensor | None:
        return _thread.deltas.get(self, vars(self)["rope_deltas"])

    @rope_deltas.setter
    def rope_deltas(self, deltas: Tensor | None) -> None:
        _thread.deltas[self] = deltas

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A copy is of the model's own class, with what this thread has."""
        reduced: Any = super().__reduce_ex__(protocol)
        own = type(self).__mro__[2]
        return object.__new__, (own,), {**reduced[2], "rope_deltas": self.rope_deltas}


class DeltasPerThread:
    """Gives each thread a `rope_deltas` of its own, until it is removed."""

    def __init__(self, holder: torch.nn.Module) -> None:
        own = type(holder)
        self._own, self._made = own, type(own.__name__, (_PerThread, own), {})
        self._holder = weakref.ref(holder)
        holder.__class__ = self._made

    def remove(self) -> None:
        """Leaves the model with what this thread has."""
        holder = self._holder()
        if holder is not None and type(holder) is self._made:
            deltas = holder.rope_deltas
            holder.__class__ = self._own
            holder.rope_deltas = deltas


class Offsets:
    """The `rope_deltas` that a cache's rows were computed with."""

    def __init__(self, model: PreTrainedModel, deltas: Tensor | None = None) -> None:
        self._holder, self._deltas = holder_of(model), deltas

    def record(self, rows: int) -> None:
        """Takes the deltas from the model, after the first forward of these rows.

        The model has one delta for each prompt; `generate` makes several rows of a prompt, as beams
        or samples.

        Args:
            rows: how many rows the cache has.
        """
        if self._holder is None:
            return
        self._deltas = deltas = self._holder.rope_deltas
        if deltas is not None and len(deltas) > 1:
            self._deltas = deltas.repeat_interleave(rows // len(deltas), dim=0)

    @property
    def least(self) -> int:
        """The least of the rows' deltas: 0 without images, else mostly negative."""
        return 0 if self._deltas is None else int(self._deltas.min())

    def restore(self) -> None:
        """Gives the model these deltas, whatever prompts it has seen in between."""
        if self._holder is not None:
            self._holder.rope_deltas = self._deltas

    def begin(self, arguments: Mapping[str, Any]) -> None:
        """Clears the model's deltas before a first forward of text alone, which would keep them."""
        plain = ("position_ids", "mm_token_type_ids", "inputs_embeds")
        if self._holder is not None and all(arguments.get(name) is None for name in plain):
            self._holder.rope_deltas = None

    def of_rows(self, model: PreTrainedModel, index: Sequence[int]) -> Offsets:
        """The deltas of the rows with these indices, in this order."""
        deltas = self._deltas
        if deltas is not None and len(deltas) > 1:  # one is for all rows
            deltas = deltas[list(index)]
        return Offsets(model, deltas)
