"""Bounds of each page's keys, by layer and channel; queries choose pages by them.

4-bit K has the bounds in its scales. Other formats keep them beside the pages, `[L, N, G, D, 2]`,
and write them when a page is complete; until then it is a newest page, which is always read.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from pagedkv.arrays import Ints
from pagedkv.config import CacheConfig
from pagedkv.errors import CorruptCacheError
from pagedkv.kernels.formats import Pages
from pagedkv.kernels.sending import sent
from pagedkv.kernels.torch import page_coding as coded
from pagedkv.kernels.torch import select_pages as sparse


class PageBounds:
    """Bounds of all pages, in groups whose queries choose pages.

    Args:
        storage: the storage of the pages.
    """

    def __init__(self, config: CacheConfig, storage: Any) -> None:
        # No reference to the storage, which has this object: a cycle would outlive the cache.
        layers = [layer for group in config.groups for layer in group.layers]
        self._keys = {layer: storage.layer(layer)[0] for layer in layers}
        self._dtype = storage.dtype
        self._groups = config.groups
        self._kept: dict[int, Tensor] = {}
        self._of_layer: dict[int, Tensor] = {}
        for group, members in enumerate(config.groups):
            if not config.read_tokens or members.window is not None:
                continue
            if config.keeps_bounds(group):
                heads, dim = config.shapes[group][:2]
                shape = len(members.layers), config.num_pages(group), heads, dim, 2
                self._kept[group] = storage.memory.empty(group, shape, torch.float16)
                kept = enumerate(members.layers)
                self._of_layer |= {layer: self._kept[group][i] for i, layer in kept}
            else:
                for layer in members.layers:
                    self._of_layer[layer] = storage.layer(layer)[0].scales

    def of(self, layer: int) -> Tensor:
        """Returns `[N, G, D, 2]`: step and minimum of each channel of each complete page."""
        return self._of_layer[layer]

    def update(self, group: int, pages: Ints) -> None:
        """Writes the bounds of pages that are complete now; staging pages have none."""
        kept = self._kept.get(group)
        if kept is None:
            return
        ids = sent(pages[pages < kept.shape[1]], kept.device)
        for i, layer in enumerate(self._groups[group].layers):
            kept[i, ids] = self._measured(layer, ids)

    def check(self, group: int, pages: Tensor) -> None:
        """Raises `CorruptCacheError` if the bounds of complete pages differ from their keys'."""
        kept = self._kept.get(group)
        for i, layer in enumerate(self._groups[group].layers if kept is not None else ()):
            assert kept is not None
            found, true = kept[i, pages], self._measured(layer, pages)
            wrong = ((found != true) & ~(found.isnan() & true.isnan())).flatten(1).any(1)
            if wrong.any():
                page = int(pages[wrong][0])
                raise CorruptCacheError(f"bounds of page {page} in layer {layer} are not its keys'")

    def _measured(self, layer: int, pages: Tensor) -> Tensor:
        k = self._keys[layer]
        keys = coded.read_pages(k, pages, self._dtype) if isinstance(k, Pages) else k[pages]
        return sparse.page_bounds(keys)
