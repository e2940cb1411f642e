"""Gathers all K and V, for a model that was switched to another attention than ours."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from pagedkv.arrays import Bools
from pagedkv.attention.api import gather_kv, write_kv
from pagedkv.errors import UnsupportedModelError

from .forward_cache import ForwardCache
from .layer import PagedLayer
from .transaction import by_hand


def write_and_gather(
    cache: ForwardCache, kept: Bools | None, layer: PagedLayer, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor]:
    """Writes K and V `[B, G, q, D]` and returns all K and V of the layer, padded as they came.

    Another attention does not give the mask to the cache, so padding tokens are stored, too.

    Args:
        kept: `[B, seen]`, which tokens of the cache are stored; None for all.
    """
    if cache.kv.config.policy is not None:
        raise UnsupportedModelError(
            "retention: evicted tokens can be left out by paged attention alone; the model was "
            "switched to another implementation"
        )
    new = k.shape[2]
    if layer.is_first:
        stored = None
        if kept is not None:
            past = np.ones((k.shape[0], new), bool)
            stored = torch.from_numpy(np.concatenate([kept, past], axis=1))
        with by_hand(cache):
            cache.open_step(k.shape, stored)
    assert cache.opened is not None, "without a mask every row has new tokens"
    new_k, new_v = cache.packed(k), cache.packed(v)
    if cache.kv.config.shapes[cache.opened.group_of(layer.index)].v_is_k:
        new_v = new_k[..., : v.shape[3]]
    write_kv(new_k, new_v, cache.opened, layer.index)
    if kept is not None:
        kept = np.concatenate([kept, np.ones((len(kept), new), bool)], axis=1)
    held = gather_kv(cache.opened, layer.index)
    whole = _in_columns(held, kept, cache.seen + new)
    layer.end_by_hand(cache)
    return whole


def read(cache: ForwardCache, kept: Bools | None, layer: PagedLayer) -> tuple[Tensor, Tensor]:
    """Returns copies of all committed K and V of a layer, padded as they came."""
    kv, index = cache.kv, layer.index
    if cache.touched:
        raise UnsupportedModelError(
            f"layers[{index}]: K and V are read between forwards; within one they are not whole"
        )
    if kv.config.policy is not None:
        raise UnsupportedModelError(
            f"layers[{index}]: of a cache with `retention` the tokens that are left are read by "
            "`cache.kv.gather`, and `cache.kv.positions` says which they are"
        )
    return _in_columns([kv.gather(row, index) for row in cache.rows], kept, cache.seen)


def _in_columns(
    held: Sequence[tuple[Tensor, Tensor]], kept: Bools | None, columns: int
) -> tuple[Tensor, Tensor]:
    """Puts K and V of rows' last tokens, `[n, G, D]` each, into `[B, G, columns, D]`.

    Args:
        kept: `[B, columns]`, in which columns the rows have tokens; None for all.
    """
    whole = [x.new_zeros(len(held), columns, *x.shape[1:]) for x in held[0]]
    for row, parts in enumerate(held):
        count = len(parts[0])
        at: slice | Tensor = slice(columns - count, None)
        if kept is not None:
            places = np.flatnonzero(kept[row])
            at = torch.from_numpy(places[len(places) - count :]).to(parts[0].device)
        for into, tokens in zip(whole, parts):
            into[row, at] = tokens
    keys, values = (x.transpose(1, 2) for x in whole)
    return keys, values
