"""K and V between a layer's `update` and the attention function, and their attention."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from pagedkv.arrays import Ints
from pagedkv.attention.api import attend_again, paged_attention
from pagedkv.errors import UnsupportedModelError
from pagedkv.models.kinds import Sight
from pagedkv.step.metadata import StepMetadata

from .distance_bias import packed_bias
from .forward_cache import ForwardCache, changed_after_cache


class StagingLayer(Protocol):
    """The parts of a `PagedLayer` that its staged K and V use, described there."""

    index: int
    window: int | None
    sight: Sight
    is_first: bool
    staged: Staged | None

    @property
    def cache(self) -> ForwardCache: ...
    def open(self, shape: Sequence[int], padding: Tensor | None) -> None: ...
    def mask(self, given: Any) -> Any: ...
    def chosen(self, handle: Any) -> Tensor | None: ...
    def end_by_hand(self, cache: ForwardCache) -> None: ...


class Staged:
    """K and V of one layer between `update` and the attention function.

    Later layers may attend to them again, in the same step and by the same handles: these layers
    get what `update` returned, and read the pages.
    """

    def __init__(self, layer: StagingLayer, k: Tensor, v: Tensor) -> None:
        self.layer, self.k, self.v = layer, k, v
        self.step: StepMetadata | None = None  # the step in which the layer has attended
        self.attended = False
        self.reach = 0  # distances that its module was asked a bias for

    def cast(self, query: Tensor) -> Tensor:
        """Casts K, V and queries for pages made under this autocast, as it does for SDPA.

        Autocast itself leaves some of the three in another dtype: rotary embedding is in float32.
        """
        dtype = torch.get_autocast_dtype(query.device.type)
        if str(dtype) != f"torch.{self.layer.cache.kv.config.dtype}":
            self.require_no_cast(query)
            return query
        self.k, self.v = self.k.to(dtype), self.v.to(dtype)
        return query.to(dtype)

    def require_no_cast(self, query: Tensor) -> None:
        """Raises if autocast made K, V or queries of another dtype than pages have."""
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
        """Returns the elements of a head of the output."""
        return self.v.shape[-1]

    def expanded_by(self, module: torch.nn.Module, k: Tensor, v: Tensor) -> Staged | None:
        """Returns this object if `module` made `k` and `v` of it after the cache; else None."""
        return None

    def attend(self, query: Tensor, mask: Tensor | None, **terms: Any) -> Tensor:
        """Writes, and attends with terms of the scores as in `paged_attention`: `[B, q, H, D]`."""
        cache, layer = self.layer.cache, self.layer
        place = query.device.type
        if torch.is_autocast_enabled(place):
            query = self.cast(query)
            with torch.autocast(place, enabled=False):  # it would cast within attention, too
                return self.attend(query, mask, **terms)
        if self.attended:
            return self._attend_again(query, **terms)
        if layer.staged is not self or query.shape[0] != self.k.shape[0]:
            raise changed_after_cache(layer.index)
        layer.staged = None
        layer.open(self.k.shape, mask)
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
        if (bias := terms.pop("position_bias", None)) is not None:
            terms["distance_bias"] = packed_bias(self, bias)
        sinks = terms.pop("query_sinks", None)
        try:
            if sinks is None:
                return paged_attention(q, k, v, step, self.layer.index, **terms)
            out, lse = paged_attention(q, k, v, step, self.layer.index, return_lse=True, **terms)
            # A score more without a value, of weight exp(sink), takes this share of the others.
            left = torch.sigmoid(lse - self.layer.cache.packed(sinks).squeeze(-1))
            return (out * left.unsqueeze(-1)).to(out.dtype)
        except ValueError as error:
            ranks, heads = self.layer.cache.kv.ranks, self.layer.cache.kv.config.num_kv_heads
            if ranks.size == 1:
                raise
            raise UnsupportedModelError(
                f"layer {self.layer.index}: tensor parallelism over {ranks.size} processes leaves "
                f"another part of its attention on each than pages of {heads} KV heads: {error}"
            ) from error

    def over_written(
        self, q: Tensor, step: StepMetadata, rows: Ints | None, **terms: Any
    ) -> Tensor:
        """Attends to what is written already, without padding: `[T, H, D]`.

        Args:
            rows: `[B]`, queries of each row; None for all of a step.
        """
        return attend_again(q, step, self.layer.index, num_queries=rows, **terms)

    def _attend_again(self, query: Tensor, **terms: Any) -> Tensor:
        """Attends for a layer without K and V of its own: `[B, n, H, D]`.

        Args:
            query: `[B, H, n, D]`; some models compute only the last tokens of each row, whose
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
            out = cache.unpacked(self.over_written(q, cache.opened, rows, **terms), query)
        cache.attended_again += 1
        layer.end_by_hand(cache)
        return out
