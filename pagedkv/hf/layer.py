"""One layer of a `PagedCache`: the object that a model's attention module calls.

`update()` only stages K and V and returns handles of them; the attention function, which also has
the mask, writes and attends. This keeps padding tokens out of the pages, so that rows with
different padding share pages.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin

from pagedkv.attention.api import attend_again, paged_attention
from pagedkv.config import field_of
from pagedkv.errors import UnsupportedModelError
from pagedkv.step.metadata import StepMetadata

from .forward import (
    ForwardCache,
    PagedLength,
    changed_after_cache,
    other_model,
    uncompiled,
    waiting,
)
from .handles import KVHandle
from .model import text_config
from .transaction import by_hand, enter


class Staged:
    """K and V of one layer between `update` and the attention function.

    Behind it other layers may attend to them again, in the same step and by the same handles: they
    get what `update` returned, and read the pages.
    """

    def __init__(self, layer: PagedLayer, k: Tensor, v: Tensor) -> None:
        self.layer, self.k, self.v = layer, k, v
        self.step: StepMetadata | None = None  # in which the layer has attended
        self.attended = False

    def require_same_depth(self, module: torch.nn.Module) -> None:
        """Raises for a module of a model that is deeper or flatter than that of the cache."""
        depth = field_of(text_config(self.layer.cache.model), "num_hidden_layers")
        got = field_of(getattr(module, "config", None), "num_hidden_layers") or depth
        if got != depth:
            raise other_model(depth, str(got))

    def cast(self, query: Tensor) -> Tensor:
        """Casts K and V for pages made under this autocast, as it would for SDPA; the queries too.

        Autocast leaves some of the three in the model's dtype: rotary embedding is in float32.
        """
        dtype = torch.get_autocast_dtype(query.device.type)
        if str(dtype) != f"torch.{self.layer.cache.kv.config.dtype}":
            self.require_no_cast(query)
            return query
        self.k, self.v = self.k.to(dtype), self.v.to(dtype)
        return query.to(dtype)

    def require_no_cast(self, query: Tensor) -> None:
        """Raises where autocast made K, V or queries of another dtype than pages have."""
        dtype = self.layer.cache.kv.config.dtype
        for name, x in (("query", query), *self.given):
            if str(x.dtype) != f"torch.{dtype}":
                raise UnsupportedModelError(
                    f"{name}: expected {dtype}, as pages are, autocast made it {x.dtype}; make the "
                    "pages under the same autocast, or load the model in the dtype it shall "
                    "compute in and leave `torch.autocast`"
                )

    @property
    def given(self) -> list[tuple[str, Tensor]]:
        """All K and V that the model has made, by name."""
        return [("key", self.k), ("value", self.v)]

    @property
    def width(self) -> int:
        """Elements of a head of the output."""
        return self.v.shape[-1]

    def expanded_by(self, module: torch.nn.Module, k: Tensor, v: Tensor) -> Staged | None:
        """These, if `module` was given K and V that it made of them behind the cache; else None."""
        return None

    def attend(self, query: Tensor, mask: Tensor | None, **terms: Any) -> Tensor:
        """Writes and attends, with terms of the scores as in `paged_attention`: `[B, q, H, D]`."""
        cache, layer = self.layer.cache, self.layer
        place = query.device.type
        if torch.is_autocast_enabled(place):
            query = self.cast(query)
            with torch.autocast(place, enabled=False):  # it would cast inside of attention, too
                return self.attend(query, mask, **terms)
        if self.attended:
            return self._attend_again(query, **terms)
        if layer.staged is not self or query.shape[0] != self.k.shape[0]:
            raise changed_after_cache(layer.index)
        layer.staged = None
        if layer.is_first:
            with by_hand(cache):
                cache.open_step(self.k.shape, mask)
        if cache.opened is None:  # every token of this chunk is padding
            out = query.new_zeros(*query.transpose(1, 2).shape[:3], self.width)
        else:
            out = cache.unpacked(self.over_pages(query, cache.opened, **terms), query)
        self.attended, self.step = True, cache.opened
        layer.end_by_hand(cache)
        return out

    def over_pages(self, query: Tensor, step: StepMetadata, **terms: Any) -> Tensor:
        """Writes and attends, without padding: `[T, H, D]`."""
        q, k, v = (self.layer.cache.packed(x) for x in (query, self.k, self.v))
        try:
            return paged_attention(q, k, v, step, self.layer.index, **terms)
        except ValueError as error:
            ranks, heads = self.layer.cache.kv.ranks, self.layer.cache.kv.config.num_kv_heads
            if ranks.size == 1:
                raise
            raise UnsupportedModelError(
                f"layer {self.layer.index}: tensor parallelism over {ranks.size} processes leaves "
                f"another part of its attention on each than pages of {heads} KV heads: {error}"
            ) from error

    def _attend_again(self, query: Tensor, **terms: Any) -> Tensor:
        """Attends for a layer without K and V of its own: `[B, n, H, D]`.

        Args:
            query: `[B, H, n, D]`; some models compute the last tokens of each row alone, whose
                logits are wanted.
        """
        cache, layer, new = self.layer.cache, self.layer, query.shape[2]
        within = cache.forward_layer >= layer.index and self.step is cache.opened
        fits = query.shape[0] == self.k.shape[0] and new <= self.k.shape[2]
        if not (within and fits) or cache.attended_again == cache.shared_layers:
            raise changed_after_cache(layer.index)
        if cache.opened is None:
            out = query.new_zeros(*query.transpose(1, 2).shape[:3], self.width)
        else:
            rows = None if new == self.k.shape[2] else cache.num_queries(new)
            q = cache.packed(query)
            out = attend_again(q, cache.opened, layer.index, num_queries=rows, **terms)
            out = cache.unpacked(out, query)
        cache.attended_again += 1
        layer.end_by_hand(cache)
        return out


class PagedLayer(CacheLayerMixin):
    """One layer of a `PagedCache`; it holds the cache by a weak reference only."""

    supports_early_init = False
    is_croppable = True

    def __init__(self, cache: ForwardCache, index: int, window: int | None) -> None:
        super().__init__()
        self._cache = weakref.ref(cache)
        self.index, self.window = index, window
        self.is_sliding = window is not None
        self.is_first = index == 0
        self.record_past = False  # transformers resets it by this name
        self.is_initialized = True
        self.staged: Staged | None = None
        self.dtype = getattr(torch, cache.kv.config.dtype)
        self.device = cache.kv.placement.layers[index]

    @property
    def keys(self) -> Tensor | None:
        """A copy of the K of all rows, `[B, G, seen, D]`; zeros where no token is, or is held."""
        held = self.held()
        return None if held is None else held[0]

    @keys.setter
    def keys(self, value: Tensor | None) -> None:
        self._require_none(value, "keys")

    @property
    def values(self) -> Tensor | None:
        """A copy of V of all tokens, as `keys` gives K."""
        held = self.held()
        return None if held is None else held[1]

    @values.setter
    def values(self, value: Tensor | None) -> None:
        self._require_none(value, "values")

    def held(self) -> tuple[Tensor, Tensor] | None:
        """Copies of the K and V that the rows have in this layer; None without rows."""
        return self.cache.held(self)

    def _require_none(self, value: Tensor | None, name: str) -> None:
        if value is not None:  # as the constructor of transformers sets it
            raise UnsupportedModelError(
                f"layers[{self.index}].{name}: expected to be read, not set: K and V are in pages, "
                "which other rows may share. `retention=` forgets tokens, `crop` takes back the "
                "last; what edits K and V works on transformers' own cache"
            )

    @property
    def cache(self) -> ForwardCache:
        """The cache this layer belongs to."""
        cache = self._cache()
        if cache is None:
            raise ReferenceError("the PagedCache of this layer is gone")
        cache.require_usable()
        return cache

    def activate_past_recording(self) -> None:
        """Makes it possible, from now on, that `crop` takes back tokens of the latest forward."""
        self.record_past = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing to do: pages exist from the start."""

    @uncompiled
    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Stages K and V `[B, G, q, D]` and returns their handles, or a dense gather."""
        cache = self.cache
        if self.is_first and not (cache.touched and cache.forward_layer == -1):
            enter(cache)
            cache.touched = True
        elif cache.forward_layer != self.index - 1:
            raise UnsupportedModelError(
                f"layer {self.index} was updated after layer {cache.forward_layer}: this model "
                "does not visit its layers in order"
            )
        elif cache.paged[self.index - 1].staged is not None:
            raise changed_after_cache(self.index - 1)
        cache.forward_layer = self.index
        if self.is_first:  # once a forward: a configuration takes 20 us to answer
            cache.forward_is_paged = cache.is_paged
        if not cache.forward_is_paged:
            return self.write_dense(key_states, value_states)
        return self.stage(key_states, value_states)

    def stage(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        """Stages K and V and returns their handles."""
        return KVHandle.pair(self.wait(Staged(self, key_states, value_states)))

    def wait(self, staged: Staged) -> Staged:
        """Keeps what is staged where the attention function finds it."""
        self.staged = staged
        waiting.last = weakref.ref(staged)
        return staged

    def write_dense(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        """Writes K and V, for another attention, and returns all of the layer's."""
        return self.cache.update_dense(self, key_states, value_states)

    def end_by_hand(self, cache: ForwardCache) -> None:
        """Commits behind the last layer where layers are called by hand, which no hook sees."""
        passed = cache.forward_layer + 1 == cache.kv.config.num_layers
        if cache.transaction is None and passed and cache.all_attended_again:
            with by_hand(cache):
                cache.commit_step()

    @uncompiled
    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Keys counted from the first token, padding and dropped ones included."""
        cache = self.cache
        return PagedLength.of(cache, cache.seen + query_length), 0

    @uncompiled
    def get_seq_length(self) -> int:
        """Tokens seen, padding included."""
        return self.cache.seen

    def get_max_length(self) -> int:
        """-1: a layer has no maximum of its own, the pool says when it is full."""
        return -1
