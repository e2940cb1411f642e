"""K and V as a whole, for a model that was switched to another attention than ours."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from pagedkv.arrays import Bools
from pagedkv.attention.api import gather_kv, write_kv
from pagedkv.errors import UnsupportedModelError

from .forward import ForwardCache
from .layer import PagedLayer


def write_and_gather(
    cache: ForwardCache, kept: Bools | None, layer: PagedLayer, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor]:
    """Writes K and V `[B, G, q, D]` and returns all K and V of the layer, padded as they came.

    Under another attention a cache does not get the mask, so padding tokens are stored, too.

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
        cache.open_step(k.shape, stored)
    assert cache.opened is not None, "without a mask every row has new tokens"
    new_k, new_v = cache.packed(k), cache.packed(v)
    if cache.kv.config.shapes[cache.opened.group_of(layer.index)].v_is_k:
        new_v = new_k[..., : v.shape[3]]
    write_kv(new_k, new_v, cache.opened, layer.index)
    whole = [x.new_zeros(len(x), cache.seen + new, x.shape[1], x.shape[3]) for x in (k, v)]
    for row, held in enumerate(gather_kv(cache.opened, layer.index)):
        columns: slice | Tensor = slice(cache.seen + new - len(held[0]), None)
        if kept is not None:
            places = np.append(np.flatnonzero(kept[row]), cache.seen + np.arange(new))
            columns = torch.from_numpy(places[len(places) - len(held[0]) :]).to(k.device)
        for into, tokens in zip(whole, held):
            into[row, columns] = tokens
    layer.end_by_hand(cache)
    keys, values = (x.transpose(1, 2) for x in whole)
    return keys, values
