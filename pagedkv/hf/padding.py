"""Finds which tokens of a padded batch a step has, and where they are."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pagedkv.arrays import Bools, Ints


class Packing(NamedTuple):
    """Tokens of a padded batch `[B, n]`, packed row after row.

    Attributes:
        places: `[T]`, where each is in `[B * n]`, on the host; None for all in order.
        counts: how many there are of each row that has tokens in the step.
    """

    places: Ints | None
    counts: Ints


def packing(batch: int, new: int, computed: Bools | None) -> Packing:
    """The packing of the last `new` tokens of each row.

    Args:
        computed: `[B, q]`, which of these tokens the step has; None for all.
    """
    if computed is None:
        return Packing(None, np.full(batch, new))
    last = computed[:, -new:].copy()
    # A row of the step has at least one query, if only one in vain: padding is never read.
    last[:, -1] |= computed.any(1) & ~last.any(1)
    counts = last.sum(1)
    return Packing(np.flatnonzero(last), counts[counts > 0])


class Packings:
    """The packing of all tokens of a forward, and of the last of each row, which some layers see.

    Args:
        batch: rows.
        computed: `[B, q]`, which tokens the step has; None for all.
    """

    def __init__(self, batch: int, computed: Bools | None) -> None:
        self._batch, self._computed = batch, computed
        self._made: dict[int, Packing] = {}
        self._places: dict[tuple[int, torch.device], Tensor] = {}

    def of(self, new: int) -> Packing:
        """Where the last `new` tokens of each row go."""
        if new not in self._made:
            self._made[new] = packing(self._batch, new, self._computed)
        return self._made[new]

    def _at(self, new: int, device: torch.device) -> Tensor | None:
        """The places of the last `new` tokens, on the device of a layer."""
        places = self.of(new).places
        if places is None:
            return None
        if (new, device) not in self._places:
            self._places[new, device] = torch.from_numpy(places).to(device)
        return self._places[new, device]

    def packed(self, x: Tensor) -> Tensor:
        """Tokens of `[B, heads, q, D]` that are computed, row after row: `[T, heads, D]`."""
        places = self._at(x.shape[2], x.device)
        x = x[:, :, 0] if x.shape[2] == 1 else x.transpose(1, 2).flatten(0, 1)
        return x if places is None else x[places]

    def unpacked(self, out: Tensor, query: Tensor) -> Tensor:
        """`[T, H, D]` back to `[B, q, H, D]`, zeros for tokens that are not computed."""
        batch, _, new, _ = query.shape
        places = self._at(new, out.device)
        if places is not None:
            padded = out.new_zeros(batch * new, *out.shape[1:])
            padded[places] = out
            out = padded
        return out.view(batch, new, *out.shape[1:])
