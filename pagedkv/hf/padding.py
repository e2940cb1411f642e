"""Finds which tokens of a padded batch a step has, and where they are."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from pagedkv.arrays import Bools, Ints
from pagedkv.errors import UnsupportedModelError


class Packings:
    """Packs the tokens of a padded batch row after row: all, or only each row's last ones.

    Args:
        batch: rows.
        computed: `[B, q]`, which tokens the step has; None for all.
    """

    def __init__(self, batch: int, computed: Bools | None) -> None:
        self._batch, self._computed = batch, computed
        self._made: dict[int, tuple[Ints | None, Ints]] = {}
        self._places: dict[tuple[int, torch.device], Tensor] = {}

    def counts(self, new: int) -> Ints:
        """Counts the packed ones of the last `new` tokens of each row that has any in the step."""
        return self._of(new)[1]

    def _of(self, new: int) -> tuple[Ints | None, Ints]:
        """Returns the places of packed tokens in `[B * new]`, None for all, and counts of rows."""
        if new not in self._made:
            self._made[new] = None, np.full(self._batch, new)
            if self._computed is not None:
                last = self._computed[:, -new:].copy()
                # Each row of a step needs a query; the output of one that is padding is not read.
                last[:, -1] |= self._computed.any(1) & ~last.any(1)
                counts = last.sum(1)
                self._made[new] = np.flatnonzero(last), counts[counts > 0]
        return self._made[new]

    def _at(self, new: int, device: torch.device) -> Tensor | None:
        """Returns the places of the last `new` tokens, on the device of a layer."""
        places, _ = self._of(new)
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
