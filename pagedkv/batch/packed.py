"""A model's forward over packed tokens: rows of different lengths behind one another, no padding.

`PackedModel` runs `[1, T]` tokens whose step the caller has prepared, and commits nothing. Between
transformers and the pages stands a cache that only carries that step (`packed_cache.py`); positions
are given, so no mask is needed, and only the rows asked for reach the language model head.
"""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager, ExitStack, nullcontext
from copy import copy
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor
from transformers import PreTrainedModel

from pagedkv.cache.cache import PagedKVCache
from pagedkv.errors import ModelChangedError, UnsupportedModelError
from pagedkv.hf.activations import activations_of
from pagedkv.hf.adapters import state_of, without_adapters
from pagedkv.hf.attach import attach_packed, detach_later
from pagedkv.hf.before import require_replaceable
from pagedkv.hf.blocked_weights import (
    ROUNDED,
    PackWeights,
    packed_weights,
    require_way,
    warn_of_dynamic_quantization,
    weights_for,
    why_rows_differ,
)
from pagedkv.hf.cache import PagedCache
from pagedkv.hf.foreign_hooks import foreign_hook
from pagedkv.hf.look import admit
from pagedkv.hf.model import kind_of, require_same_kind
from pagedkv.hf.model_pages import pages_for, take_over
from pagedkv.hf.placement import devices_of
from pagedkv.hf.release import CHECKPOINTS_TAKE_NO_CACHE, cache_argument
from pagedkv.hf.telling import warn
from pagedkv.ranks import ranks_of
from pagedkv.step.metadata import StepMetadata

from .packable import require_packable
from .packed_cache import PackedCache

if TYPE_CHECKING:
    from pagedkv.planner import MemoryPlan


class Inputs(NamedTuple):
    """The arguments of a model's forward in a step.

    Attributes:
        ids: `[1, T]`.
        positions: `[1, T]`, or `[axes, 1, T]` for a model that counts images unlike text.
        within: a context manager in which the forward runs.
    """

    ids: Tensor
    positions: Tensor
    within: AbstractContextManager[None] = nullcontext()


