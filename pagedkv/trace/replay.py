"""Runs the events of a trace on a cache of the same pages, whose layers are as small as can be.

The cache is a `PagedKVCache` like any other, so what happens to its pages is what happened to those
of the recorded one. Two things it is told instead of deciding them: which pages a policy chose, and
whether there was memory.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator
from typing import Any

import numpy as np

from pagedkv.arrays import Ints
from pagedkv.cache.cache import PagedKVCache
from pagedkv.config import CacheConfig
from pagedkv.errors import CorruptFileError
from pagedkv.models import LayerGroup, StateLayer
from pagedkv.pages.evict import Evictor, TableEntries, Victims
from pagedkv.pages.salts import Salt
from pagedkv.pages.tables import PageTables
from pagedkv.recording.recorder import digest, tables_of
from pagedkv.retention import Policy
from pagedkv.saving import sequence as saving
from pagedkv.saving.match import Saved

from .read import Event, Trace, ids_of, read

LAYERS = 2  # of each group: with one alone, no step could leave out a layer


def replay(path: str | os.PathLike[str], *, check: bool = True) -> PagedKVCache:
    """Replays a trace from its beginning to its end, and returns the cache as it is then.

    Args:
        check: verify every invariant after every event.

    Raises:
        CorruptFileError: an event does not do here what it did when it was recorded.
        CorruptCacheError: an invariant is broken.
    """
    run = Replay(read(path), check)
    deque(run, maxlen=0)  # to its end
    return run.cache


class Replay:
    """A trace in the course of its replay; iterating yields each event once it has happened.

    Attributes:
        cache: where it happens.
        step: the latest step, open or not.
        left: after an event, how pages lost their owners other than by its end: ("offloaded" or
            "evicted", page ids).
    """

    def __init__(self, trace: Trace, check: bool = True) -> None:
        self.trace, self._check = trace, check
        with trace.configuration() as config:
            self.cache = PagedKVCache(_smallest(config), device="cpu", backend="torch")
        self.left: list[tuple[str, Ints]] = []
        self._tables = self.cache._tables
        self.step: Any = None
        self._stepped: list[int] = []
        self._memory: Iterator[int] = iter(())
        self._told = _Told(self.cache.config, self.left)
        if trace.config["retention"]:
            self.cache._evictor = self._told
        growth, tier = self._tables.growth, self.cache._tier
        if growth is not None:
            growth._resize = self._asked(growth._resize)
        if tier is not None:
            tier._copy_in = self._asked(tier._copy_in)  # type: ignore[method-assign]
            tier._copy_out = self._asked(tier._copy_out)  # type: ignore[method-assign]

    def __iter__(self) -> Iterator[Event]:
        for line, event in enumerate(self.trace.events, start=2):
            self.left.clear()
            try:
                self._memory = iter(event.get("memory", ()))
                self._told.tell(event.get("evicted"))
                pages = getattr(self, f"_{event['op']}")(event)
                same = "sum" not in event or digest(self._tables, pages) == event["sum"]
            except Exception as error:  # whatever a damaged event may raise
                raise self._differs(line, event, f"{type(error).__name__}: {error}") from error
            if not same:
                raise self._differs(line, event, "other pages are in use")
            if self._check:
                self.cache.check()
            yield event

    def _differs(self, line: int, event: Event, how: str) -> CorruptFileError:
        return CorruptFileError(
            f"{self.trace.name}: line {line}, {event['op']}, does not happen as it was recorded: "
            f"{how}"
        )

    def _asked(self, call: Any) -> Any:
        def asked(*args: Any) -> Any:
            if not next(self._memory, 1):
                raise MemoryError("as it was recorded")
            return call(*args)

        return asked

    # ------------------------------------------------------------------ one method an event

    def _add(self, event: Event) -> Ints:
        prompt = event.get("prompt")
        ids = None if prompt is None else ids_of(prompt)
        salt = _salt(event["salt"])
        _same(event["seq"], self.cache.add(ids, salt=salt, max_tokens=event.get("max_tokens")))
        return tables_of(self._tables, [event["seq"]])

    def _fork(self, event: Event) -> None:
        _same(event["seqs"], self.cache.fork(event["seq"], len(event["seqs"])))

    def _load(self, event: Event) -> Ints:
        at: Any = [
            {int(kind): (np.array(columns), {}) for kind, columns in pages.items()}
            for pages in event["columns"]
        ]
        state: Any = [None] if event["state"] else []
        texts = ids_of(event["tokens"]), ids_of(event["pending"])
        saved = Saved(*texts, at, [{} for _ in at], state, event.get("before"))
        cache: Any = self.cache
        slots = _NoBytes() if cache._states else None
        parts = self._tables, _NoBytes(), slots, cache._statistics, saved
        salt = _salt(event["salt"])
        _same(event["seq"], saving.load(*parts, salt, cache._rescue))  # type: ignore[arg-type]
        return tables_of(self._tables, [event["seq"]])

    def _prepare(self, event: Event) -> Ints:
        self._stepped = event.get("seqs", self._stepped)
        new = np.broadcast_to(event["new"], len(self._stepped))
        if "ids" in event:
            ids = np.split(ids_of(event["ids"]), np.cumsum(new)[:-1])
            self.step = self.cache.prepare(self._stepped, ids)
        else:
            self.step = self.cache.prepare(self._stepped, num_new=new)
        plan = self.step._plan
        return self._tables.tables[self._tables.at(plan.grown_rows, plan.grown_columns)]

    def _commit(self, event: Event) -> None:
        step, ids, kept = self.step, None, event.get("kept")
        if kept is not None:
            kept = np.broadcast_to(kept, len(step.seqs))
        if "ids" in event:
            count = step._plan.new if kept is None else kept
            ids = np.split(ids_of(event["ids"]), np.cumsum(count)[:-1])
        layers = [0] if event.get("partial") else None
        step.wrote[:] = layers or range(self.cache.config.num_layers)
        step.states = None  # their bytes are not there, their slots are
        revocable = event.get("revocable", False)
        self.cache.commit(step, kept, ids, revocable=revocable, layers=layers)

    def _abort(self, event: Event) -> None:
        self.cache.abort(self.step)

    def _free(self, event: Event) -> None:
        self.cache.free(event["seqs"])

    def _truncate(self, event: Event) -> None:
        self.cache.truncate(event["seq"], event["n"])

    def _splice(self, event: Event) -> None:
        self.cache._splice(event["seq"], event["n"], ids_of(event["pending"]))

    def _checkpoint(self, event: Event) -> None:
        self.cache.checkpoint(event["seq"])

    def _offload(self, event: Event) -> None:
        held = tables_of(self._tables, event["seqs"])
        self.cache.offload(event["seqs"])
        self.left.append(("offloaded", np.unique(held[held >= 0])))

    def _restore(self, event: Event) -> Ints:
        self.cache.restore(event["seqs"], max_tokens=event.get("max_tokens"))
        return tables_of(self._tables, event["seqs"])

    def _clear(self, event: Event) -> None:
        self.cache.clear_prefixes()

    def _shrink(self, event: Event) -> None:
        self.cache.shrink()

    def _failed(self, event: Event) -> None:
        """A call that ran out of pages or memory: it changed nothing that is counted here."""
        event["call"], event["error"]  # which have to be told


class _Told(Evictor):
    """Evicts what it is told, in the place of a policy that looks at what pages hold."""

    def __init__(self, config: CacheConfig, left: list[tuple[str, Ints]]) -> None:
        super().__init__(config, _Recorded({}), _measure_nothing, _merge_nothing)
        self._victims: Victims | None = None
        self._left = left

    def tell(self, evicted: list[list[list[int]]] | None) -> None:
        """Says which entries of the tables go in the next call, and which get their values."""
        self._victims = None
        if evicted:
            entries = [TableEntries(*(np.array(x, dtype=np.int64) for x in e)) for e in evicted]
            nothing = TableEntries(*(column[:0] for column in entries[0]))
            self.policy.merges = len(entries) > 1
            self._victims = Victims(entries[0], entries[1] if len(entries) > 1 else nothing)

    def over_budget(self, tables: PageTables, rows: Ints, lengths: Ints) -> Victims | None:
        return self._victims

    def relieve(
        self, tables: PageTables, needed: Ints, room: Ints, grows: bool
    ) -> tuple[Ints, Victims | None]:
        back = np.zeros_like(needed)
        if self._victims is not None:
            groups = self._victims.leaving.groups
            back[:: tables.kinds] = np.bincount(groups, minlength=len(tables.windows))
        return back, self._victims

    def take(self, tables: PageTables, victims: Victims) -> None:
        self._left.append(("evicted", tables.tables[victims.leaving]))
        super().take(tables, victims)


class _Recorded(Policy):
    """Stands for the policy of the recording in a configuration; it is never asked for scores."""

    def __init__(self, said: dict[str, Any]) -> None:
        self.recent, self._pinned = said.get("recent", 0), said.get("pinned", 0)

    def pinned_pages(self, page_size: int) -> int:
        return int(self._pinned)


def _measure_nothing(*_: Any) -> dict[str, Any]:
    return {}


def _merge_nothing(*_: Any) -> Any:
    return lambda: None


class _NoBytes:
    """A storage for sequences from files, of which a trace has no bytes."""

    def adopt(self, group: int, parts: Any, statics: Any) -> tuple[Any, Any]:
        return parts, statics

    def put_in(self, *_: Any) -> None: ...

    def set_statics(self, *_: Any) -> None: ...

    def reserve(self, *_: Any) -> None: ...


def _smallest(config: dict[str, Any]) -> CacheConfig:
    """The configuration of a trace with layers of a few bytes."""
    groups = [
        LayerGroup(tuple(range(LAYERS * i, LAYERS * (i + 1))), group["window"])
        for i, group in enumerate(config["groups"])
    ]
    names = (
        "max_tokens", "page_size", "max_sequences", "max_sequence_length", "max_step_tokens",
        "rollback", "growth_step", "budget", "high_water", "low_water", "host_tokens",
        "max_states",
    )  # fmt: skip
    staged = config["staged"]
    return CacheConfig(
        num_layers=LAYERS * len(groups),
        num_kv_heads=1,
        head_dim=32 if staged else 1,
        dtype="float32",
        kv_format="int4" if staged else "dense",
        groups=tuple(groups),
        retention=_Recorded(config["retention"]) if config["retention"] else None,
        states=(StateLayer((((1,), "float32"),)),) if config["states"] else (),
        keep=config.get("keep"),  # which earlier ones do not say
        **{name: config[name] for name in names},
    )


def _salt(recorded: Any) -> Salt:
    if isinstance(recorded, list):
        return tuple((start, str(number).encode()) for start, number in recorded)
    return str(recorded).encode()


def _same(recorded: Any, found: Any) -> None:
    if recorded != found:
        raise ValueError(f"expected {recorded}, got {found}")
