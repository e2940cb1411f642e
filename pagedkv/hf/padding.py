"""Finds which tokens of a padded batch a step has, and where they are."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pagedkv.arrays import Bools, Ints
from pagedkv.errors import UnsupportedModelError


class Packing(NamedTuple):
    """Tokens of a padded batch `[B, n]`, packed row after row.

    Attributes:
        places: `[T]`, the place of each in `[B * n]`, on the host; None for all in order.
        counts: the number of tokens of each row that has any in the step.
    """

    places: Ints | None
    counts: Ints


def packing(batch: int, new: int, computed: Bools | None) -> Packing:
    """Makes the packing of the last `new` tokens of each row.

    Args:
        computed: `[B, q]`, which tokens the step has; None for all.
    """
    if computed is None:
        return Packing(None, np.full(batch, new))
    last = computed[:, -new:].copy()
    # Each row of a step needs at least one query; the output of one that is padding is not read.
    last[:, -1] |= computed.any(1) & ~last.any(1)
    counts = last.sum(1)
    return Packing(np.flatnonzero(last), counts[counts > 0])


class Packings:
    """The packings of a forward: of all tokens, and of each row's last ones for some layers.

    Args:
        batch: rows.
        computed: `[B, q]`, which tokens the step has; None for all.
    """

    def __init__(self, batch: int, computed: Bools | None) -> None:
        self._batch, self._computed = batch, computed
        self._made: dict[int, Packing] = {}
        self._places: dict[tuple[int, torch.device], Tensor] = {}

    def of(self, new: int) -> Packing:
        """Returns the packing of the last `new` tokens of each row."""
        if new not in self._made:
            self._made[new] = packing(self._batch, new, self._computed)
        return self._made[new]

    def _at(self, new: int, device: torch.device) -> Tensor | None:
        """Returns the places of the last `new` tokens, on the device of a layer."""
        places = self.of(new).places
        if places is None:
            return None
        if (new, device) not in self._places:
            self._places[new, device] = torch.from_numpy(places).to(device)
        return self._places[new, device]

    def packed(self, x: Tensor) -> Tensor:
        """Packs the tokens of `[B, heads, q, D]` that are computed, row by row: `[T, heads, D]`."""
        places = self._at(x.shape[2], x.device)
        x = x[:, :, 0] if x.shape[2] == 1 else x.transpose(1, 2).flatten(0, 1)
        return x if places is None else x[places]

    def unpacked(self, out: Tensor, query: Tensor) -> Tensor:
        """Unpacks `[T, H, D]` into `[B, q, H, D]`, zeros for tokens that are not computed."""
        batch, _, new, _ = query.shape
        places = self._at(new, out.device)
        if places is not None:
            padded = out.new_zeros(batch * new, *out.shape[1:])
            padded[places] = out
            out = padded
        return out.view(batch, new, *out.shape[1:])


def new_tokens(
    mask: Tensor | None, kept: Bools | None, batch: int, seen: int, new: int
) -> Bools | None:
    """Returns which of the new tokens are no padding: `[B, q]`, or None for all.

    Args:
        mask: `[B, seen + q]`, the forward's own; None without padding.
        kept: `[B, seen]`, which tokens are stored; None for all.

    Raises:
        ValueError: the mask has another shape.
        UnsupportedModelError: the mask contradicts the tokens that are stored.
    """
    total = seen + new
    real = None
    if mask is not None:
        if mask.shape != (batch, total):
            raise ValueError(
                f"attention_mask: expected [{batch}, {total}], got {list(mask.shape)}: the "
                f"cache holds {seen} tokens already, pass these and at least one more"
            )
        real = mask.cpu().numpy()  # the only read of a forward
        real = None if real.all() else real
    past = np.ones((batch, seen), bool) if real is None else real[:, :seen]
    stored = np.ones_like(past) if kept is None else kept
    if not (past == stored).all():
        raise UnsupportedModelError(
            f"attention_mask: the mask of the first {seen} tokens, which are cached, has changed. "
            "Whole prompts with padding before them are for caches that were told the ids of what "
            "they hold; one that was given embeddings or sequences needs the padding behind what "
            "it holds: ids = torch.cat([prefix.expand(rows, -1), padded_questions], dim=1), and "
            "the mask likewise. Else start a new cache"
        )
    return None if real is None or real[:, seen:].all() else real[:, seen:]