class PackedModel:
    """A model and the pages its packed rows live in.

    Args:
        model: a decoder that takes `position_ids`; switched to paged attention until `close`, or
            until this object goes.
        cache: pages to use; default the model's own, shared with its `PagedCache`s.
        plan, max_tokens, fields: as for `PagedCache`.
        pack_weights: multiply with packed weights; see `hf/blocked_weights.py`. `auto` where they
            can be packed into free memory, `int8` with 8 bits a weight.
        batch_invariant: as for `BatchGenerator`.
        unknown: as for `PagedCache`, which tries a model first.

    Raises:
        UnsupportedModelError: paged attention, or packing, would be wrong for this model.
        BudgetExceeded: the pages do not fit into memory.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        cache: PagedKVCache | None = None,
        plan: MemoryPlan | None = None,
        max_tokens: int | None = None,
        pack_weights: PackWeights = False,
        batch_invariant: bool = False,
        unknown: str | None = None,
        **fields: Any,
    ) -> None:
        require_way(pack_weights)
        admit(model, unknown, PagedCache)
        attach_packed(model)
        model = without_adapters(model)
        self.detach = weakref.finalize(self, detach_later, model)
        self.detach.atexit = False
        try:
            require_replaceable(model)
            accepted = require_packable(model)
            # Weights that must be packed are packed before pages are made, because pages take a
            # share of what is left; with "auto" after, so that pages of a caller go first.
            asked = batch_invariant or pack_weights not in (False, "auto")
            bits = 8 if pack_weights == "int8" else 16
            weights = packed_weights(model, bits, by_c=batch_invariant) if asked else None
            # Rounded weights make other K and V, which models with exact weights must not find.
            self._rounded = ROUNDED if bits == 8 else b""
            self.kv = pages_for(model, cache, plan, max_tokens, fields, self._rounded)
            if batch_invariant:
                _require_invariant(model, self.kv, pack_weights)
            elif pack_weights == "auto":
                weights = weights_for(model, plan, self.kv.config.nbytes)
        except BaseException:
            self.detach()
            raise
        self._weights, self._asked_to_pack = weights, asked
        self._activations = activations_of(model) if batch_invariant else None
        warn_of_dynamic_quantization(model)
        self._warn_unpacked()
        self.model, self._kind = model, kind_of(model)
        self.carrier = PackedCache(model, self.kv)
        self._keeps_logits = "logits_to_keep" in accepted
        self._cache_argument = cache_argument(model)
        self._told_of_hooks = self._told_of_room = False
        # The head may be on another device than the ids even if all layers are on theirs.
        self._divided = len({*devices_of(model).values()}) > 1

    def over(self, kv: PagedKVCache, exact: bool = False) -> PackedModel:
        """Returns this model over other pages of its kind, usable until this one is closed.

        Args:
            exact: use no rounded weights.
        """
        other = copy(self)
        other.kv, other.carrier = kv, PackedCache(self.model, kv)
        if exact and self._rounded:
            other._rounded, other._weights = b"", None
        return other

    def require_open(self) -> None:
        """Raises `ValueError` if the model was switched back."""
        if not self.detach.alive:
            raise ValueError("generator: this BatchGenerator was closed")

    def logits(
        self, step: StepMetadata, rows: Tensor | None = None, inputs: Inputs | None = None
    ) -> Tensor:
        """Runs the model over an open step.

        Args:
            rows: `[n]`, the packed tokens whose logits are wanted; default each sequence's last.
            inputs: what the model is given; default the step's ids and positions.

        Returns:
            `[n, vocab]` in the model's dtype.
        """
        carrier = self.carrier
        carrier.opened, carrier.complete = step, False
        carrier.mixers.begin_step()
        step.reads_prefixes = self._activations is None
        rows = step.last_rows if rows is None else rows
        every_row = len(rows) == step.num_tokens
        keep: dict[str, Any] = {}
        if self._keeps_logits and not every_row:
            # A list of numbers on the host serves any device.
            keep["logits_to_keep"] = rows.tolist() if self._divided else rows
        given = inputs or Inputs(step.tokens[None], step.positions[None])
        try:
            with given.within, ExitStack() as stack:
                for acting in filter(None, (self._weights, self._activations)):
                    stack.enter_context(acting.acting())
                logits = self.model(
                    input_ids=given.ids,
                    position_ids=given.positions,
                    use_cache=True,
                    **{self._cache_argument: carrier},
                    **keep,
                ).logits[0]
        finally:
            carrier.opened = None
        carrier.require_complete()
        if len(logits) == len(rows):
            return logits
        if len(logits) != step.num_tokens:
            raise UnsupportedModelError(
                f"{type(self.model).__name__}: its forward gave logits of {len(logits)} tokens, "
                f"where {len(rows)} of {step.num_tokens} were asked for (logits_to_keep)"
            )
        return logits[rows]  # a forward that accepts any argument may have ignored it

    def take_over(self) -> None:
        """Separates the prefixes of models that use the same pages."""
        take_over(self.kv, self.model, self._rounded)

    def forget_stale(self) -> bool:
        """Forgets cached prefixes if weights have changed since last asked; see `fingerprint.py`.

        Packed weights that have changed are packed anew.

        Returns:
            Whether it forgot them.
        """
        self.take_over()
        forgotten = self.kv.identity.forget_stale(self.kv.clear_prefixes)
        if self._weights is not None:
            self._weights.refresh()
            self._warn_unpacked()
        return forgotten

    def _warn_unpacked(self) -> None:
        if self._asked_to_pack and self._weights is not None:
            self._weights.warn()

    @property
    def packed_bytes(self) -> int:
        """Bytes of packed weights."""
        return 0 if self._weights is None else self._weights.nbytes

    def require_same_kind(self) -> None:
        """Raises if the model computes in another dtype, or on another device, than its pages."""
        require_same_kind(self.model, self._kind, "BatchGenerator")

    def require_caching(self) -> None:
        """Raises `UnsupportedModelError` if gradient checkpointing would keep the cache away."""
        if CHECKPOINTS_TAKE_NO_CACHE and any(
            module.training and getattr(module, "gradient_checkpointing", False)
            for module in self.model.modules()
        ):
            raise UnsupportedModelError(
                f"{type(self.model).__name__}: it is in training mode with gradient checkpointing, "
                "in which its layers take no cache; call model.eval() or "
                "model.gradient_checkpointing_disable()"
            )

    def warn_of_hooks(self) -> None:
        """Warns, once, if a hook of somebody else will see packed rows."""
        if not self._told_of_hooks and (found := foreign_hook(self.model)):
            self._told_of_hooks = True
            warn(
                f"model: {found}, which sees packed rows, [1, T, ...] in place of [B, T, ...]: all "
                "tokens of a step one behind another. One that treats every token alike is right; "
                "one that takes the last, or goes by row, is for `PagedCache` with `generate`"
            )

    def warn_of_room(self, tokens: int) -> None:
        """Warns, once, of a prompt that has more tokens than all pages together."""
        room = self.kv.config.max_tokens
        if tokens > room and not self._told_of_room:
            self._told_of_room = True
            warn(
                f"max_tokens: all pages together have room for {room} tokens, and a prompt has "
                f"{tokens}; max_new_tokens is what an answer may have"
            )

    def adapters(self) -> bytes:
        """Returns bytes that differ if other adapters are active in the model."""
        return state_of(self.model)

    def require_adapters(self, began: bytes) -> None:
        """Raises, and forgets findable prefixes, if other adapters act than when rows began."""
        if self.adapters() != began:
            self.kv.clear_prefixes()
            raise ModelChangedError(
                "model: its adapters were switched while rows were being generated, which would "
                "mix them; switch them between calls"
            )

    def close(self) -> None:
        """Detaches the model from paged attention. Idempotent."""
        self.detach()
        self._weights = self._activations = None


def _require_invariant(model: PreTrainedModel, kv: PagedKVCache, pack_weights: object) -> None:
    """Raises if the bits of a row would depend on what is computed beside it."""
    config, reason = kv.config, why_rows_differ(model)
    if pack_weights in (False, "int8"):
        reason = f"pack_weights is {pack_weights!r}"
    elif ranks_of(model).size > 1:
        reason = "several processes share the model"
    elif kv.backend != "c":
        reason = f"the backend is {kv.backend!r}"
    elif not config.dense or config.policy is not None or config.read_tokens is not None:
        reason = "kv_format, retention and read_tokens look at how a text is cut into steps"
    if reason:
        raise UnsupportedModelError(f"batch_invariant: expected False, {reason}")
