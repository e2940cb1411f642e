"""Positions of models that see images: how far they are ahead of a row's tokens.

An image takes fewer positions than tokens. Such a model keeps the difference on itself, of the
prompt it saw last, and adds it to the positions of whatever row goes on. A cache keeps its own.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

# Where each model keeps it, None for those without.
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


class Offsets:
    """The `rope_deltas` that a cache's rows were computed with."""

    def __init__(self, model: PreTrainedModel, deltas: Tensor | None = None) -> None:
        self._holder, self._deltas = holder_of(model), deltas

    def record(self, rows: int) -> None:
        """Takes them from the model, whose forward has just computed the first tokens of `rows`.

        The model has one of each prompt, of which `generate` makes several rows: beams, samples.
        """
        if self._holder is None:
            return
        self._deltas = deltas = self._holder.rope_deltas
        if deltas is not None and len(deltas) > 1:
            self._deltas = deltas.repeat_interleave(rows // len(deltas), dim=0)

    def restore(self) -> None:
        """Puts them back, whatever prompts the model has seen in between."""
        if self._holder is not None:
            self._holder.rope_deltas = self._deltas

    def begin(self, arguments: Mapping[str, Any]) -> None:
        """Before a first forward: text alone is ahead by nothing, and the model would not say."""
        plain = ("position_ids", "mm_token_type_ids", "inputs_embeds")
        if self._holder is not None and all(arguments.get(name) is None for name in plain):
            self._holder.rope_deltas = None

    def of_rows(self, model: PreTrainedModel, index: Sequence[int]) -> Offsets:
        """Those of the rows named, in that order."""
        deltas = self._deltas
        if deltas is not None and len(deltas) > 1:  # one is for all rows
            deltas = deltas[list(index)]
        return Offsets(model, deltas)
