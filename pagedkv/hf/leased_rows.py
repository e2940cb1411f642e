"""`LeasedRows`: the sequences that a `PagedCache` leases, and the forwards that make them grow.

A forward opens one step at its first layer, which is committed when the forward has returned. Under
another attention implementation `update()` writes and returns a dense gather: correct, but slow.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor, nn
from transformers import PreTrainedModel

from pagedkv.arrays import Bools, Ints, Tokens
from pagedkv.cache.cache import PagedKVCache
from pagedkv.errors import UnsupportedModelError
from pagedkv.interrupt import Uninterrupted

from .attach import leads_to
from .dense import read, write_and_gather
from .forward_cache import ForwardCache, other_model, uncompiled
from .image_numbers import numbers_in
from .layer import PagedLayer
from .lease import Lease
from .longrope import require_before_border
from .model import Kind, require_same_kind
from .model_pages import take_over
from .mrope import Offsets, Prepared
from .padding import Packings, new_tokens
from .prefix_rows import SHARES_NOTHING, Entry, can_enter, given_to, require_new
from .release import CACHE
from .snapshot import Weights
from .states import StateLayer, make_layers, require_states_to_follow
from .telling import warn
from .texts import Texts, Told, beside_text, kept_copy
from .transaction import require_none_on


class LeasedRows(ForwardCache):
    """Rows of a batch in pages that other caches of the model use as well."""

    def _start(self, model: PreTrainedModel, kv: PagedKVCache, kind: Kind) -> None:
        """Sets all attributes; the model is attached already."""
        self.model, self.kv, self._kind = model, kv, kind
        self.seen = 0  # tokens so far, padding included; the same for all rows
        self.offsets = Offsets(model)
        self.kept: Bools | None = None  # [B, seen], which tokens are stored; None for all
        self._given = False
        self._new_rows = False  # whether this forward has added the rows
        self._new_length = 0  # what `seen` will be after it
        self._added: Bools | None = None  # [B, q], which tokens of it are no padding; None: all
        self._packings = Packings(0, None)
        self.texts = Texts()  # of the rows, as long as they are known
        self._told: Told | None = None  # of the forward that is under way
        self.prepared: Prepared | None = None
        self._was: tuple[int, Bools | None] = 0, None  # `seen` and `kept` before rows entered
        self._weights: Weights | None = None  # the weights with which rows were begun
        self._longest = 0  # tokens of the longest row since then
        self._begins_generate = self._asked_for_whole_rows = False
        self._entry: Entry | None = None  # of whole rows, in the forward that is under way
        self._lease = Lease(kv, model)
        self._fed: list[int] | None = None  # rows of the batch that have tokens in this forward
        super().__init__(layers=make_layers(self))
        self._state_layers = [layer for layer in self.layers if isinstance(layer, StateLayer)]
        # Last: if anything above raises, the caller detaches the model.
        self._finalizer = weakref.finalize(self, self._lease.end)
        self._finalizer.atexit = False

    @property
    def rows(self) -> list[int]:
        return self._lease.seqs

    @property
    def is_under_way(self) -> bool:
        return self.__dict__.get("_told") is not None or super().is_under_way

    @property
    def batch_size(self) -> int:
        """Rows, or -1 before the first forward."""
        return len(self.rows) or -1

    @uncompiled
    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Hands K and V to their layer, as transformers' own caches do."""
        if layer_idx >= len(self.layers):
            raise other_model(len(self.layers), f"{layer_idx + 1} or more")
        layer = self.layers[layer_idx]
        if not isinstance(layer, PagedLayer):
            raise ValueError(
                f"{CACHE}: expected a cache of this model, got one that keeps no K and V "
                f"in layer {layer_idx}"
            )
        return layer.update(key_states, value_states)

    @uncompiled
    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Returns the tokens seen, padding included. Called before positions of new ones are made.

        Returns 0 if `generate` would cut rows at this length, and the cache can cut each row itself
        where the ids that it holds end.
        """
        if self._begins_generate and self.knows_texts:
            self._asked_for_whole_rows = True
            return 0
        if self.seen:
            self.offsets.restore(self.texts)
        return super().get_seq_length(layer_idx)

    @property
    def knows_texts(self) -> bool:
        return self.is_paged and self.texts.known

    def require_usable(self) -> None:
        """Raises once the cache was closed."""
        if not self._finalizer.alive:
            raise ValueError(f"{CACHE}: this PagedCache was closed")

    def _require_changeable(self) -> None:
        """Raises once the cache was closed, and within a forward; else takes back a failed one."""
        self.require_usable()
        require_none_on(self.kv)
        self.abort_step()

    @property
    def _is_user_defined(self) -> bool:
        return self._given

    @_is_user_defined.setter
    def _is_user_defined(self, value: bool) -> None:
        # `generate` sets this when it was given the cache, before it asks for the length.
        self._given = value
        self._begins_generate = value
        self._asked_for_whole_rows = False

    def require_own(self, outermost: nn.Module) -> None:
        """Raises for a forward of another model, which might read our K and V if shapes agree."""
        if not leads_to(outermost, self.model):
            raise ValueError(
                f"{CACHE}: expected a cache of this model, got one of another "
                f"{type(self.model).__name__}"
            )

    def begin_forward(self, arguments: Mapping[str, Any]) -> dict[str, Any] | None:
        """At the first forward of `generate`, cuts from whole rows the tokens that the cache holds.

        Raises:
            ValueError: the forward is told to use no cache, or `generate` feeds tokens that the
                cache holds already.
            ModelChangedError: weights or adapters have changed since rows were begun.
            UnsupportedModelError: rows cannot go on from the tokens that are held.
        """
        if arguments.get("use_cache") is False:
            raise ValueError(
                "use_cache: expected True beside a PagedCache, got False; a checkpoint's "
                "generation_config may say so, as a trainer leaves it: pass use_cache=True"
            )
        if arguments.get("output_attentions"):  # many models keep it from attention
            raise UnsupportedModelError("output_attentions: pages give no weights of attention")
        if self.seen and not self._begins_generate:
            self.offsets.require_placed(arguments, self.model.config)
        by_row = arguments.get("adapter_names")  # PEFT does not pass it to forwards of `generate`
        if not self.rows:
            self._weights, self._longest = Weights.of(self.model, by_row), 0
        elif by_row is not None and self._weights is not None:
            self._weights.require_same(self.model, by_row)
        numbers = self._numbers(arguments)
        changed = self._entered(arguments, numbers)
        now = arguments if changed is None else changed
        if numbers is not None:
            numbers = numbers[:, numbers.shape[1] - now["input_ids"].shape[1] :]
        self._told = Told.of(now, self.model.config, numbers)
        return changed

    def _numbers(self, arguments: Mapping[str, Any]) -> Tokens | None:
        """Returns the numbers of a forward's image tokens, `[B, q]`; None if none are known."""
        ids, mask = arguments.get("input_ids"), arguments.get("attention_mask")
        if ids is None:
            return None
        numbers = numbers_in(ids, beside_text(arguments), self.model.config)
        if numbers is None and self.prepared is not None:
            begin = 0 if self._asked_for_whole_rows else self.seen
            begin = begin if mask is None else mask.shape[1] - ids.shape[1]
            numbers = self.prepared.of(arguments, begin)
        self.prepared = None if numbers is None else self.prepared
        return numbers

    def begin_part(self, arguments: Mapping[str, Any]) -> None:
        """Notes positions that a model made itself, for images or from a mask."""
        places = arguments.get("position_ids")
        if self._told is not None and self._told.positions is None and isinstance(places, Tensor):
            self._told = self._told._replace(positions=kept_copy(places))

    def _entered(
        self, arguments: Mapping[str, Any], numbers: Tokens | None
    ) -> dict[str, Any] | None:
        """Cuts whole rows down to the tokens left to compute; None if rows are taken as given."""
        begins, self._begins_generate = self._begins_generate, False
        asked, self._asked_for_whole_rows = self._asked_for_whole_rows, False
        given = given_to(arguments)
        if given is not None and self.seen and self.rows:
            self._require_rows(len(given))  # here, because states are read before a step is open
        if not begins or not self.rows:
            return None
        if self._weights is not None:
            self._weights.require_same(self.model)
            require_before_border(self.model, self._longest)
        if not self.knows_texts or not can_enter(arguments, asked):
            require_new(arguments, self.seen, int(self.texts.ahead.min(initial=0)), self.model)
            return None
        entry = Entry(self.texts, arguments, self.model, numbers)
        entry.allow(self.kv, self.rows)
        if entry.shares_nothing:
            warn(SHARES_NOTHING)
        self._was = self.seen, self.kept
        self._entry, self.seen, self.kept = entry, entry.seen, entry.kept
        self._lease.spare = entry.spare
        entry.cut(self.kv, self.rows)  # before any layer: states are read first
        return entry.arguments

    def end_forward(self) -> None:
        """Undoes, after a forward that was not committed, the cutting of whole rows."""
        if self._entry is not None:
            self._lease.seqs = self._entry.undo(self.kv, self.rows)
            self.seen, self.kept = self._was
        self._entry = self._told = None

    def abort_step(self) -> None:
        """Takes back the step, the rows, and the K and V that a failed forward left.

        The step may belong to any cache on these pages. The caller holds the lock.
        """
        self.kv.abort_abandoned()
        for layer in self.layers:
            layer.staged = None
        for layer in self._state_layers:
            layer.forget()
        self.opened = None
        self.forget_forward()
        if self._new_rows:
            self.kv.free(self.rows)
            self._lease.seqs, self._new_rows = [], False

    def open_step(self, shape: Sequence[int], mask: Tensor | None) -> None:
        """Opens the step of one forward: decides which tokens of K `[B, G, q, D]` are stored."""
        batch, new = shape[0], shape[2]
        require_same_kind(self.model, self._kind, "PagedCache")
        if not self.seen and len(self.rows) != batch:
            self._add_rows(batch)
        self._require_rows(batch)
        self._added = fresh = new_tokens(mask, self.kept, batch, self.seen, new)
        if self._entry is not None:
            fresh = None if self._entry.left.all() else self._entry.left
        self._new_length = self.seen + new
        self._packings = Packings(batch, fresh)
        seqs, counts = self.rows, np.full(batch, new)
        self._fed = None
        if self._state_layers:
            had = self.seen > 0 if self.kept is None else self.kept.any(1)
            require_states_to_follow(self.model, np.broadcast_to(had, batch), fresh, new)
        if fresh is not None:
            counts = fresh.sum(1)
            self._fed = np.flatnonzero(counts).tolist()
            seqs = [self.rows[i] for i in self._fed]
        self.opened = self.kv.prepare(seqs, num_new=counts[counts > 0]) if seqs else None

    def _require_rows(self, batch: int) -> None:
        """Raises if a forward has another number of rows than the cache."""
        if len(self.rows) != batch:
            raise ValueError(
                f"batch: expected {len(self.rows)} rows as before, got {batch}; each sample and "
                "each beam is a row, and `.fork(n)` makes a cache with n rows for each of these"
            )

    def _add_rows(self, batch: int) -> None:
        self.kv.free(self.rows)
        self._lease.seqs = []
        take_over(self.kv, self.model)
        self._new_rows = True
        try:
            self._lease.seqs = [self.kv.add()]
            self.kv.mark(self.rows)
            if batch > 1:
                self._lease.seqs = self.rows + self.kv.fork(self.rows[0], batch - 1)
        except BaseException:
            self.kv.free(self.rows)
            self._lease.seqs, self._new_rows = [], False
            raise

    def _add_named(self, ids: Ints) -> None:
        """Starts the only row with a prompt whose ids are known, behind its stored prefix."""
        take_over(self.kv, self.model)
        self.kv.identity.forget_stale(self.kv.clear_prefixes)
        self._lease.seqs = [self.kv.add(ids)]
        self.kv.mark(self.rows)
        self.seen = self._longest = self.kv.length(self.rows[0])
        self.texts, self._weights = Texts([ids[: self.seen]]), Weights.of(self.model)

    def commit_step(self) -> None:
        """Makes the tokens of a forward part of their texts."""
        batch, new, kept = len(self.rows), self._new_length - self.seen, self.kept
        if self._added is not None or kept is not None:
            old = np.ones((batch, self.seen), bool) if kept is None else kept
            added = np.ones((batch, new), bool) if self._added is None else self._added
            kept = np.concatenate([old, added], axis=1)
        with Uninterrupted():
            if self.opened is not None:
                for layer in self._state_layers:
                    layer.hand_in(self.opened, self._fed)
                revocable = any(layer.record_past for layer in self.layers)
                self.kv.commit(self.opened, revocable=revocable)
            if not self.seen or self._entry is not None or new > 1:
                self.offsets.forget()
            if self._entry is not None:
                self._entry.end(self.kv)
            self._learn(batch, new)
            self._entry = self._told = None
            self.seen, self.kept, self._new_rows = self._new_length, kept, False
            self._longest = max(self._longest, self.seen)
            self.opened = None
            self.forget_forward()
            for layer in self._state_layers:
                layer.forget()

    def _learn(self, batch: int, new: int) -> None:
        """Adds to the texts of the rows the tokens that a forward was given."""
        added = self._added
        if self._entry is not None:
            self.texts.cut(self._entry.lengths)
            added = self._entry.left
        self.texts.add(self._told or Told(), self.seen, new, added, batch)

    def packed(self, x: Tensor) -> Tensor:
        return self._packings.packed(x)

    def unpacked(self, out: Tensor, query: Tensor) -> Tensor:
        return self._packings.unpacked(out, query)

    def num_queries(self, new: int) -> Ints:
        return self._packings.counts(new)

    def length_behind(self, new: int) -> int:
        return self.seen + new

    def held(self, layer: PagedLayer) -> tuple[Tensor, Tensor] | None:
        return read(self, self.kept, layer) if self.rows else None

    def update_dense(self, layer: PagedLayer, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return write_and_gather(self, self.kept, layer, k, v)
