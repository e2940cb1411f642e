"""Jobs without a model.

`Job` plays the generator's part. A row's next token is a function of its text, and what the steps
write is recognisable, so that a row that went on from a wrong page or position shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from zlib import crc32

import numpy as np
import torch

from pagedkv import CacheConfig, PagedKVCache
from pagedkv.batch.rows import Batch, Outcome, Row
from pagedkv.batch.scheduler import Scheduler
from tests.cases import one_group
from tests.contents import assert_contents, write_step


def row(prompt: Sequence[int], new: int = 4, ends: int = 0, samples: int = 0, index: int = 0):
    """A row that may get `new` tokens and gets `ends` of them, with its other samples in it."""
    ids = np.array(prompt, np.int32)
    made = [Row(ids, len(ids) + new, index, sample) for sample in range(1 + samples)]
    for one in made:
        one.rules = min(new, ends or new)
    made[0].samples = made[1:]
    return made[0]


def next_token(text: Sequence[int], sample: int) -> int:
    return (sum(text) + 7 * len(text) + sample * (len(text) % 2)) % 3


def expected_tokens(row: Row) -> list[int]:
    text = row.prompt.tolist()
    for _ in range(row.rules):
        text.append(next_token(text, row.sample))
    return text[len(row.prompt) :]


def state_of(text: Sequence[int]) -> float:
    """The state after a text: another one for every text, 0 without tokens."""
    return float(crc32(bytes(text)) % 2**24)


def text_of(row: Row) -> list[int]:
    return row.prompt.tolist() + row.tokens


class Watched(Scheduler):
    """Notes who joins, leaves and is put back, and how many tokens it had then.

    Attributes:
        kept: the texts at whose end a state was kept as a checkpoint, in order.
    """

    def __init__(self, cache: PagedKVCache, step_tokens: int) -> None:
        super().__init__(cache, step_tokens)
        self.events: list[tuple[str, Row, int]] = []
        self.kept: list[tuple[int, ...]] = []
        self._join, self._preempt, self._finish = (
            self.rows.join,
            self.rows.preempt,
            self.rows.finish,
        )
        self.rows.join, self.rows.preempt, self.rows.finish = self.join, self.preempt, self.finish

    def _note(self, what: str, rows: list[Row]) -> None:
        self.events += [(what, one, len(one.tokens)) for one in rows]

    def join(self, row):
        self._join(row)
        self._note("join", [row])

    def preempt(self, error):
        before = list(self.rows.running)
        self._preempt(error)
        self._note(
            "back", [one for one in before if one not in self.rows.running and not one.error]
        )

    def book(self, outcome):
        checkpoint = self.cache.checkpoint
        by_seq = {one.seq: one for one in outcome.batch.rows}

        def noted(seq):
            checkpoint(seq)
            self.kept.append(tuple(text_of(by_seq[seq])[: by_seq[seq].done]))

        self.cache.checkpoint = noted
        try:
            super().book(outcome)
        finally:
            del self.cache.checkpoint

    def finish(self, rows):
        self._finish(rows)
        self._note("leave", rows)


class Job:
    """Runs rows to their end as a generator would, and looks at every step."""

    def __init__(self, config: CacheConfig, *rows: Row, step_tokens: int = 64) -> None:
        self.cache = PagedKVCache(config, device="cpu", debug=True)
        self.jobs = Watched(self.cache, step_tokens)
        self.jobs.rows.waiting.extend(rows)
        self.rows = [one for first in rows for one in (first, *first.samples)]
        self.computed = 0

    def step(self) -> Batch | None:
        """The batch that was computed; None if there was none, or a row had to leave first."""
        batch = self.jobs.schedule()
        if batch is None:
            return None
        step = batch.step
        assert step.num_tokens <= max(self.jobs.step_tokens, len(self.jobs.rows.running))
        assert len({one.seq for one in batch.rows}) == len(batch.rows)
        counts = batch.counts or [1] * len(batch.rows)
        texts = [text_of(one)[: one.done + n] for one, n in zip(batch.rows, counts)]
        write_step(self.cache, step, texts)
        for layer in range(len(self.cache.config.states)):
            (before,) = step.read_state(layer)
            assert before.flatten().tolist() == [state_of(t[:-n]) for t, n in zip(texts, counts)]
            step.write_state(layer, [torch.tensor([[state_of(text)] for text in texts])])
        self.cache.commit(step)
        self.computed += step.num_tokens
        self.jobs.book(self._take(batch))
        self.cache.check()
        return batch

    def _take(self, batch: Batch) -> Outcome:
        sampling = [one for first in batch.sampling for one in (first, *first.samples)]
        for first in batch.sampling:
            assert_contents(self.cache, first.seq, text_of(first))
        for one in sampling:
            one.tokens.append(next_token(text_of(one), one.sample))
            one.length += 1
            one.finish_reason = "length" if len(one.tokens) == one.rules else None
        forking = [first for first in batch.sampling if first.samples]
        ended = [one for one in sampling if len(one.tokens) == one.rules]
        return Outcome(batch, batch.num_fed, finished=ended, forking=forking)

    def run(self, most_steps: int = 1000) -> Job:
        for _ in range(most_steps):
            self.step()
            if not (self.jobs.rows.running or self.jobs.rows.waiting):
                return self
        raise AssertionError(f"still not done after {most_steps} steps")

    def verify(self) -> None:
        """Every row got its tokens, and nothing is held any more."""
        assert not self.failed, [one.error for one in self.failed]
        for one in self.rows:
            assert one.tokens == expected_tokens(one)
        assert self.cache.stats().sequences == self.cache.stats().live == 0
        assert self.jobs.stats.peak.live <= self.jobs.stats.peak.pages

    @property
    def failed(self) -> list[Row]:
        return [one for one in self.jobs.rows.ended if one.error]

    def put_back(self) -> list[tuple[Row, int]]:
        return [(one, tokens) for what, one, tokens in self.jobs.events if what == "back"]


def hopeful(long: int = 4, samples: int = 0, **fields) -> Job:
    """Rows that end early lead the scheduler to expect little of the long ones behind them."""
    short = [row([0, i % 3], new=20, ends=1) for i in range(8)]
    others = [row([1, i % 3], new=20, samples=samples) for i in range(long)]
    return Job(one_group(max_tokens=32, **fields), *short, *others)
