"""The layers of a cache that have pages, by what they are given: K and V, latents, chosen tokens.

A layer may attend to the latents of an earlier one. The model hands these on by itself, and the
layer expands them by weights of its own, so that attention gets K and V that no cache has seen.
Whose latents they are made of is what the configuration says; the first forward holds that against
what they are (`Halves.of`).
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
        latest: what its model has staged last, which layers behind it may attend to again.
    """

    latest: tuple[weakref.ref[Tensor], weakref.ref[Tensor]]

    def stage(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        """Stages latents `[B, 1, q, R]` and `[B, 1, q, r]`, and returns those of new tokens alone.

        The model expands them, so they are no handles: the attention function finds them by
        `waiting`.
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
        """Copies of latents and rotated keys, as a model gives them to its cache."""
        held = super().held()
        if held is None:
            return None
        both, rank = held[0], held[1].shape[-1]
        return both[..., :rank], both[..., rank:]

    def write_dense(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        """Writes latents and returns all of the layer, for another attention."""
        both, rank = torch.cat([key_states, value_states], dim=-1), key_states.shape[-1]
        k, _ = self.cache.update_dense(self, both, both[..., :rank])
        return k[..., :rank], k[..., rank:]


class IndexedLatents(IndexedLayer, LatentLayer):
    """One layer of a cache that is given latents, of which queries read chosen ones."""


class SharedLatents(IndexedLatents):
    """A layer that attends to the latents of another, and has its index at most."""

    is_shared = True

    def __init__(self, cache: ForwardCache, index: int, window: int | None) -> None:
        super().__init__(cache, index, window)
        self.is_first = False

    def expanded_by(self, module: nn.Module, k: Tensor, v: Tensor) -> StagedLatents:
        """Returns the latents of the other layer, with K and V that this one made of them."""
        cache = self.cache
        latent, rotated = (x() for x in cache.paged[self.index].latest)
        if latent is None or rotated is None or cache.forward_layer < self.index:
            raise changed_after_cache(self.index)
        staged = StagedLatents(self, latent, rotated)
        staged.made, staged.attended, staged.step = Expansion(module, k, v), True, cache.opened
        return staged


def paged_layer(cache: ForwardCache, kind: LayerKind) -> PagedLayer:
    """A layer of a cache, for a layer of the model that attends over pages."""
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
