"""`PagedCache`: what `generate` takes as its cache.

It leases one sequence per batch row from the pages that it shares with other caches of its model.
`leased_rows.py` has what forwards do to these rows.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from functools import wraps
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from pagedkv.cache.cache import PagedKVCache
from pagedkv.errors import TooManySequencesError, UnsupportedModelError
from pagedkv.interrupt import Uninterrupted
from pagedkv.pages.stats import CacheStats

from .adapters import without_adapters
from .attach import attach, detach
from .before import require_replaceable
from .forward_cache import Call
from .images import on_device
from .leased_rows import LeasedRows
from .look import admit
from .model import kind_of, require_model
from .model_pages import pages_for
from .mrope import holder_of
from .release import cache_argument
from .snapshot import Weights
from .texts import Texts, beside_ids, ids_of
from .transaction import forget_dead, require_none_on

if TYPE_CHECKING:
    from typing import Unpack

    from pagedkv.config import ModelPagesFields
    from pagedkv.planner import MemoryPlan


def in_turn(method: Call) -> Call:
    """Lets a method of `PagedCache` have the pages to itself, and keeps interrupts out of it."""

    @wraps(method)
    def whole(self: PagedCache, *args: Any, **kwargs: Any) -> Any:
        with self.kv.lock, Uninterrupted():
            return method(self, *args, **kwargs)

    return cast(Call, whole)


class PagedCache(LeasedRows):
    """A transformers cache in pages, for `generate(..., cache=PagedCache(model))`.

    Before transformers 5.24 the argument is called `past_key_values`.

    All caches of a model share one pool of pages, so forks and copies share the pages of a common
    prefix. Threads may each have caches of their own, whose forwards take turns; one cache serves
    one thread at a time. `close()` returns a cache's pages, and so does its garbage collection.

    Args:
        model: a decoder, or a PEFT model of one; it is switched to paged attention for as long as a
            cache of it lives.
        cache: pages to use; default the model's own, made at the first use.
        plan: a memory plan that sizes the model's own pages, instead of the arguments below.
        max_tokens: token slots of the model's own pages; by default they take a quarter of the free
            memory on a CPU, most of it on CUDA, and have at most 2**20 slots.
        unknown: "check" tries a model that no list knows, and serves it if its outputs over pages
            are those over transformers' own cache; default is to refuse it.
        fields: other fields of `CacheConfig` (page_size, max_sequences, rollback, ...).

    Raises:
        UnsupportedModelError: paged attention would be wrong for this model.
        BudgetExceeded: the pages do not fit into memory.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        cache: PagedKVCache | None = None,
        plan: MemoryPlan | None = None,
        max_tokens: int | None = None,
        unknown: Literal["check"] | None = None,
        **fields: Unpack[ModelPagesFields],
    ) -> None:
        admit(model, unknown, PagedCache)
        attach(model)
        model = without_adapters(model)
        try:
            require_replaceable(model)
            kv = pages_for(model, cache, plan, max_tokens, {**fields})
            self._start(model, kv, kind_of(model))
        except BaseException:
            detach(model)
            raise

    @classmethod
    @torch.no_grad()
    def prefill(
        cls,
        model: PreTrainedModel,
        ids: Any,
        *,
        cache: PagedKVCache | None = None,
        plan: MemoryPlan | None = None,
        max_tokens: int | None = None,
        unknown: Literal["check"] | None = None,
        **fields: Unpack[ModelPagesFields],
    ) -> PagedCache:
        """Computes a prefix once, to be forked.

        Args:
            ids: `[n]` or `[1, n]` token ids, or what a tokenizer, a processor or its chat template
                returns, images included.
            cache, plan, max_tokens, unknown, fields: as for the constructor.

        With a `prefix_store` the stored part of the prefix is loaded, and the rest is computed and
        stored.

        Returns:
            A cache of one row. `generate` with `fork(n)` of it takes whole prompts, padded as a
            tokenizer pads them: each row shares the tokens that it has in common with the prefix,
            and computes the rest.
        """
        given, model = model, without_adapters(model)
        require_model(model)
        accepts = inspect.signature(model.forward).parameters
        beside = on_device(model, beside_ids(ids, accepts))
        ids = ids_of(ids, model)
        sizes: dict[str, Any] = {"plan": plan, "max_tokens": max_tokens, **fields}
        made = cls(given, cache=cache, unknown=unknown, **sizes)
        last_only = {"logits_to_keep": 1} if "logits_to_keep" in accepts else {}
        named = len(ids) == 1 and made.is_paged and not beside
        stored = named and made.kv.prefix_store is not None

        def compute(stop: int | None) -> None:
            part = ids[:, made.seen : stop]
            if stored and "position_ids" in accepts:  # Bamba counts from 0 behind any cache
                places = torch.arange(made.seen, made.seen + part.shape[1], device=part.device)
                beside["position_ids"] = places[None]
            model(input_ids=part, use_cache=True, **beside, **last_only)

        try:
            if stored:
                with made.kv.lock:
                    made._add_named(ids[0].cpu().numpy())
            beside |= {cache_argument(model): made}
            if stored and made.kv.config.states and ids.shape[1] - made.seen > 1:
                # Keep the state before the last token: the same prefix is found up to there.
                compute(-1)
                made.checkpoint()
            compute(None)
            if stored:
                with made.kv.lock:
                    made.kv.store(made.rows[0])
        except BaseException:  # hooks miss an interrupt, and nobody else could close it
            made.close()
            raise
        return made

    @classmethod
    def of(cls, model: PreTrainedModel, cache: PagedKVCache, seqs: Sequence[int]) -> PagedCache:
        """Makes a cache whose rows are existing sequences, for example loaded from files.

        The sequences belong to the cache from now on. Rows that are shorter than others count as
        padded on the left.

        Args:
            cache: the pages that the sequences are on.
            seqs: `[B]` distinct ids.

        Raises:
            ValueError: a part of a sequence's prompt is not computed yet.
            OffloadedError, OpenStepError, UnknownSequenceError: a sequence cannot be used.
            UnsupportedModelError: the model has positions of its own for images, and no sequence
                says whether it holds images.
        """
        require_model(without_adapters(model))
        with cache.lock:
            lengths = np.array([cache.length(seq) for seq in seqs])
            cache.require_idle(seqs)
            uncached = {seq: cache.uncached(seq).size for seq in seqs}
        for seq, left in uncached.items():
            if left:
                raise ValueError(f"seqs: expected computed prompts, {seq} has {left} ids left")
        if holder_of(model) is not None:
            raise UnsupportedModelError(
                f"{type(model).__name__}: the positions of its images (rope_deltas) are not kept "
                "with sequences; make the cache by `generate` or `prefill`, then fork it"
            )
        made = cls(model, cache=cache)
        made._lease.seqs = [int(seq) for seq in seqs]
        made.seen = made._longest = int(lengths.max())
        if (lengths < made.seen).any():
            made.kept = np.arange(made.seen) >= made.seen - lengths[:, None]
        made.texts, made._weights = Texts.unknown(lengths.tolist()), Weights.of(made.model)
        return made

    # ------------------------------------------------------------------ rows

    @in_turn
    def fork(self, n: int = 1) -> PagedCache:
        """Makes a cache with n rows for each row of this one; they share all pages."""
        self._require_changeable()
        attach(self.model)
        try:
            forked: PagedCache = type(self).__new__(type(self))
            forked._start(self.model, self.kv, self._kind)
        except BaseException:
            detach(self.model)
            raise
        for row in self.rows:
            forked._lease.seqs += self.kv.fork(row, n)
        forked.seen = self.seen
        forked.kept = None if self.kept is None else self.kept.repeat(n, axis=0)
        forked.texts, forked._weights = self.texts.repeated(n), self._weights
        forked._longest = self._longest
        return forked

    def __copy__(self) -> PagedCache:
        return self.fork(1)

    def __deepcopy__(self, memo: dict[int, Any]) -> PagedCache:
        return self.fork(1)

    @in_turn
    def _select(self, index: Sequence[int]) -> None:
        """Makes row i go on from the former row `index[i]`; pages are shared, none is copied."""
        self._require_changeable()
        if not self.rows:
            return
        old, uses = self.rows, [0] * len(self.rows)
        for i in index:
            uses[i] += 1
        room = self.kv.config.max_sequences
        if len(index) > len(old) and len(index) - len(old) > room - self.kv.stats().sequences:
            raise TooManySequencesError(
                f"max_sequences: {len(index) - len(old)} more rows asked, {room} allowed in all "
                "caches of this model together"
            )
        self.kv.free([row for row, used in zip(old, uses) if not used])
        # The first use of a row gets the row itself, further uses get forks of it.
        pools = [
            [row, *(self.kv.fork(row, used - 1) if used > 1 else [])]
            for row, used in zip(old, uses)
        ]
        self._lease.seqs = [pools[i].pop() for i in index]
        self.texts.select(index)
        self.offsets.forget()
        if self.kept is not None:
            self.kept = self.kept[list(index)]

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Beam search: row i goes on from row `beam_idx[i]`."""
        self._select(beam_idx.tolist())

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps the rows with these indices, in this order."""
        if self.rows:
            self._select(torch.arange(len(self.rows), device="cpu")[indices.cpu()].tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats every row, sharing its pages."""
        self._select(np.repeat(np.arange(len(self.rows)), repeats).tolist())

    @in_turn
    def checkpoint(self) -> None:
        """Keeps the recurrent states at the present length, so that `crop` can go back to it."""
        self._require_changeable()
        for row in self.rows:
            self.kv.checkpoint(row)

    @in_turn
    def crop(self, tokens_to_remove: int | Tensor) -> None:
        """Removes the last -n tokens of every row; a positive n is the length to keep (legacy)."""
        n = int(tokens_to_remove)  # may be a 0-d tensor, which must not become our length
        length = self.seen + n if n < 0 else n
        if n == 0 or length >= self.seen:
            return
        self._require_changeable()
        length = max(0, length)
        kept = np.full((len(self.rows), length), True) if self.kept is None else self.kept
        lengths = kept[:, :length].sum(1)
        for row, shorter in zip(self.rows, lengths.tolist()):
            self.kv.require_truncatable(row, shorter)
        for row, shorter in zip(self.rows, lengths.tolist()):
            self.kv.truncate(row, shorter)
        self.seen = length
        self.texts.cut(lengths)
        self.offsets.forget()
        self.kept = None if self.kept is None or not length else self.kept[:, :length]

    @in_turn
    def reset(self) -> None:
        """Empties the cache; its pages go back to the pool."""
        require_none_on(self.kv)
        self.abort_step()
        self.kv.free(self.rows)
        self._lease.seqs = []
        self.seen, self.kept, self.texts = 0, None, Texts()

    def close(self) -> None:
        """Returns the pages and detaches the model from paged attention. Idempotent."""
        if self._finalizer.alive:
            if any(x is not None for x in (self.opened, self._entry, self._told)):
                with self.kv.lock:
                    self.abort_step()
                    self.end_forward()
            with Uninterrupted():
                self._finalizer()

    def __enter__(self) -> PagedCache:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    @in_turn
    def stats(self) -> CacheStats:
        """Counts the pages and tokens of all caches on this pool together."""
        forget_dead()
        return self.kv.stats()

    def __repr__(self) -> str:
        state = f"{len(self.rows)} rows, {self.seen} tokens" if self._finalizer.alive else "closed"
        return f"PagedCache({state})"
