"""`PagedKVCache`: sequences in, one step's metadata out.

The facade joins pages (who owns what), storage (the bytes) and metadata (what a step tells the
device). It owns the protocol: one open step at a time, lengths move in `commit` alone, and a call
that fails leaves everything as it was.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pagedkv.arrays import Ints, Tokens
from pagedkv.attention.backend import choose_backend
from pagedkv.config import CacheConfig
from pagedkv.config.checks import require_bool, require_int, require_path
from pagedkv.errors import HostMemoryError, OpenStepError, OutOfPagesError, WrongCacheError
from pagedkv.interrupt import Uninterrupted
from pagedkv.offload.tier import HostTier
from pagedkv.pages import check as pages_check
from pagedkv.pages import sequences
from pagedkv.pages import splice as splicing
from pagedkv.pages import step as pages_step
from pagedkv.pages.evict import Evictor
from pagedkv.pages.ids import (
    as_accepted,
    as_ids,
    as_max_tokens,
    committed_ids,
    feed,
    require_whole,
    several,
)
from pagedkv.pages.layers import as_layers, require_written
from pagedkv.pages.notes import Notes
from pagedkv.pages.plan import PagePlan
from pagedkv.pages.salts import Salt, as_salt
from pagedkv.pages.stats import CacheStats, collect
from pagedkv.pages.tables import PageTables
from pagedkv.ranks import ALONE, Ranks
from pagedkv.recording import Recorder, Unrecorded
from pagedkv.saving import sequence as saving
from pagedkv.saving.match import Saved
from pagedkv.saving.store import PrefixStore
from pagedkv.step.device_tables import Devices, DeviceTables
from pagedkv.step.metadata import StepMetadata
from pagedkv.step.states import StepStates
from pagedkv.storage import Placement, make_storage
from pagedkv.storage.memory import (
    budgeted,
    host_memory,
    memory_errors,
    require_room_for_books,
)
from pagedkv.storage.merge_values import merge_values
from pagedkv.storage.page_statistics import PageStatistics
from pagedkv.storage.states import StateStorage

from .debug import check_bounds, check_poison, poison_new, poison_tails
from .explain import Explanation, explain
from .fair_turns import Turns
from .forked import refuse_in_children
from .identity import Identity
from .lock import PagesLock
from .pressure import OnPressure, PressureHandler, retrying
from .step_copies import StepCopies
from .stored_prefixes import SaltedText, StoredPrefixes
from .stored_states import StoredStates

Ids = Any  # integers: a list, an array or a CPU tensor


class PagedKVCache:
    """Keys and values of many sequences, in pages they may share. Serves one thread at a time.

    Threads that share it make every call in `with cache.lock:`, and hold the lock for a whole step.
    `PagedCache` and `BatchGenerator` do so by themselves.

    Args:
        config: shape and limits.
        device: `auto` is CUDA where there is a card, else the CPU. A sequence names a device for
            each layer, then one for each state layer; steps begin on the first one.
        backend: `triton`, `c`, `torch`, or `auto`: Triton on CUDA, C on a processor, and torch
            where these are not installed or cannot be compiled.
        debug: fill unused slots with NaN, so that reading one shows; `check` verifies it.
        on_pressure: called with the cache and a `Pressure` before a call fails because pages ran
            short and no cached prefix is left to reuse. It may free, truncate or offload; if it
            returns True and has changed something, the call is tried again.
            `pressure.offload_idle` is such a callback.
        prefix_store: a folder, or a `PrefixStore`, in which prefixes outlast the process.
        trace: a file in which every change of the pages is recorded, for `pagedkv trace` to show;
            the recording ends with the cache.

    Raises:
        BudgetExceeded: the pages do not fit into memory.
        NotImplementedError: the backend has no kernels for this device, dtype or head dim.
        ForeignFileError: a file that is no trace has the trace's name; it is left alone.
        ValueError: the prefix store is no writable folder, or cannot serve such a cache.

    Examples:
        K and V come from a model; here they are random. The methods' examples continue this one.

        >>> import torch
        >>> from pagedkv import CacheConfig, PagedKVCache, paged_attention
        >>> shape = {"num_layers": 1, "num_kv_heads": 2, "head_dim": 16, "dtype": "float32"}
        >>> config = CacheConfig(**shape, max_tokens=1024, host_tokens=256)
        >>> cache = PagedKVCache(config, device="cpu")
        >>> def attend(step):
        ...     q, k, v = torch.randn(step.num_tokens, 8, 16).split([4, 2, 2], dim=1)
        ...     return paged_attention(q, k, v, step, layer=0)
        >>> seq = cache.add(list(range(20)))
        >>> with cache.step([seq]) as step:
        ...     out = attend(step)  # [20, 4, 16]
        >>> print(cache.length(seq), "tokens in", cache.stats().live, "pages")
        20 tokens in 2 pages
    """

    def __init__(
        self,
        config: CacheConfig,
        *,
        device: str | torch.device | Sequence[str | torch.device] | Placement = "auto",
        backend: str = "auto",
        debug: bool = False,
        on_pressure: OnPressure | None = None,
        prefix_store: str | os.PathLike[str] | None = None,
        trace: str | os.PathLike[str] | None = None,
    ) -> None:
        if not isinstance(config, CacheConfig):
            raise TypeError(f"config: expected a CacheConfig, got {type(config).__name__}")
        if on_pressure is not None and not callable(on_pressure):
            raise TypeError(f"on_pressure: expected a callable, got {type(on_pressure).__name__}")
        require_bool("debug", debug)
        if trace is not None:
            require_path("trace", trace)
        self.config = config
        self.identity = Identity(config.fingerprint)
        self.placement = Placement.of(device, config)
        self.device = self.placement.home
        self.backend = choose_backend(backend, self.device)
        self.debug = debug
        if config.larger_than_int8:
            warnings.warn(f"kv_format: {config.larger_than_int8}", stacklevel=2)
        self._prefixes: StoredPrefixes | None = None
        if prefix_store is not None:
            kind = StoredStates if config.states else StoredPrefixes
            self._prefixes = kind(prefix_store, config)
        with budgeted(config, self.device):
            self._make(None if trace is None else Notes())
        self._pressure = None if on_pressure is None else PressureHandler(self._tables, on_pressure)
        self._open: StepMetadata | None = None
        self._opened_by: threading.Thread | None = None  # None if it held the lock
        self._closing = threading.RLock()  # two threads may close a step: the second is refused
        self._released: list[int] = []
        self.running: set[int] = set()  # sequences of batch jobs, which are never called idle
        self.lock = PagesLock()  # a call from within a turn is refused, and cleans up
        self.turns = Turns(self.lock)
        self.ranks = ALONE
        self._recorder = Unrecorded()
        if trace is not None:
            on_host = None if self._tier is None else self._tier.page_counts
            self._recorder = Recorder(trace, config, self._tables, on_host)
        refuse_in_children(self)

    def _make(self, notes: Notes | None) -> None:
        """Makes everything that takes memory."""
        config = self.config
        self._storage = make_storage(config, self.placement, self.backend)
        require_room_for_books(config)
        self._tables = PageTables(config, notes)
        if config.growth_step is not None:
            increment = [config.pages_at_once(group) for group in range(len(config.groups))]
            self._tables.let_grow(increment, self._storage.memory.resize)
        self._statistics = PageStatistics(config, self._tables.base, self._storage)
        merge = partial(merge_values, self._storage, config, self._tables.base)
        self._evictor = Evictor.of(config, self._statistics.measure, merge)
        self._devices = self._make_devices()
        states = config, self.placement.states, self.debug
        self._states = StateStorage(*states) if config.states else None
        parts = self._tables, self._storage, self._statistics, config
        self._copies = StepCopies(*parts)
        self._tier = HostTier(*parts, self._states) if config.host_tokens else None

    def _make_devices(self) -> Devices:
        """Makes page tables on every device."""
        layers_on = self.placement.layers_on
        each = [(DeviceTables(self._tables, at), self._storage.on(at)) for at in layers_on]
        of = {layer: i for i, layers in enumerate(layers_on.values()) for layer in layers}
        return Devices(each, of if len(each) > 1 else None)

    def follow(self, ranks: Ranks) -> None:
        """Makes this cache decide like the caches of the other ranks from now on.

        The other ranks hold the other heads of the same sequences. All ranks call this, and make
        the same calls afterwards.

        Raises:
            ValueError: this cache has an option whose decisions only one rank would know.
            MemoryError: there is no memory for the host tier, which is taken now.
        """
        ranks.refuse(
            growth_step=self.config.growth_step,
            on_pressure=self._pressure,
            prefix_store=self._prefixes,
        )
        if self._tier is not None:
            with memory_errors():
                self._tier.take_memory()
        self.ranks = self._statistics.ranks = ranks

    # ------------------------------------------------------------------ sequences

    def add(
        self, tokens: Ids | None = None, *, salt: Salt = b"", max_tokens: int | None = None
    ) -> int:
        """Starts a sequence on the pages of the longest cached prefix of `tokens`.

        Args:
            tokens: `[n]` ids of the prompt, at least one; None for a sequence fed later.
            salt: prefixes are shared only between sequences of the same salt. A list has regions,
                `[(0, b""), (n, b"user 7")]`: all sequences with the first salt share the pages
                before the page of token n; only sequences with both salts share the later pages.
            max_tokens: set pages aside for this many tokens, so that the sequence never runs out.

        Returns:
            The sequence's id. `length` tells how many tokens were found, `uncached` which are left.

        Raises:
            OutOfPagesError: there are too few pages for the reservation now.
            SequenceTooLongError, TooManySequencesError: it can never fit; no row is free.

        Examples:
            >>> other = cache.add([*range(18), 99, 100])
            >>> cache.length(other), cache.uncached(other).tolist()
            (18, [99, 100])
        """
        self._free_released()
        salt = as_salt(salt)
        if max_tokens is not None:
            max_tokens = as_max_tokens(max_tokens)
        ids = None if tokens is None else as_ids("tokens", tokens)
        salt = self.identity.salted(salt)
        if self._prefixes is not None and ids is not None:
            self._prefixes.fetch(SaltedText(self, ids, salt))
        add = partial(self._add, ids, salt, max_tokens)
        seq = retrying(self._pressure, self, "add", (), add, self._take_back)
        if self._prefixes is not None and ids is not None:
            self._prefixes.expect(seq, ids, salt)
        return seq

    def _add(self, ids: Tokens | None, salt: Salt, max_tokens: int | None) -> int:
        tables = self._tables
        reused = tables.tokens_reused
        seq = sequences.add(tables, ids, salt=salt, max_tokens=max_tokens)
        if self._tier is not None and ids is not None:
            row = tables.row_of(seq)
            try:
                with memory_errors():
                    if self._tier.extend(row, ids):
                        self._poison_restored([row])
            except BaseException as error:
                sequences.free(tables, [seq])
                tables.tokens_reused = reused
                if not isinstance(error, MemoryError) or self.ranks.size > 1:
                    raise
                # The prompt can be computed instead, so a lack of memory to copy it is no error.
                seq = sequences.add(tables, ids, salt=salt, max_tokens=max_tokens)
        size = None if ids is None else ids.size
        self._recorder.note("add", seq=seq, tokens=size, max_tokens=max_tokens)
        return seq

    def uncached(self, seq: int) -> Tokens:
        """Prompt ids of a sequence that still need compute; never empty right after `add`.

        Examples:
            >>> cache.uncached(cache.add([0, 1, 2, 77])).tolist()
            [77]
        """
        return self._tables.uncached(seq).copy()

    def fork(self, seq: int, n: int = 1) -> list[int]:
        """Starts n sequences that share all of a sequence's pages; a write copies the last one.

        Examples:
            >>> samples = cache.fork(seq, 4)
            >>> cache.stats().live, cache.stats().shared
            (2, 2)
        """
        self._free_released()
        self._require_not_in_step([self._tables.row_of(seq)])
        n = int(n) if isinstance(n, np.integer) else n
        fork = partial(self._fork, seq, n)
        return retrying(self._pressure, self, "fork", (seq,), fork, self._take_back)

    def _fork(self, seq: int, n: int) -> list[int]:
        seqs = sequences.fork(self._tables, seq, n)
        self._recorder.note("fork", seq=int(seq), seqs=seqs)
        return seqs

    # ------------------------------------------------------------------ one step

    def prepare(
        self,
        seqs: Sequence[int] | Ints,
        tokens: Any = None,
        *,
        num_new: int | Sequence[int] | Ints | None = None,
    ) -> StepMetadata:
        """Makes room for the new tokens of some sequences and opens a step.

        Args:
            seqs: `[B]` distinct sequence ids.
            tokens: the new ids: `[B]` (one each), `[B, k]`, or a list of B arrays. Default: what
                `uncached` lists. With `num_new` also a packed `[T]` tensor on the cache's device,
                which is passed on to the model and not read.
            num_new: how many new tokens each sequence gets, as one number or `[B]`, without ids. A
                sequence with uncached prompt ids takes the next ones.

        The uncached ids of a prompt come first, in chunks of any size, and other tokens after them.

        Raises:
            OutOfPagesError, SequenceTooLongError: nothing was changed.
            OpenStepError: the previous step is neither committed nor aborted.

        Examples:
            >>> step = cache.prepare([seq], tokens=[20])
            >>> step.positions
            tensor([20])
            >>> cache.abort(step)
        """
        self._free_released()
        prepare = partial(self._prepare, seqs, tokens, num_new)
        with_evictions = partial(prepare, self._evictor)
        if self._pressure is None:
            return retrying(None, self, "prepare", (), with_evictions, self.abort)
        try:  # the callback comes first: a policy would evict pages for good
            step = retrying(
                self._pressure, self, "prepare", seqs, partial(prepare, None), self.abort
            )
        except OutOfPagesError:
            if self._evictor is None:
                raise
            step = retrying(None, self, "prepare", (), with_evictions, self.abort)
        self._pressure.touch(step._plan.rows)
        return step

    def _prepare(
        self, seqs: Any, tokens: Any, num_new: Any, evictor: Evictor | None
    ) -> StepMetadata:
        tables = self._tables
        held = self.lock.require_free()
        if self._open is not None:  # perhaps by `on_pressure`
            raise OpenStepError("prepare: the previous step is open, commit or abort it first")
        if isinstance(seqs, (set, frozenset)):
            raise TypeError("seqs: expected a list, whose order `tokens` follows, got a set")
        rows = tables.rows_of(seqs)
        tables.require_here(rows.tolist() if tables.offloaded else ())
        passed_on = tokens if isinstance(tokens, Tensor) and num_new is not None else None
        most = self.config.max_step_tokens
        ids, new = feed(tables, rows, None if passed_on is not None else tokens, num_new, most)
        if passed_on is not None:
            self._check_passed_on(passed_on, ids, int(new.sum()))
        plan = pages_step.prepare(tables, rows, new, ids, most, evictor)
        try:
            self._rescue()
            names = tables.seqs[rows]
            parts = tables, self._devices, self.config, self.backend
            step = StepMetadata(names, plan, *parts, passed_on)
            self._copies.copy(plan)
            if self.debug:
                poison_new(tables, self._storage, plan)
            self._copies.watch(step, plan)
            if tables.states is not None and self._states is not None:
                source, target = tables.states.slot[rows], tables.states.target[rows]
                self._states.reserve(int(target.max()) + 1)
                if self.debug:
                    self._states.poison(target[target != source])
                step.states = StepStates(self._states, source, target)
        except BaseException:
            pages_step.abort(tables, plan)
            if self.debug:
                poison_tails(tables, self._storage, plan.rows)
            raise
        self._open = step
        self._opened_by = None if held else threading.current_thread()
        self._recorder.prepared(names, plan)
        return step

    def _check_passed_on(self, tokens: Tensor, pending: Tokens | None, total: int) -> None:
        if pending is not None:
            raise ValueError("tokens: expected ids while a prompt is left, got a tensor")
        if tokens.shape != (total,):
            raise ValueError(f"tokens: expected {total} packed ids, got {list(tokens.shape)}")
        if tokens.is_floating_point() or tokens.dtype == torch.bool:
            raise TypeError(f"tokens: expected integer ids, got {tokens.dtype}")
        if tokens.device != self.device:
            raise ValueError(f"tokens: expected device {self.device}, got {tokens.device}")

    def commit(
        self,
        step: StepMetadata,
        accepted: Ids | None = None,
        tokens: Any = None,
        *,
        revocable: bool = False,
        layers: Iterable[int] | None = None,
    ) -> None:
        """Moves lengths by the step's tokens, once, and makes them findable.

        Args:
            accepted: `[B]`, how many of its new tokens each sequence keeps; default all. Or B
                lists of places of the kept tokens, ascending, as the path of a tree (`tree_of`).
                The kept tokens move to the slots that follow the text.
            tokens: ids for a step that was prepared by count, in the forms of `prepare`; the first
                `accepted` ids of each sequence are used.
            revocable: until their next commit, layers with a window keep every page that `truncate`
                needs to go back to the length before this step, whatever `rollback` is.
            layers: the layers that write in this step, once or more often; by default every layer
                writes once. Tokens that some layers did not write are never found as a prefix.

        Raises:
            ClosedStepError: the step was already committed or aborted.
            WrongCacheError: the step belongs to another cache.
            LayerWritesError: other layers wrote, and tokens would be kept; the step stays open.
            NotImplementedError: tokens would have to move, and the cache has a policy or staging
                pages; the step stays open.
            MemoryError: there was no memory to code pages or to choose states, and the step stays
                open; or none to merge values, and the step is committed. `step.state` says which.

        Examples:
            >>> step = cache.prepare([seq], tokens=[[20, 21, 22]])  # a draft
            >>> out = attend(step)
            >>> cache.commit(step, accepted=[2])
            >>> cache.length(seq)
            22
        """
        require_bool("revocable", revocable)
        with self._closing:
            plan = self._require_mine(step)
            kept, places = (None, None) if accepted is None else as_accepted(accepted, plan.new)
            ids = committed_ids(plan, kept, tokens, places)
            keeps = kept is None or bool(kept.any())
            named = as_layers(layers, self.config.num_layers)
            if keeps and not require_written(step.wrote, self.config.num_layers, named):
                ids = None
            if step.states is not None and keeps:
                require_whole(plan, kept)
                step.states.require_written()
            with Uninterrupted():
                # Work on the device comes first: if it lacks memory and fails, nothing has changed.
                taken = plan.new if kept is None else kept
                if places is not None:
                    self._copies.move(plan, taken, places)
                self._copies.code(plan, taken)
                if step.states is not None:
                    with memory_errors():
                        states = step.states.kept(taken)
                parts = self._tables, plan, kept, ids, self._evictor
                victims = pages_step.commit(*parts, revocable)
                if step.states is not None:
                    step.states.store(states)
                self._close(step, "committed")
                if self.debug and kept is not None:
                    poison_tails(self._tables, self._storage, plan.rows)
                try:  # the step stays committed even if there is no memory to merge values
                    if self._evictor is not None and victims is not None:
                        with memory_errors():
                            self._evictor.take(self._tables, victims)
                finally:
                    self._recorder.committed(plan, kept)
        if self._prefixes is not None:
            self._prefixes.committed(self)

    def abort(self, step: StepMetadata) -> None:
        """Takes a step back: lengths, tables and visible bytes are as before `prepare`.

        Pages that a policy evicted to make room for the step stay evicted.

        Raises:
            ClosedStepError: the step was already committed or aborted.
            WrongCacheError: the step belongs to another cache.

        Examples:
            >>> step = cache.prepare([seq], tokens=[20])
            >>> cache.abort(step)
            >>> cache.length(seq)
            20
        """
        with self._closing:
            plan = self._require_mine(step)
            with Uninterrupted():
                pages_step.abort(self._tables, plan)
                self._close(step, "aborted")
                if self.debug:
                    poison_tails(self._tables, self._storage, plan.rows)
                self._recorder.note("abort")

    @contextmanager
    def step(
        self,
        seqs: Sequence[int] | Ints,
        tokens: Any = None,
        *,
        num_new: int | Sequence[int] | Ints | None = None,
        layers: Iterable[int] | None = None,
    ) -> Iterator[StepMetadata]:
        """A step as a context: `prepare`, then `commit`, or `abort` if the body raises.

        The body may commit or abort the step itself.

        Examples:
            >>> with cache.step([seq], tokens=[20]) as step:
            ...     out = attend(step)
            >>> cache.length(seq)
            21
        """
        before, layers = self._open, as_layers(layers, self.config.num_layers)
        try:
            step = self.prepare(seqs, tokens, num_new=num_new)
        except KeyboardInterrupt:  # raised after the step was opened, before it was assigned
            if self._open is not None and self._open is not before:
                self.abort(self._open)
            raise
        try:
            yield step
            if step.state == "open":
                self.commit(step, layers=layers)
        except BaseException:
            if step.state == "open":
                self.abort(step)
            raise

    # ------------------------------------------------------------------ shorten, end, read

    def stored_prefix(self, tokens: Ids, *, salt: Salt = b"") -> tuple[int, int]:
        """How many tokens of a prompt have findable pages, and how many of these `add` would find.

        They differ if a model has recurrent states and no state is kept at the end of the pages.
        Only pages on the device count: `explain` counts those in host memory, too.

        Examples:
            >>> cache.stored_prefix([*range(18), 99])
            (18, 18)
        """
        return sequences.stored_prefix(
            self._tables, as_ids("tokens", tokens), self.identity.salted(as_salt(salt))
        )

    def explain(self, tokens: Ids, *, salt: Salt = b"") -> Explanation:
        """Says how much of a prompt `add` would find, and why not more; changes nothing.

        The answer may reveal texts under other salts: show it to the operator of the cache, not to
        the sender of the prompt.

        Examples:
            >>> cache.explain([0, 1, 2, 77]).found
            3
        """
        return explain(self, as_ids("tokens", tokens), as_salt(salt))

    def checkpoint(self, seq: int) -> None:
        """Keeps a sequence's current recurrent state, for a model with states.

        `truncate` can go back to this length, and a prompt that begins with this text is found up
        to here. No byte is copied, except to a prefix store. If a sequence needs a slot, the least
        recently used checkpoint is given up.

        Raises:
            ValueError: the cache has no states, or the sequence has no tokens.

        Examples:
            >>> from pagedkv.config import StateLayer
            >>> sums = StateLayer((((16,), "float32"),))  # 16 numbers of each text
            >>> config = CacheConfig(**shape, max_tokens=64, states=(sums,))
            >>> hybrid = PagedKVCache(config, device="cpu")
            >>> row = hybrid.add([1, 2, 3])
            >>> with hybrid.step([row]) as step:
            ...     out = attend(step)
            ...     step.write_state(0, [torch.ones(1, 16)])
            >>> hybrid.checkpoint(row)
            >>> hybrid.checkpoints(row), hybrid.read_state(row, layer=0)[0].shape
            ([3], torch.Size([1, 16]))
        """
        tables = self._tables
        (row,) = self._idle_rows([seq])
        if tables.states is None:
            raise ValueError("checkpoint: expected a cache with states, configure `states`")
        length = int(tables.lengths[row])
        if not length:
            raise ValueError(f"seq: sequence {seq} has no tokens, so it has no state to keep")
        with Uninterrupted():
            tables.states.keep(row, length, tables.prefix_key(row))
            self._recorder.note("checkpoint", seq=int(seq))
        if self._prefixes is not None:
            self._prefixes.checkpointed(self, int(seq))

    def checkpoints(self, seq: int) -> list[int]:
        """Lengths of a sequence's text, ascending, that `truncate` can go back to.

        Examples:
            >>> cache.checkpoints(seq)  # `checkpoint` shows a model with states
            []
        """
        states, row = self._tables.states, self._tables.row_of(seq)
        return [] if states is None else states.checkpoints.lengths(row)

    def read_state(self, seqs: int | Sequence[int] | Ints, layer: int) -> list[Tensor]:
        """Copies of the states of some sequences in one state layer: `[B, *shape]` each.

        Examples:
            >>> cache.read_state(seq, layer=0)  # `checkpoint` shows a model with states
            Traceback (most recent call last):
            ValueError: layer: this cache has no states, configure `states`
        """
        rows = self._tables.rows_of(several(seqs))
        self._tables.require_here(rows.tolist())
        if self._tables.states is None or self._states is None:
            raise ValueError("layer: this cache has no states, configure `states`")
        return StepStates(self._states, self._tables.states.slot[rows], rows).read(layer)

    def truncate(self, seq: int, n: int) -> None:
        """Shortens a sequence to its first n tokens.

        Pages that it drops and that others still have are taken off its reservation.

        Raises:
            ValueError: n is outside 0..length, or pages that a window needs at n were dropped, or a
                policy has evicted tokens behind n, or no state is kept at n.
            OutOfPagesError: the slot of the state at n is promised to another sequence.

        Examples:
            >>> cache.truncate(seq, 5)
            >>> cache.length(seq)
            5
        """
        self.require_truncatable(seq, n)
        with Uninterrupted():
            sequences.truncate(self._tables, seq, n)
            self._poison_restored([self._tables.row_of(seq)])
            self._recorder.note("truncate", seq=int(seq), n=int(n))

    def splice(self, seq: int, start: int, stop: int, tokens: Ids) -> None:
        """Replaces the tokens `start .. stop` of a sequence by any number of other tokens.

        The text keeps its pages up to `start`, or as far as it stays the same. The tokens behind
        depend on the change and are `uncached` then, as after `add`: the next steps compute them
        again. With states the sequence goes back to the last checkpoint before the change. Its
        reservation becomes smaller as with `truncate`.

        Raises:
            ValueError: there are no such tokens; ids behind them are not known; or the sequence
                cannot go back, because of a window, a policy, or a state without a checkpoint.
            SequenceTooLongError: the new text can never fit.

        Examples:
            >>> cache.splice(seq, 3, 10, [77])
            >>> cache.length(seq), cache.uncached(seq).tolist()
            (3, [77, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19])
        """
        plan = splicing.plan(self._tables, seq, start, stop, as_ids("tokens", tokens))
        self._require_not_in_step([plan.row])
        with Uninterrupted():
            splicing.splice(self._tables, seq, plan.kept, plan.rest)
            self._poison_restored([self._tables.row_of(seq)])
            self._recorder.note("splice", seq=int(seq), n=plan.kept)

    def require_truncatable(self, seq: int, n: int) -> None:
        """Raises the error that `truncate` would raise, and changes nothing."""
        self._require_not_in_step([sequences.require_truncatable(self._tables, seq, n)])

    def require_idle(self, seqs: int | Sequence[int] | Ints) -> None:
        """Raises unless these are distinct live sequences on the device and in no open step."""
        self._idle_rows(several(seqs))

    def _idle_rows(self, seqs: Sequence[int] | Ints) -> list[int]:
        rows = self._tables.rows_of(seqs).tolist()
        self._tables.require_here(rows)
        self._require_not_in_step(rows)
        return rows

    def free(self, seqs: int | Sequence[int] | Ints) -> None:
        """Ends sequences. Their committed prefixes stay findable until the pages are reused.

        Examples:
            >>> cache.free(seq)
            >>> cache.stats().live, cache.stats().cached
            (0, 2)
        """
        names = several(seqs)
        if len(names) == 0:
            return
        rows = self._tables.rows_of(names).tolist()
        self._require_not_in_step(rows)
        self._end(rows)

    def length(self, seq: int) -> int:
        """Committed tokens of a sequence's text.

        Examples:
            >>> cache.length(seq)
            20
        """
        return int(self._tables.lengths[self._tables.row_of(seq)])

    def gather(self, seq: int, layer: int) -> tuple[Tensor, Tensor]:
        """Copies of a sequence's committed K and V in one layer: `[stored, G, D]` each.

        With a window only the last tokens are stored. If a policy evicts, `positions` says which
        tokens are stored.

        Examples:
            >>> k, v = cache.gather(seq, layer=0)
            >>> k.shape
            torch.Size([20, 2, 16])
        """
        group, pages, tokens = self._stored(seq, layer)
        return self._storage.read(layer, pages - self._tables.base[group], tokens)

    def positions(self, seq: int, layer: int) -> Ints:
        """Returns which committed tokens of a sequence one layer stores: `[stored]`, ascending.

        Examples:
            >>> len(cache.positions(seq, layer=0))
            20
        """
        _, pages, tokens = self._stored(seq, layer)
        size = self.config.page_size
        places = self._tables.column_of[pages, None] * size + np.arange(size)
        return places.reshape(-1)[:tokens]

    def _stored(self, seq: int, layer: int) -> tuple[int, Ints, int]:
        """Returns a layer's group, a sequence's pages in it, and how many tokens they store."""
        row, tables, size = self._tables.row_of(seq), self._tables, self.config.page_size
        tables.require_here([row])
        require_int("layer", layer)
        if not 0 <= layer < self.config.num_layers:
            raise ValueError(f"layer: expected 0..{self.config.num_layers - 1}, got {layer}")
        group = self.config.group_of[layer]
        first, evicted = int(tables.first_kept[group, row]), int(tables.evicted[group, row])
        length = int(tables.lengths[row])
        pages = tables.tables[group, row, first : -(-length // size) - evicted]
        return group, pages, length - (first + evicted) * size

    def clear_prefixes(self) -> None:
        """Forgets every cached prefix, as is needed after a change of weights.

        Live sequences go on, but no prompt finds their pages any more.

        Examples:
            >>> cache.clear_prefixes()
            >>> cache.length(cache.add(list(range(20))))
            0
        """
        if self._open is not None:
            raise OpenStepError("clear_prefixes: a step is open, commit or abort it first")
        with Uninterrupted():
            sequences.clear_prefixes(self._tables)
            if self._tier is not None:
                self._tier.pages.clear()
            if self._prefixes is not None:
                self._prefixes.forget_weights()
            self._recorder.note("clear")

    def shrink(self) -> int:
        """Gives memory of free pages back: removes the free pages at the end of the pool.

        The pool can grow by them again. On a CPU the other free pages give their memory back, too,
        and get it again when they are written. Cached prefixes stay; call `clear_prefixes` first to
        give back their memory as well.

        Returns:
            Bytes of the removed pages.

        Raises:
            ValueError: the pool is of fixed size.
            OpenStepError: a step is neither committed nor aborted.

        Examples:
            >>> config = CacheConfig(**shape, max_tokens=1024, growth_step=128)
            >>> grown = PagedKVCache(config, device="cpu")
            >>> grown.free(grown.add(max_tokens=1000))
            >>> grown.shrink() > 0
            True
        """
        self._free_released()
        growth = self._tables.growth
        if growth is None:
            raise ValueError("shrink: expected a pool that grows, configure growth_step")
        if self._open is not None:
            raise OpenStepError("shrink: a step is open, commit or abort it first")
        self._storage.memory.require_resizable()
        before = self.stats().bytes
        with Uninterrupted():
            growth.shrink()
            for device_tables, _ in self._devices.each:
                device_tables.forget(growth.absent())
            for group, pages in enumerate(growth.free_pages()):
                self._storage.memory.release(group, pages)
            self._recorder.note("shrink")
        return before - self.stats().bytes

    # ------------------------------------------------------------------ host memory

    def offload(self, seqs: int | Sequence[int] | Ints) -> None:
        """Moves sequences to host memory, and returns all of their pages to the pool.

        Until `restore`, only `length`, `uncached` and `free` accept them. Their findable prefixes
        stay findable. A reservation is given up and made again by `restore`.

        Raises:
            HostMemoryError: `CacheConfig.host_tokens` or the machine does not allow it; nothing was
                changed.
            OffloadedError, OpenStepError: one of them is offloaded already, or in an open step.

        Examples:
            >>> cache.offload(seq)
            >>> cache.length(seq), cache.stats().live
            (20, 0)
        """
        self._free_released()
        names = several(seqs)
        if len(names) == 0:
            return
        rows = self._idle_rows(names)
        if self._tier is None:
            raise HostMemoryError("offload: there is no host tier, set CacheConfig.host_tokens")
        retrying(None, self, "offload", (), partial(self._offload, self._tier, rows))

    def _offload(self, tier: HostTier, rows: list[int]) -> None:
        seqs = self._tables.seqs[rows].tolist()
        with host_memory("offload"):
            tier.offload(rows)
        self._recorder.note("offload", seqs=seqs)

    def restore(self, seqs: int | Sequence[int] | Ints, *, max_tokens: int | None = None) -> None:
        """Brings offloaded sequences back, bit for bit; those that are here stay as they are.

        Args:
            max_tokens: as for `add`, for each of them; by default the reservation of before.

        Raises:
            OutOfPagesError: not all of them fit; nothing was changed.
            HostMemoryError: there is no memory to copy them through; nothing was changed.

        Examples:
            >>> cache.offload(seq)
            >>> cache.restore(seq)
            >>> cache.stats().live
            2
        """
        if self._open is not None and self._tables.states is not None:
            raise OpenStepError(
                "restore: a step is open, and its rows may still write the states of these "
                "sequences; commit or abort it first"
            )
        self._free_released()
        names = several(seqs)
        if len(names) == 0:
            return
        if max_tokens is not None:
            max_tokens = as_max_tokens(max_tokens)
        retrying(self._pressure, self, "restore", names, partial(self._restore, names, max_tokens))

    def _restore(self, seqs: Sequence[int] | Ints, max_tokens: int | None) -> None:
        # Every attempt looks rows up again: `on_pressure` may have freed or moved sequences.
        tables = self._tables
        rows = [row for row in tables.rows_of(seqs).tolist() if row in tables.offloaded]
        if rows:
            assert self._tier is not None
            sequences.require_fits(tables, max(tables.size_of(row) for row in rows), max_tokens)
            with host_memory("restore"):
                self._tier.restore(rows, max_tokens)
            self._poison_restored(rows)
            names = tables.seqs[rows].tolist()
            self._recorder.note("restore", seqs=names, max_tokens=max_tokens)

    def is_offloaded(self, seq: int) -> bool:
        """Whether a sequence is in host memory.

        Examples:
            >>> cache.is_offloaded(seq)
            False
        """
        return self._tables.row_of(seq) in self._tables.offloaded

    def copy_seconds(self, seq: int) -> float | None:
        """Estimates how long offloading and restoring a sequence takes, from copies made so far.

        None before the first copy, and without a host tier.
        """
        row = self._tables.row_of(seq)
        return None if self._tier is None else self._tier.seconds(row)

    # ------------------------------------------------------------------ files

    def save(self, seq: int, path: str | os.PathLike[str]) -> None:
        """Writes a sequence's committed state to a file, whole or not at all.

        The file holds the text's token ids where they are known, and is readable by its owner
        alone. It does not hold the salt. It belongs to the model that the sequence is `mark`ed
        with, by default the model as it is now.

        Raises:
            OSError: the file cannot be written; a file of this name is left as it was.
            HostMemoryError: there is no memory to copy the pages through.
            OffloadedError: the sequence is in host memory.

        Examples:
            >>> cache.save(seq, "text.kv")
            >>> cache.length(cache.load("text.kv"))
            20
        """
        require_path("path", path)
        row = self._tables.row_of(seq)
        self._tables.require_here([row])
        fingerprint = self._tables.models.get(row)
        if fingerprint is None:
            fingerprint = self.identity.fingerprint()
        with host_memory("save"):
            parts = self._tables, self._storage, self._states
            saving.save(*parts, self.config, fingerprint, row, path)

    def mark(self, seqs: int | Sequence[int] | Ints) -> None:
        """Marks sequences as computed with the model as it is now, for `save`."""
        names = several(seqs)
        if len(names):
            rows = self._tables.rows_of(names).tolist()
            self._tables.models.update(dict.fromkeys(rows, self.identity.fingerprint()))

    def load(self, path: str | os.PathLike[str], *, salt: Salt = b"") -> int:
        """Starts a sequence with what `save` wrote, also by a cache of another page size.

        Prompts can find its prefix if they could when it was saved.

        Args:
            salt: as for `add`.

        Raises:
            CorruptFileError, ForeignFileError, NewerFileError: nothing of the file is used.
            WrongModelError, WrongShapeError: the file belongs to another cache.
            OutOfPagesError, SequenceTooLongError, TooManySequencesError: it does not fit.
            HostMemoryError: the file does not fit into memory.

        Examples:
            >>> cache.save(seq, "text.kv")
            >>> cache.length(cache.load("text.kv"))
            20
        """
        require_path("path", path)
        self._free_released()
        salt = as_salt(salt)
        fingerprint = self.identity.fingerprint()

        def read() -> tuple[Saved, bool]:
            with host_memory("load"):
                found = saving.read(path, self._storage, self.config, fingerprint)
            # From here on, every findable prefix was computed with the current weights.
            return found, self.identity.forget_stale(self.clear_prefixes)

        saved, forgotten = self.ranks.agree(read)
        if any(self.ranks.most(forgotten)) and not forgotten:
            self.clear_prefixes()  # as another rank has done
        load = partial(self._load, saved, self.identity.salted(salt), fingerprint)
        return retrying(self._pressure, self, "load", (), load, self._take_back)

    def _load(self, saved: Saved, salt: Salt, fingerprint: bytes) -> int:
        parts = self._tables, self._storage, self._states, self._statistics
        with host_memory("load"):
            seq = saving.load(*parts, saved, salt, self._rescue)
        row = self._tables.row_of(seq)
        self._tables.models[row] = fingerprint
        self._poison_restored([row])
        self._recorder.note("load", seq=seq, tokens=saved.tokens.size)
        return seq

    def store(self, seq: int, *, salt: Salt = b"") -> int:
        """Writes a sequence's text to the prefix store now, even if no other prompt has had it.

        Args:
            salt: the salt that the sequence was added with.

        Returns:
            How many tokens of the text are in the store.

        Raises:
            ValueError: there is no prefix store, or the salt is another.

        Examples:
            >>> config = CacheConfig(**shape, max_tokens=1024, fingerprint=b"of a model")
            >>> kept = PagedKVCache(config, device="cpu", prefix_store="prefixes")
            >>> text = kept.add(list(range(600)))
            >>> with kept.step([text]) as step:
            ...     out = attend(step)
            >>> kept.store(text)
            512
        """
        if self._prefixes is None:
            raise ValueError("store: this cache has no prefix store, give it `prefix_store`")
        salt, row = self.identity.salted(as_salt(salt)), self._tables.row_of(seq)
        self.require_idle(seq)
        if self._tables.chain(row) != self._tables.index.chain(salt):
            raise ValueError(f"salt: expected the one that sequence {seq} was added with")
        return self._prefixes.keep(self, seq, salt)

    # ------------------------------------------------------------------ explain

    def stats(self) -> CacheStats:
        """Counts pages, and tokens that were computed and reused.

        Examples:
            >>> cache.stats().tokens_computed
            20
        """
        self._free_released()
        config, sizes = self.config, []
        for group in range(len(config.groups)):
            sizes.append(config.bytes_per_page(group))
            if config.staged:
                sizes.append(config.bytes_per_staging_page(group))
        host = () if self._tier is None else self._tier.counts()
        stats = collect(self._tables, sizes, config.nbytes_of_scales, *host)
        if self._prefixes is None:
            return stats
        return replace(stats, tokens_from_store=self._prefixes.tokens_found)

    def owners(self) -> Ints:
        """`[pages]`, how many sequences own each page; safe while another thread computes.

        Examples:
            >>> forks = cache.fork(seq, 2)
            >>> sorted(cache.owners().tolist())[-2:]
            [3, 3]
        """
        return self._tables.pool.refcount[:-1].astype(np.int64)

    def check(self) -> None:
        """Verifies every invariant; in debug mode also data on the device.

        This data is the page tables, the key bounds by which queries choose pages, and the NaN in
        unused slots.

        Raises:
            CorruptCacheError: an invariant is broken; the message names the page.

        Examples:
            >>> cache.check()
        """
        self._free_released()
        tables = self._tables
        pages_check.check(tables, self._open._plan if self._open else None)
        if self._tier is not None:
            self._tier.check()
        if self.debug:
            for device_tables, _ in self._devices.each:
                device_tables.check(tables)
            check_bounds(tables, self._storage)
            check_poison(tables, self._storage, self._open._plan if self._open else None)
            if self._open is not None and self._open.states is not None:
                self._open.states.check_unwritten()

    # ------------------------------------------------------------------ helpers

    @property
    def prefix_store(self) -> PrefixStore | None:
        """The folder in which prefixes last, if there is one."""
        return None if self._prefixes is None else self._prefixes.store

    @property
    def open_step(self) -> StepMetadata | None:
        """The step that is neither committed nor aborted, if there is one."""
        return self._open

    def abort_abandoned(self) -> None:
        """Aborts a step that a forward left open because it raised. The caller holds the lock.

        Raises:
            OpenStepError: another live thread has opened the step without the lock, or this thread
                is within a step of a batch.
        """
        if self._open is None:
            return
        if self.turns.is_mine:
            raise OpenStepError(
                "a forward was called inside an open step on the same pages, for example by a "
                "logits processor; give its PagedCache pages of its own"
            )
        owner = self._opened_by
        if owner not in (None, threading.current_thread()) and owner.is_alive():
            raise OpenStepError(
                f"a step is open in thread {owner.name!r}, which does not hold the lock of these "
                "pages: where threads share them, a loop of its own and layers that are called by "
                "hand need `with cache.lock:` around each step"
            )
        self.abort(self._open)

    def _take_back(self, seqs: int | list[int]) -> None:
        """Ends sequences whose ids never reached the caller, because of an interrupt."""
        names = several(seqs)
        sequences.free(self._tables, names)
        self._recorder.note("free", seqs=[int(seq) for seq in names])

    def _rescue(self) -> None:
        if self._tier is not None:
            self._tier.rescue()

    def _poison_restored(self, rows: Sequence[int]) -> None:
        if self.debug:
            poison_tails(self._tables, self._storage, np.asarray(rows))

    def release_later(self, seqs: Sequence[int]) -> None:
        """Queues sequences to be freed by the next `add`, `prepare`, `stats` or `check`.

        Only this call is safe inside a finalizer, which may run in the middle of any other call.
        """
        self._released.extend(seqs)

    def _free_released(self) -> None:
        if not self._released:
            return
        with Uninterrupted():
            seqs = self._released[:]
            del self._released[: len(seqs)]  # a finalizer in another thread may add some meanwhile
            live = [seq for seq in dict.fromkeys(seqs) if self._tables.is_live(seq)]
            if self._open is not None and set(live) & set(self._open.seqs.tolist()):
                self.abort(self._open)
            if live:
                self._end(self._tables.rows_of(live).tolist())

    def _end(self, rows: list[int]) -> None:
        with Uninterrupted():
            if self._tier is not None:
                self._tier.forget(rows)
            seqs = self._tables.seqs[rows]
            self.running.difference_update(seqs.tolist())
            sequences.free(self._tables, seqs)
            if self._states is not None:
                self._states.drop_donated()
            self._recorder.note("free", seqs=seqs.tolist())

    def _require_mine(self, step: StepMetadata) -> PagePlan:
        if not isinstance(step, StepMetadata):
            raise TypeError(f"step: expected a StepMetadata, got {type(step).__name__}")
        if not step.is_of(self._tables):
            raise WrongCacheError("step: belongs to another cache")
        step.require_open()
        return step._plan

    def _close(self, step: StepMetadata, state: Any) -> None:
        step.close(state)
        self._open = None

    def _require_not_in_step(self, rows: Sequence[int]) -> None:
        if self._open is not None:
            clash = set(rows) & set(self._open._plan.rows.tolist())
            if clash:
                seq = self._tables.seqs[clash.pop()]
                raise OpenStepError(f"seq: {seq} is in an open step, commit or abort it first")

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError(
            "a PagedKVCache cannot be copied or pickled: `fork` shares a sequence, `save` and "
            "`load` take one to another cache or process, and PagedKVCache(cache.config) is empty"
        )

    def __repr__(self) -> str:
        return f"PagedKVCache({self.config!r}, device={str(self.device)!r})"
