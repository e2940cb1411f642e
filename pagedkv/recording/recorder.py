"""Hooks into a cache's calls and writes down each one that changed pages, in the order they ended.

Hooks are put on the one instance that is recorded, below its public calls, where an attempt either
changes everything or nothing: any other cache runs the very code it would run without this file.

What a replay cannot know is written with the call it belongs to: pages that a policy chose by what
they hold, and whether memory was refused by the machine. `sum` is a digest of the pools, and of the
pages that were handed out, that the replay is held against.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any
from zlib import crc32

import numpy as np

from pagedkv.arrays import Ints, Tokens
from pagedkv.config import CacheConfig
from pagedkv.errors import OutOfPagesError, PagedKVError
from pagedkv.interrupt import Uninterrupted
from pagedkv.pages.ids import as_accepted, committed_ids
from pagedkv.pages.layers import as_layers
from pagedkv.pages.plan import PagePlan
from pagedkv.pages.pool import within
from pagedkv.pages.salts import Salt
from pagedkv.pages.tables import PageTables

from .disguise import Disguise
from .lines import TraceFile

# Calls of a `PagedKVCache`, each hooked by the method of `Recorder` that has its name.
CALLS = (
    "_add", "_fork", "_load", "_prepare", "commit", "abort", "truncate", "_splice", "checkpoint",
    "offload", "_restore", "_end", "_take_back", "clear_prefixes", "shrink",
)  # fmt: skip


def record(cache: Any, path: str | os.PathLike[str]) -> None:
    """Records a cache without sequences from now on, until it is collected."""
    recorder = Recorder(cache.config, path)
    recorder.attach(cache)
    weakref.finalize(cache, recorder.file.close)


class Recorder:
    """Writes the events of one cache. Holds no reference to it, so that it ends when it should."""

    def __init__(self, config: CacheConfig, path: str | os.PathLike[str]) -> None:
        self.file = TraceFile(path, {"config": describe(config)})
        self._disguise = Disguise()
        self._salts: dict[bytes, int] = {}
        self._stepped: list[int] = []  # sequences of the step before
        self._answers: list[int] = []  # whether the machine gave memory, since the last event
        self._evicted: list[list[list[int]]] = []

    def attach(self, cache: Any) -> None:
        """Puts the hooks on a cache."""
        for name in CALLS:
            _hook(cache, name, getattr(self, name.strip("_")))
        tables, tier = cache._tables, cache._tier
        if cache._evictor is not None:
            _hook(cache._evictor, "take", self._evict)
        if tables.growth is not None:
            tables.growth._resize = partial(self._ask, tables.growth._resize)
        for name in ("_copy_in", "_copy_out") if tier is not None else ():
            _hook(tier, name, self._copy)

    # ------------------------------------------------------------------ sequences

    def add(self, call: Any, cache: Any, ids: Any, salt: Salt, max_tokens: int | None) -> int:
        seq = self._try("add", call, ids, salt, max_tokens)
        prompt = None if ids is None else self._disguise.ids(ids, np.arange(ids.size))
        given = {"prompt": prompt, "salt": self._salt(salt), "max_tokens": max_tokens}
        tables: PageTables = cache._tables
        self._note("add", tables, tables_of(tables, [seq]), seq=seq, **given)
        return seq

    def fork(self, call: Any, cache: Any, seq: int, n: int) -> list[int]:
        seqs = self._try("fork", call, seq, n)
        self._note("fork", cache._tables, seq=int(seq), seqs=seqs)
        return seqs

    def load(self, call: Any, cache: Any, saved: Any, salt: Salt, fingerprint: bytes) -> int:
        seq = self._try("load", call, saved, salt, fingerprint)
        length, pending = saved.tokens.size, saved.pending
        text = {
            "tokens": self._disguise.ids(saved.tokens, np.arange(length)),
            "pending": self._disguise.ids(pending, length + np.arange(pending.size)),
            "columns": [
                {kind: at.tolist() for kind, (at, _) in pages.items()} for pages in saved.pages
            ],
            "state": bool(saved.state),
            "before": saved.before,
        }
        tables: PageTables = cache._tables
        self._note("load", tables, tables_of(tables, [seq]), seq=seq, salt=self._salt(salt), **text)
        return seq

    def end(self, call: Any, cache: Any, rows: list[int]) -> None:
        seqs = cache._tables.seqs[rows].tolist()
        with Uninterrupted():
            call(rows)
            self._note("free", cache._tables, seqs=seqs)

    def take_back(self, call: Any, cache: Any, seqs: int | list[int]) -> None:
        call(seqs)
        self._note("free", cache._tables, seqs=np.atleast_1d(seqs).tolist())

    def truncate(self, call: Any, cache: Any, seq: int, n: int) -> None:
        with Uninterrupted():
            self._try("truncate", call, seq, n)
            self._note("truncate", cache._tables, seq=int(seq), n=int(n))

    def splice(self, call: Any, cache: Any, seq: int, kept: int, rest: Tokens) -> None:
        pending = self._disguise.ids(rest, kept + np.arange(rest.size))
        with Uninterrupted():
            call(seq, kept, rest)
            self._note("splice", cache._tables, seq=int(seq), n=kept, pending=pending)

    def checkpoint(self, call: Any, cache: Any, seq: int) -> None:
        with Uninterrupted():
            call(seq)
            self._note("checkpoint", cache._tables, seq=int(seq))

    def offload(self, call: Any, cache: Any, seqs: Any) -> None:
        seqs = [int(seq) for seq in np.atleast_1d(seqs)]
        with Uninterrupted():
            self._try("offload", call, seqs)
            if seqs:
                self._note("offload", cache._tables, seqs=seqs)

    def restore(self, call: Any, cache: Any, seqs: Any, max_tokens: int | None) -> None:
        self._try("restore", call, seqs, max_tokens)
        names, tables = [int(seq) for seq in seqs], cache._tables
        self._note("restore", tables, tables_of(tables, names), seqs=names, max_tokens=max_tokens)

    def clear_prefixes(self, call: Any, cache: Any) -> None:
        with Uninterrupted():
            call()
            self._note("clear", cache._tables)

    def shrink(self, call: Any, cache: Any) -> int:
        with Uninterrupted():
            freed: int = call()
            self._note("shrink", cache._tables)
        return freed

    # ------------------------------------------------------------------ steps

    def prepare(
        self, call: Any, cache: Any, seqs: Any, tokens: Any, num_new: Any, evictor: Any
    ) -> Any:
        tables = cache._tables
        before = tables.pool._versions
        try:
            step = self._try("prepare", call, seqs, tokens, num_new, evictor)
        except (PagedKVError, ValueError, TypeError):
            raise  # found before anything was changed
        except BaseException:
            if tables.pool._versions != before:  # there was no memory for the step: it was undone
                counts = num_new if tokens is None else [np.size(part) for part in tokens]
                rows = tables.rows_of(seqs)
                if counts is None:
                    counts = [tables.pending[row].size for row in rows.tolist()]
                new = np.broadcast_to(counts, rows.size).tolist()
                self._note("prepare", None, seqs=tables.seqs[rows].tolist(), new=new)
                self._note("abort", tables)
            raise
        plan: PagePlan = step._plan
        event: dict[str, Any] = {"new": _one_or_all(plan.new)}
        if (names := step.seqs.tolist()) != self._stepped:
            event["seqs"] = self._stepped = names
        if tokens is not None and num_new is None and plan.tokens is not None:
            event["ids"] = self._disguise.ids(plan.tokens, _positions(plan, plan.new))
        fresh = tables.tables[tables.at(plan.grown_rows, plan.grown_columns)]
        self._note("prepare", tables, fresh, **event)
        return step

    def commit(
        self,
        call: Any,
        cache: Any,
        step: Any,
        accepted: Any = None,
        tokens: Any = None,
        *,
        revocable: bool = False,
        layers: Any = None,
    ) -> None:
        layers = as_layers(layers, cache.config.num_layers)  # which may be read once only
        event: dict[str, Any] = {}
        was_open = getattr(step, "state", "") == "open"
        with Uninterrupted():
            try:
                self._try(
                    "commit", call, step, accepted, tokens, revocable=revocable, layers=layers
                )
            finally:
                if was_open and step.state == "committed":
                    plan, kept = step._plan, None
                    if accepted is not None:
                        kept = as_accepted(accepted, plan.new)
                        event["kept"] = _one_or_all(kept)
                    if tokens is not None:
                        count = plan.new if kept is None else kept
                        ids = committed_ids(plan, kept, tokens)
                        assert ids is not None
                        event["ids"] = self._disguise.ids(ids, _positions(plan, count))
                    if revocable:
                        event["revocable"] = True
                    if layers is not None and len(layers) < cache.config.num_layers:
                        event["partial"] = True
                    self._note("commit", cache._tables, **event)

    def abort(self, call: Any, cache: Any, step: Any) -> None:
        with Uninterrupted():
            call(step)
            self._note("abort", cache._tables)

    # ------------------------------------------------------------------ what a replay is told

    def _evict(self, call: Any, evictor: Any, tables: PageTables, victims: Any) -> None:
        call(tables, victims)
        parts = victims if evictor.policy.merges else victims[:1]
        self._evicted = [[column.tolist() for column in entries] for entries in parts]

    def _copy(self, call: Any, tier: Any, *args: Any) -> Any:
        return self._ask(call, *args)

    def _ask(self, call: Callable[..., Any], *args: Any) -> Any:
        """Calls what may find no memory."""
        self._answers.append(0)
        result = call(*args)
        self._answers[-1] = 1
        return result

    def _try(self, name: str, call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        """Calls; what fails for want of pages or memory is an event, too."""
        self._answers.clear()
        self._evicted = []
        try:
            return call(*args, **options)
        except (OutOfPagesError, MemoryError) as error:
            self._note("failed", None, call=name, error=type(error).__name__)
            raise

    def _note(
        self, op: str, tables: PageTables | None, pages: Ints | None = None, **event: Any
    ) -> None:
        event = {"op": op, **{k: v for k, v in event.items() if v is not None}}
        if not all(self._answers):
            event["memory"] = self._answers.copy()
        if self._evicted:
            event["evicted"] = self._evicted
        self._answers.clear()
        self._evicted = []
        if tables is not None:
            event["sum"] = digest(tables, pages)
        self.file.write(event)

    def _salt(self, salt: Salt) -> Any:
        """The number of a salt; of regions, where each begins and the number of its salt."""
        if isinstance(salt, bytes):
            return self._salts.setdefault(salt, len(self._salts))
        return [[start, self._salt(own)] for start, own in salt]


def _hook(owner: Any, name: str, hook: Callable[..., Any]) -> None:
    """Puts `hook` in the place of a method; it gets the method and its owner first.

    The owner is referenced weakly: through itself it would live until a collection.
    """
    here, method = weakref.ref(owner), getattr(type(owner), name)

    def hooked(*args: Any, **options: Any) -> Any:
        this = here()
        return hook(partial(method, this), this, *args, **options)

    setattr(owner, name, hooked)


def _positions(plan: PagePlan, count: Ints) -> Ints:
    """Positions of the first `count` new tokens of each row, packed."""
    if plan.most == 1 and count is plan.new:
        return plan.start
    return np.repeat(plan.start, count) + within(count)


def _one_or_all(counts: Ints) -> int | list[int]:
    """One number where all are equal."""
    listed: list[int] = counts.tolist()
    return listed[0] if listed.count(listed[0]) == len(listed) else listed


def tables_of(tables: PageTables, seqs: list[int]) -> Ints:
    """All pages of some sequences."""
    rows = tables.rows_of(seqs)
    return tables.tables[:, rows, : int(tables.num_pages[rows].max())]


def digest(tables: PageTables, pages: Ints | None = None) -> int:
    """A number that differs where pools have other counts or other pages were handed out."""
    pool = tables.pool
    found = crc32(pool.num_free.tobytes() + pool.num_cached.tobytes())
    return found if pages is None or not pages.size else crc32(pages.tobytes(), found)


def describe(config: CacheConfig) -> dict[str, Any]:
    """A configuration in JSON: what decides about pages, and bytes for those who look at them."""
    kinds = range(2 if config.staged else 1)
    sizes = [
        [config.bytes_per_page(g), config.bytes_per_staging_page(g)][kind]
        for g in range(len(config.groups))
        for kind in kinds
    ]
    names = (
        "max_tokens", "page_size", "max_sequences", "max_sequence_length", "max_step_tokens",
        "rollback", "growth_step", "budget", "keep", "high_water", "low_water", "host_tokens",
        "max_states", "kv_format", "dtype",
    )  # fmt: skip
    return {
        **{name: getattr(config, name) for name in names},
        "groups": [asdict(group) for group in config.groups],
        "retention": _policy(config),
        "staged": config.staged,
        "states": len(config.states),
        "bytes_per_page": sizes,
    }


def _policy(config: CacheConfig) -> dict[str, Any] | None:
    """The policy by name, with what of it decides about merging and about promises."""
    if (policy := config.policy) is None:
        return None
    pinned = policy.pinned_pages(config.page_size)
    said = {"merges": policy.merges, "recent": policy.recent, "pinned": pinned}
    return {"name": str(policy), **said}
