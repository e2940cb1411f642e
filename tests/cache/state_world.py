"""A cache with recurrent states beside a model that keeps a dense state for every text."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any

import pytest
import torch

from pagedkv import CacheConfig, OutOfPagesError, PagedKVCache
from pagedkv.errors import (
    HostMemoryError,
    OffloadedError,
    OpenStepError,
    SequenceTooLongError,
    TooManySequencesError,
)
from tests.contents import SALTS, assert_contents
from tests.states import STATES, state_of, write_all


@dataclass
class Text:
    salt: bytes
    promised: bool
    tokens: list[int] = field(default_factory=list)
    pending: list[int] = field(default_factory=list)
    known: bool = True  # ids were told, and prefixes not cleared since
    state: int = 0  # a number for the state; 0: none
    marks: dict[int, int] = field(default_factory=dict)  # kept states by length


class StateWorld:
    """A cache and its model; operations take plain numbers, modulo what there is."""

    def __init__(self, config: CacheConfig, roomy: bool = False) -> None:
        self.config, self.roomy = config, roomy
        self.cache = PagedKVCache(config, device="cpu", debug=True)
        self.texts: dict[int, Text] = {}
        self.away: set[int] = set()
        self.kept: dict[tuple[bytes, tuple[int, ...]], int] = {}  # findable checkpoints
        self.in_step: set[int] = set()
        self.numbers = count(1)
        self.hits = self.refused = 0
        self._guard_writes()

    def _guard_writes(self) -> None:
        storage, slots = self.cache._states, self.cache._tables.states
        inner = storage.write

        def write(layer, targets, values, donate=False):
            assert len(set(targets.tolist())) == len(targets), "two rows write one slot"
            assert (slots.refcount[targets] == 1).all(), "a shared slot was written"
            inner(layer, targets, values, donate)

        storage.write = write

    # ---- operations

    def apply(self, op: tuple[Any, ...]) -> None:
        getattr(self, op[0])(*op[1:])
        if not self.in_step:
            self.verify()

    def pick(self, number: int) -> int:
        return sorted(self.texts)[number % len(self.texts)]

    def add(self, ids: Sequence[int] | None, salt: int, reserve: bool) -> None:
        text = Text(SALTS[salt % 2], reserve)
        limit = len(ids or []) + 3 if reserve else None
        before = self.snapshot()
        try:
            seq = self.cache.add(ids, salt=text.salt, max_tokens=limit)
        except TooManySequencesError:
            assert len(self.texts) == self.config.max_sequences
            return self.unchanged(before)
        except OutOfPagesError as error:
            assert reserve
            return self.short(error, before, 0, [])
        hit = self.cache.length(seq)
        if ids:
            text.tokens, text.pending = list(ids[:hit]), list(ids[hit:])
            known = [n for n in range(1, len(ids)) if (text.salt, tuple(ids[:n])) in self.kept]
            assert hit in (0, *known), "a prefix was found that has no state"
            if hit:
                self.hits += 1
                text.state = text.marks[hit] = self.kept[text.salt, tuple(ids[:hit])]
        self.texts[seq] = text
        return None

    def fork(self, number: int, n: int) -> None:
        seq = self.pick(number)
        before, source = self.snapshot(), self.texts[seq]
        try:
            forks = self.cache.fork(seq, n)
        except OpenStepError:
            assert seq in self.in_step
            return self.unchanged(before)
        except OffloadedError:
            assert seq in self.away
            return self.unchanged(before)
        except TooManySequencesError:
            return self.unchanged(before)
        except OutOfPagesError as error:
            return self.short(error, before, 0, [])
        for child in forks:
            lists = {"tokens": list(source.tokens), "pending": list(source.pending)}
            self.texts[child] = replace(source, promised=False, marks=dict(source.marks), **lists)
        return None

    def checkpoint(self, number: int) -> None:
        seq = self.pick(number)
        before, text = self.snapshot(), self.texts[seq]
        try:
            self.cache.checkpoint(seq)
        except (OpenStepError, OffloadedError, ValueError):
            assert seq in self.in_step | self.away or not text.tokens
            return self.unchanged(before)
        key = text.salt, tuple(text.tokens)
        if text.known and self.has_prefix_key(seq):
            # What is kept under this key stays, unless it had to go.
            slot = self.cache._tables.states.slot[self.cache._tables.row_of(seq)]
            mine = slot in self.cache._tables.states.checkpoints.slots.values()
            text.marks[len(text.tokens)] = self.kept[key] = (
                text.state if mine else self.kept.get(key, text.state)
            )
        else:
            text.marks[len(text.tokens)] = text.state
        return None

    def has_prefix_key(self, seq: int) -> bool:
        tables = self.cache._tables
        return tables.prefix_key(tables.row_of(seq)) is not None

    def truncate(self, number: int, back: int) -> None:
        seq = self.pick(number)
        before, text = self.snapshot(), self.texts[seq]
        lengths = self.cache.checkpoints(seq)
        n = [0, len(text.tokens), *lengths, max(0, len(text.tokens) - 1)][back % (len(lengths) + 3)]
        try:
            self.cache.truncate(seq, n)
        except (OpenStepError, OffloadedError):
            assert seq in self.in_step | self.away
            return self.unchanged(before)
        except OutOfPagesError as error:
            assert not text.promised
            return self.short(error, before, 1, [seq])
        except ValueError:
            windowed = any(group.window for group in self.config.groups)
            evicts = self.config.retention is not None
            assert n not in (0, len(text.tokens), *lengths) or windowed or evicts
            return self.unchanged(before)
        if n < len(text.tokens):
            text.state = text.marks[n] if n else 0
            text.marks = {at: state for at, state in text.marks.items() if at <= n}
            text.promised = False  # it may have been given up
            text.pending = []
        del text.tokens[n:]
        return None

    def free(self, number: int) -> None:
        seq = self.pick(number)
        before = self.snapshot()
        if seq in self.in_step:
            try:
                self.cache.free(seq)
            except OpenStepError:
                return self.unchanged(before)
            raise AssertionError("a sequence in an open step was freed")
        self.cache.free(seq)
        del self.texts[seq]
        self.away.discard(seq)
        return None

    def offload(self, numbers: Sequence[int]) -> None:
        seqs = sorted({self.pick(number) for number in numbers} - self.away - self.in_step)
        before = self.snapshot()
        if not seqs:
            return None
        try:
            self.cache.offload(seqs)
        except HostMemoryError:
            return self.unchanged(before)
        self.away |= set(seqs)
        return None

    def restore(self, numbers: Sequence[int]) -> None:
        seqs = sorted({self.pick(number) for number in numbers} & self.away)
        before = self.snapshot()
        if not seqs:
            return None
        if self.cache.open_step is not None:
            with pytest.raises(OpenStepError):
                self.cache.restore(seqs)
            return self.unchanged(before)
        try:
            self.cache.restore(seqs)
        except OutOfPagesError as error:
            here = self.here()
            states = {self.texts[s].state for s in seqs} - {t.state for t in here.values()} - {0}
            return self.short(error, before, len(states), seqs)
        self.away -= set(seqs)
        return None

    def clear(self) -> None:
        if self.in_step:
            return None
        self.cache.clear_prefixes()
        self.kept.clear()
        for text in self.texts.values():
            text.known, text.marks = False, {}
        return None

    def step(
        self,
        entries: Sequence[tuple[int, Sequence[int], bool]],
        mode: str,
        ending: str,
        during: Sequence[tuple[Any, ...]] = (),
    ) -> None:
        """One step.

        entries: (which sequence, new ids, whether they are kept).
        mode: `tokens`, or `count` for a step that is not told the ids of texts without a prompt.
        """
        before = self.snapshot()
        batch: dict[int, tuple[list[int], bool]] = {}
        for number, wanted, accept in entries:
            seq = self.pick(number)
            if seq not in self.away and not self.in_step:
                ids = self.texts[seq].pending[: len(wanted)] or list(wanted)
                batch[seq] = ids, accept
        if not batch:
            return None
        seqs, news = list(batch), [ids for ids, _ in batch.values()]
        fed = {"tokens": news} if mode == "tokens" else {"num_new": [len(ids) for ids in news]}
        try:
            step = self.cache.prepare(seqs, **fed)
        except SequenceTooLongError:
            return self.unchanged(before)
        except OutOfPagesError as error:
            return self.short(error, before, self.needed(seqs), seqs)
        texts = [[*self.texts[s].tokens, *new] for s, new in zip(seqs, news, strict=True)]
        salts = [self.texts[seq].salt for seq in seqs]
        write_all(self.cache, step, texts, salts)
        self.in_step = set(seqs)
        for op in during:
            self.apply(op)
            self.cache.check()
        self.in_step = set()
        if ending == "abort":
            self.cache.abort(step)
            return self.verify()
        kept = [len(ids) * accept for ids, accept in batch.values()]
        self.cache.commit(step, kept if ending == "some" else None)
        for seq, new, taken in zip(seqs, news, kept, strict=True):
            text = self.texts[seq]
            if ending == "some" and not taken:
                continue
            told = mode == "tokens" or bool(text.pending)
            text.tokens += new
            text.pending = text.pending[len(new) :]
            text.known &= told
            text.state = next(self.numbers)
        return None

    # ---- what must hold

    def here(self) -> dict[int, Text]:
        return {seq: text for seq, text in self.texts.items() if seq not in self.away}

    def needed(self, seqs: Sequence[int]) -> int:
        """Slots that a step needs beside those in use."""
        states = [text.state for text in self.here().values()]
        mine = [self.texts[seq].state for seq in seqs]
        return sum(not state or states.count(state) > 1 for state in mine)

    def short(
        self, error: OutOfPagesError, before: Any, needed: int, asking: Sequence[int]
    ) -> None:
        """A call ran out for a reason, and changed nothing."""
        self.unchanged(before)
        self.refused += 1
        if "state slots" not in str(error):
            return
        here = self.here()
        held = len({text.state for text in here.values()} - {0})
        states = self.cache._tables.states
        promised = int(states.promised.sum())
        spare = 2 * bool(self.in_step) * len(self.in_step)
        mine = sum(self.texts[seq].promised for seq in asking if seq in self.away)
        promised -= sum(self.texts[seq].promised for seq in asking if seq not in self.away)
        assert held + needed + promised + mine + spare + 1 > self.config.max_states, error
        if asking and not self.in_step and not self.away:
            assert not all(self.texts[seq].promised for seq in asking), "a promise was broken"

    def snapshot(self) -> Any:
        states = self.cache._tables.states
        lengths = {seq: self.cache.length(seq) for seq in self.texts}
        slots = states.slot.tolist(), states.refcount.tolist(), dict(states.checkpoints.slots)
        marks = {seq: self.cache.checkpoints(seq) for seq in self.texts}
        stats = self.cache.stats()
        if self.config.growth_step is not None:  # a pool that grew for it stays as large
            stats = replace(stats, pages=0, free=0, bytes=0, growths=0)
        return stats, lengths, slots, marks

    def unchanged(self, before: Any) -> None:
        for then, now in zip(before, self.snapshot(), strict=True):
            assert then == now, "a call that failed changed something"

    def verify(self) -> None:
        self.cache.check()
        states = self.cache._tables.states
        here = self.here()
        held = {text.state for text in here.values()} - {0}
        stats = self.cache.stats()
        assert stats.sequences == len(self.texts)
        kept = set(states.checkpoints.slots.values())
        alone = kept - {int(slot) for slot in states.slot}
        assert stats.states == len(held) + len(alone), "slots: running, shared and checkpoints"
        assert stats.checkpoints == len(kept)
        for seq, text in self.texts.items():
            assert self.cache.length(seq) == len(text.tokens)
            assert self.cache.uncached(seq).tolist() == text.pending
            lengths = self.cache.checkpoints(seq)
            assert set(lengths) <= set(text.marks)
            if self.roomy:
                assert sorted(text.marks) == lengths
            if seq in here:
                for layer in range(len(STATES)):
                    found = self.cache.read_state(seq, layer)
                    expected = state_of(text.tokens, layer, text.salt)
                    for x, y in zip(found, expected, strict=True):
                        assert torch.equal(x[0], y), f"sequence {seq}: wrong state"
                if self.config.retention is None and self.config.kv_format == ("dense", "dense"):
                    assert_contents(self.cache, seq, text.tokens, text.salt)


# ------------------------------------------------------------------ random operations


BASES = [[0, 1, 2, 0, 0, 1, 1, 2, 2, 0, 1], [0, 1, 2, 0, 1, 1, 0, 2], [1, 1, 1, 2, 2, 2, 0]]


def random_op(source: random.Random, host: bool, inside: bool = False) -> tuple[Any, ...]:
    kinds = {"add": 16, "fork": 8, "checkpoint": 14, "truncate": 8, "free": 11, "clear": 1}
    if host:
        kinds |= {"offload": 8, "restore": 9}
    if not inside:
        kinds["step"] = 45
    kind = source.choices(list(kinds), list(kinds.values()))[0]
    number = source.randrange(64)
    if kind == "add":
        base = source.choice(BASES)
        tail = [source.randrange(3) for _ in range(source.randrange(3))]
        prompt = base[: source.randrange(len(base) + 1)] + tail
        return "add", prompt or None, int(source.random() < 0.2), source.random() < 0.25
    if kind == "fork":
        return "fork", number, source.choice((1, 1, 2, 3))
    if kind == "truncate":
        return "truncate", number, source.randrange(8)
    if kind in ("checkpoint", "free"):
        return kind, number
    if kind in ("offload", "restore"):
        return kind, [source.randrange(64) for _ in range(source.choice((1, 1, 2, 4)))]
    if kind == "clear":
        return ("clear",)
    entries = [
        (
            source.randrange(64),
            [source.randrange(3) for _ in range(source.choice((1, 1, 2, 5)))],
            source.random() < 0.6,
        )
        for _ in range(source.choice((1, 2, 3, 5)))
    ]
    during = [random_op(source, host, inside=True) for _ in range(source.choice((0, 0, 0, 1, 2)))]
    mode = source.choice(("tokens", "tokens", "tokens", "count"))
    return "step", entries, mode, source.choice(("commit", "commit", "some", "abort")), during
