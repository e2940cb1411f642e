"""Token ids as callers give them, as packed int32 arrays."""

from __future__ import annotations

from typing import Any

import numpy as np

from .pool import Ints
from .prefix import Tokens


def as_ids(name: str, tokens: Any) -> Tokens:
    """Token ids as int32, checked: `[n]`."""
    ids = np.asarray(tokens)
    if ids.size == 0 and ids.dtype.kind == "f":  # an empty list has no integer type
        ids = ids.astype(np.int64)
    if ids.dtype.kind not in "iu":
        raise TypeError(f"{name}: expected integer ids, got {ids.dtype}")
    if ids.ndim != 1:
        raise ValueError(f"{name}: expected one dimension, got shape {ids.shape}")
    if ids.size and (ids.min() < 0 or ids.max() > 2**31 - 1):
        raise ValueError(f"{name}: expected ids in 0..2**31 - 1, got {ids.min()}..{ids.max()}")
    return ids.astype(np.int32)


def pack(name: str, tokens: Any, batch: int, may_be_empty: bool = False) -> tuple[Tokens, Ints]:
    """Ids of several sequences, packed, and how many each has."""
    if hasattr(tokens, "dtype") or not any(map(_has_length, tokens)):
        flat = np.asarray(tokens)
        if flat.ndim == 0 or flat.shape[0] != batch or flat.ndim > 2:
            raise ValueError(
                f"{name}: expected ids of {batch} sequences, got shape {list(flat.shape)}"
            )
        each = 1 if flat.ndim == 1 else flat.shape[1]
        parts, new = as_ids(name, flat.reshape(-1)), np.full(batch, each, dtype=np.int64)
    else:
        if len(tokens) != batch:
            raise ValueError(f"{name}: expected ids of {batch} sequences, got {len(tokens)}")
        lists = [as_ids(name, part) for part in tokens]
        parts, new = np.concatenate(lists), np.asarray([part.size for part in lists])
    if not may_be_empty and not new.all():
        raise ValueError(f"{name}: expected at least one id for every sequence, got none")
    return parts, new


def _has_length(item: Any) -> bool:
    return getattr(item, "ndim", 1) > 0 and hasattr(item, "__len__")


def first_of_each(count: Ints, kept: Ints) -> Ints:
    """Indices of the first `kept[b]` of `count[b]` packed items of every sequence."""
    start = np.repeat(np.cumsum(count) - count, kept)
    return start + np.arange(start.size) - np.repeat(np.cumsum(kept) - kept, kept)
