"""Checks the sequences of a `World` with recurrent states: slots, checkpoints, bytes.

A state is a number here, given anew by every step that a text keeps.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any

import torch

from pagedkv import CacheConfig, OutOfPagesError, PagedKVCache
from tests.states import STATES, state_of, write_states
from tests.world_checks import Text


class StateBooks:
    """The states of a world's texts.

    Attributes:
        kept: findable checkpoints, by salt and ids.
        hits: prompts that were found with a state.
    """

    def __init__(
        self, config: CacheConfig, cache: PagedKVCache, texts: dict[int, Text], away: set[int]
    ) -> None:
        self.config, self.cache, self.texts, self.away = config, cache, texts, away
        self.kept: dict[tuple[bytes, tuple[int, ...]], int] = {}
        self.numbers, self.hits = count(1), 0
        self._guard_writes()

    def _guard_writes(self) -> None:
        storage, slots = self.cache._states, self.cache._tables.states
        inner = storage.write

        def write(layer: int, targets: Any, *others: Any) -> None:
            assert len(set(targets.tolist())) == len(targets), "two rows write one slot"
            assert (slots.pool.refcount[targets] == 1).all(), "a shared slot was written"
            assert not slots.pool.findable[targets].any(), "a checkpoint was written"
            inner(layer, targets, *others)

        storage.write = write

    # ---- what operations do

    def found(self, text: Text, ids: Sequence[int], hit: int) -> None:
        known = [n for n in range(1, len(ids)) if (text.salt, tuple(ids[:n])) in self.kept]
        assert hit in (0, *known), "a prefix was found that has no state"
        if hit:
            self.hits += 1
            text.state = text.marks[hit] = self.kept[text.salt, tuple(ids[:hit])]

    def keep(self, seq: int) -> None:
        """A checkpoint was made."""
        text, tables = self.texts[seq], self.cache._tables
        key, row = (text.salt, tuple(text.tokens)), tables.row_of(seq)
        text.marks[len(text.tokens)] = text.state
        if text.told and tables.prefix_key(row) is not None:
            # What is kept under this key stays, unless it had to go.
            mine = tables.states.slot[row] in tables.states.checkpoints.slots.values()
            state = text.state if mine else self.kept.get(key, text.state)
            text.marks[len(text.tokens)] = self.kept[key] = state

    def lengths(self, seq: int) -> list[int]:
        """Lengths to which a text may be asked to go back; the last one is none of them."""
        length = len(self.texts[seq].tokens)
        return [0, length, *self.cache.checkpoints(seq), max(0, length - 1)]

    def cut(self, text: Text, n: int) -> None:
        text.state, text.void = text.marks[n] if n else 0, True
        text.marks = {at: state for at, state in text.marks.items() if at <= n}

    def clear(self) -> None:
        self.kept.clear()
        for text in self.texts.values():
            text.told, text.marks = False, {}

    def write(self, step: Any, texts: Sequence[Sequence[int]], seqs: Sequence[int]) -> None:
        write_states(step, texts, [self.texts[seq].salt for seq in seqs])

    def here(self) -> list[Text]:
        return [text for seq, text in self.texts.items() if seq not in self.away]

    def needed(self, seqs: Sequence[int]) -> int:
        """Slots that a step needs beside those in use."""
        states = [text.state for text in self.here()]
        mine = [self.texts[seq].state for seq in seqs]
        return sum(not state or states.count(state) > 1 for state in mine)

    def coming(self, seqs: Sequence[int]) -> int:
        """Slots that sequences need which come back from the host."""
        return len({self.texts[s].state for s in seqs} - {t.state for t in self.here()} - {0})

    # ---- what must hold

    def short(self, error: OutOfPagesError, needed: int, asking: Sequence[int], open_: int) -> None:
        """A call ran out of slots for a reason."""
        states = self.cache._tables.states
        held = len({text.state for text in self.here()} - {0})
        promised = int(states.promised.sum())
        promise = {
            seq: text.limit is not None and not text.void for seq, text in self.texts.items()
        }
        mine = sum(promise[seq] for seq in asking if seq in self.away)
        promised -= sum(promise[seq] for seq in asking if seq not in self.away)
        assert held + needed + promised + mine + 2 * open_ + 1 > self.config.max_states, error

    def snapshot(self) -> tuple[Any, ...]:
        states = self.cache._tables.states
        marks = {seq: self.cache.checkpoints(seq) for seq in self.texts}
        return (
            states.slot.tolist(),
            states.pool.refcount.tolist(),
            dict(states.checkpoints.slots),
            marks,
        )

    def verify(self) -> None:
        states, stats = self.cache._tables.states, self.cache.stats()
        held = {text.state for text in self.here()} - {0}
        kept = set(states.checkpoints.slots.values())
        alone = kept - {int(slot) for slot in states.slot}
        assert stats.states == len(held) + len(alone), "slots: running, shared and checkpoints"
        assert stats.checkpoints == len(kept)
        roomy = self.config.max_states >= 200
        for seq, text in self.texts.items():
            lengths = self.cache.checkpoints(seq)
            assert set(lengths) <= set(text.marks)
            assert not roomy or sorted(text.marks) == lengths

    def verify_contents(self, seq: int) -> None:
        text = self.texts[seq]
        for layer in range(len(STATES)):
            found = self.cache.read_state(seq, layer)
            for x, y in zip(found, state_of(text.tokens, layer, text.salt), strict=True):
                assert torch.equal(x[0], y), f"sequence {seq}: wrong state"
