"""Which tokens of a padded batch a step has, and where they are."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pagedkv.arrays import Bools, Ints


class Packing(NamedTuple):
    """Tokens of a padded batch `[B, n]`, packed row after row.

    Attributes:
        places: `[T]`, where each is in `[B * n]`; None for all in order.
        counts: how many there are of each row that has tokens in the step.
    """

    places: Tensor | None
    counts: Ints


def packing(batch: int, new: int, real: Bools | None, device: torch.device) -> Packing:
    """The packing of the last `new` tokens of each row.

    Args:
        real: `[B, q]`, which of a step's tokens are no padding; None for all.
    """
    if real is None:
        return Packing(None, np.full(batch, new))
    last = real[:, -new:].copy()
    # A row of the step has at least one query, if only one in vain: nobody reads padding.
    last[:, -1] |= real.any(1) & ~last.any(1)
    counts = last.sum(1)
    return Packing(torch.from_numpy(np.flatnonzero(last)).to(device), counts[counts > 0])
