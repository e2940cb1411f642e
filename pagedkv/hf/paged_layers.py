"""The kinds of layers that have pages: with K and V, with latents, with chosen tokens.

A layer may attend to the latents of an earlier layer. The model passes these on by itself, and the
layer expands them by weights of its own, so attention gets K and V that no cache has seen. The
configuration says from whose latents they were made; the first forward checks it (`Halves.of`).
"""

from __future__ import annotations

import weakref

import torch
from torch import Tensor, nn

from pagedkv.errors import UnsupportedModelError
from pagedkv.models import LayerKind

from .forward_cache import ForwardCache, changed_after_cache
from .indexers import IndexedLayer
from .latent import Expansion, StagedLatents
from .layer import PagedLayer


class LatentLayer(PagedLayer):
    """One layer of a cache that is given latents.

    Attributes:
        latest: the latents staged last, to which later layers may attend again.
    """

    latest: tuple[weakref.ref[Tensor], weakref.ref[Tensor]] | None = None

    def stage(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        """Stages latents `[B, 1, q, R]` and rotated keys `[B, 1, q, r]`; returns them unchanged.

        The model expands them, so it gets no handles: the attention function finds the staged ones
        in `waiting`.
        """
        if key_states.shape[1] * value_states.shape[1] > 1:
            raise UnsupportedModelError(
                f"layer {self.index}: in this release of transformers the model gives its cache "
                "expanded K and V; pages keep its latents, as newer releases give them"
            )
        self.wait(StagedLatents(self, key_states, value_states))
        self.latest = weakref.ref(key_states), weakref.ref(value_states)
        return key_states, value_states

    def held(self) -> tuple[Tensor, Tensor] | None:
        """Returns copies of latents and rotated keys, as a model gives them to its cache."""
        held = super().held()
        if held is None:
            return None
        both, rank = held[0], held[1].shape[-1]
        return both[..., :rank], both[..., rank:]

    def write_dense(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        """Writes latents for another attention than ours; returns all latents of the layer."""
        both, rank = torch.cat([key_states, value_states], dim=-1), key_states.shape[-1]
        k, _ = self.cache.update_dense(self, both, both[..., :rank])
        return k[..., :rank], k[..., rank:]


class IndexedLatents(IndexedLayer, LatentLayer):
    """One layer of a cache that is given latents, and whose queries read chosen tokens."""


class SharedLatents(IndexedLatents):
    """A layer without latents of its own: it attends to another's, and may have index keys."""

    is_shared = True

    def __init__(self, cache: ForwardCache, index: int, window: int | None) -> None:
        super().__init__(cache, index, window)
        self.is_first = False

    def expanded_by(self, module: nn.Module, k: Tensor, v: Tensor) -> StagedLatents:
        """Returns the other layer's latents, with K and V that this layer's module made of them."""
        cache = self.cache
        latent, rotated = (x() for x in cache.paged[self.index].latest)
        if latent is None or rotated is None or cache.forward_layer < self.index:
            raise changed_after_cache(self.index)
        staged = StagedLatents(self, latent, rotated)
        staged.made, staged.attended, staged.step = Expansion(module, k, v), True, cache.opened
        return staged


def paged_layer(cache: ForwardCache, kind: LayerKind) -> PagedLayer:
    """Makes the layer of a cache for a layer of the model that attends over pages."""
    index = kind.source if kind.attention is None else kind.attention
    assert index is not None, "the caller asks for layers with pages alone"
    config = cache.kv.config
    latent, window = config.shapes[config.group_of[index]].v_is_k, config.windows[index]
    if kind.indexer is None:
        return (LatentLayer if latent else PagedLayer)(cache, index, window)
    made = SharedLatents if kind.attention is None else IndexedLatents if latent else IndexedLayer
    layer = made(cache, index, window)
    layer.keys_layer = kind.indexer
    return layer
