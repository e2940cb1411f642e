"""Computes the steps of a job: the forward, the choice of tokens, handing them to their rows.

While rows only decode, a step is launched before the tokens of the one before it are read: it is
fed from the device, and the host reads, applies stopping rules and books while the device computes.
A row that ended by then has computed one token too many, which nobody gets.

Where tokens are guessed, a step computes a row's last token and its guesses. The row then gets one
token after the other by its own rules, as long as the last one is what was guessed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pagedkv.errors import OutOfPagesError
from pagedkv.pages.stats import CacheStats
from pagedkv.step.metadata import StepMetadata

from .graphs import DecodeGraphs
from .packed import PackedModel
from .rows import Batch, Row
from .sampling import Chosen, RowRules, choose, reason
from .scheduler import Scheduler


@dataclass
class GenerationStats:
    """What one call did.

    Attributes:
        seconds: from its first step to its last.
        steps: forwards of the model.
        prompt_tokens: of all prompts that were run.
        new_tokens: generated.
        computed, reused: tokens that went through the model; that a found prefix or a fork spared.
        preemptions: rows put back because pages ran short.
        offloaded: those of them whose K and V waited in host memory.
        peak: the pages when most of them were live.
        guessed, accepted: tokens computed on a guess; those of them that were right and kept.
    """

    seconds: float = 0.0
    steps: int = 0
    prompt_tokens: int = 0
    new_tokens: int = 0
    computed: int = 0
    reused: int = 0
    preemptions: int = 0
    peak: CacheStats | None = None
    guessed: int = 0
    accepted: int = 0
    offloaded: int = 0


class InFlight(NamedTuple):
    """A step that was computed, or is being computed, and whose tokens nobody has read."""

    batch: Batch
    chosen: Chosen


class StepRunner:
    """The steps of one job.

    Args:
        logprobs: whether rows keep the log-probability of each token.
        ahead: launch a step before the last one's tokens are read, where nothing stands against it.
    """

    def __init__(
        self,
        packed: PackedModel,
        graphs: DecodeGraphs | None,
        logprobs: bool,
        stats: GenerationStats,
        ahead: bool,
    ) -> None:
        self.packed, self.graphs, self.cache = packed, graphs, packed.kv
        self.logprobs, self.stats, self.ahead = logprobs, stats, ahead
        self._flight: InFlight | None = None

    @torch.inference_mode()
    def turn(self, jobs: Scheduler) -> list[Row]:
        """Computes a step, or reads one; the rows that are finished by it."""
        flight, self._flight = self._flight, None
        if flight is not None:
            return self._land(jobs, flight)
        batch = jobs.next_batch()
        step = jobs.prepare(batch) if batch else None
        if batch is None or step is None:
            return []
        if batch.counts is None:
            return self._compute(jobs, batch, step)
        with jobs.aside.computing(step.num_tokens):
            return self._compute(jobs, batch, step)

    def _compute(self, jobs: Scheduler, batch: Batch, step: StepMetadata) -> list[Row]:
        logits = self._logits(step, batch)
        if not batch.guesses:
            self._commit(jobs, batch, step)
        if not batch.ready:
            return []
        ready, forking = batch.ready, [row for row in batch.ready if row.samples]
        first = logits
        if forking or batch.guesses:
            begins = _begins(batch.num_logits)
            first = logits[[at for row, at in zip(ready, begins) for _ in (row, *row.samples)]]
            ready = [one for row in ready for one in (row, *row.samples)]
        chosen = choose(ready, first, self.logprobs)
        if not forking and self._may_run_ahead(jobs, batch, chosen):
            self._flight = InFlight(batch, chosen)
            return []
        finished, failed = self._hand_out(ready, chosen)
        if batch.guesses:
            more, broken = self._verify(jobs, batch, step, logits)
            finished, failed = finished + more, failed + broken
        for row in forking:
            jobs.fork(row)
        return self._let_go(jobs, finished, failed)

    def _verify(
        self, jobs: Scheduler, batch: Batch, step: StepMetadata, logits: Tensor
    ) -> tuple[list[Row], list[Row]]:
        """Gives rows what follows each right guess, and keeps the step's tokens up to there.

        Returns:
            As `_hand_out`.
        """
        finished: list[Row] = []
        failed: list[Row] = []
        kept = list(batch.num_fed)
        begins, going = _begins(batch.num_logits), list(range(len(batch.guesses)))
        for depth in range(max(map(len, batch.guesses))):
            going = [i for i in going if batch.is_as_guessed(i, depth)]
            if not going:
                break
            rows = [batch.rows[i] for i in going]
            chosen = choose(rows, logits[[begins[i] + depth + 1 for i in going]], self.logprobs)
            for i in going:
                kept[i] += 1
            more, broken = self._hand_out(rows, chosen)
            finished, failed = finished + more, failed + broken
        self._commit(jobs, batch, step, kept=kept)
        self.stats.guessed += sum(map(len, batch.guesses))
        self.stats.accepted += sum(kept) - sum(batch.num_fed)
        return finished, failed

    def _land(self, jobs: Scheduler, flight: InFlight) -> list[Row]:
        """Launches the next step from a flight's tokens, then reads them."""
        rows = flight.batch.rows
        try:
            step = self.cache.prepare([row.seq for row in rows], flight.chosen.tokens, num_new=1)
        except OutOfPagesError:  # the scheduler knows what to do, once the tokens are read
            return self._let_go(jobs, *self._hand_out(rows, flight.chosen))
        logits = self._logits(step, flight.batch)
        try:
            chosen = choose(rows, logits, self.logprobs)
            fed, _ = flight.chosen.read()  # the device is busy with the step just launched
        except BaseException:
            self.cache.abort(step)
            raise
        self._commit(jobs, flight.batch, step, fed)
        finished, failed = self._hand_out(rows, flight.chosen)
        ended = set(map(id, finished + failed))
        if not ended and self._may_run_ahead(jobs, flight.batch, chosen):
            self._flight = InFlight(flight.batch, chosen)
            return []
        at = [i for i, row in enumerate(rows) if id(row) not in ended]
        more, broken = self._hand_out(rows, chosen, at)
        return self._let_go(jobs, finished + more, failed + broken)

    def _may_run_ahead(self, jobs: Scheduler, batch: Batch, chosen: Chosen) -> bool:
        """Whether the next step has the same rows, whatever the tokens are."""
        longest = self.cache.config.max_sequence_length
        return (
            self.ahead
            and not chosen.errors
            and jobs.is_steady(batch)
            and all(
                row.length + 1 < min(row.limit, longest) and not row.rules.looks_back
                for row in batch.rows
            )
        )

    def _logits(self, step: StepMetadata, batch: Batch) -> Tensor:
        """Of the rows that are ready and of their guesses, `[n, vocab]`, in the order they are fed.

        A forward that fails aborts its step.
        """
        try:
            logits = None if self.graphs is None else self.graphs.logits(step)
            if logits is None:
                return self.packed.logits(step, self._wanted(step, batch))
            return logits if batch.sampling_at is None else logits[batch.sampling_at]
        except BaseException:
            if step.state == "open":
                self.cache.abort(step)
            raise

    def _wanted(self, step: StepMetadata, batch: Batch) -> Tensor:
        """`[n]`, packed tokens that need logits."""
        last = step.last_rows if batch.sampling_at is None else step.last_rows[batch.sampling_at]
        if not batch.guesses:
            return last
        ends = np.cumsum(step.num_new)[batch.sampling_at or slice(None)]
        wanted = [range(end - width, end) for end, width in zip(ends.tolist(), batch.num_logits)]
        return torch.tensor(list(chain(*wanted)), device=last.device)

    def _commit(
        self,
        jobs: Scheduler,
        batch: Batch,
        step: StepMetadata,
        fed: list[int] | None = None,
        kept: list[int] | None = None,
    ) -> None:
        """Books a step, on the host, while the device computes it."""
        self.cache.commit(step, accepted=kept, tokens=fed)
        jobs.advance(batch, kept)
        self.stats.steps += 1
        self.stats.computed += step.num_tokens

    def _hand_out(
        self, rows: Sequence[Row], chosen: Chosen, at: Sequence[int] | None = None
    ) -> tuple[list[Row], list[Row]]:
        """Gives rows their tokens: the rows which that finishes, and those that cannot go on.

        Args:
            at: places in `rows`; default all.
        """
        finished, failed = [], []
        longest = self.cache.config.max_sequence_length
        tokens, logprobs = chosen.read()
        for i in range(len(rows)) if at is None else at:
            row = rows[i]
            if i in chosen.errors:
                row.error = chosen.errors[i]
                failed.append(row)
                continue
            self.stats.new_tokens += 1
            if logprobs is not None:
                row.logprobs.append(logprobs[i])
            try:
                ended = _take(row, tokens[i])
            except Exception as error:  # whatever a caller's own criterion may raise
                row.error = reason(error, "looking whether the text ends")
                failed.append(row)
                continue
            if ended:
                finished.append(row)
            elif row.length > longest:
                row.error = f"max_tokens: the text reached {longest} tokens, all the cache takes"
                failed.append(row)
        return finished, failed

    def _let_go(self, jobs: Scheduler, finished: list[Row], failed: list[Row]) -> list[Row]:
        """Rows that ended give their pages back; those that finished."""
        for row in failed:
            jobs.fail(row, str(row.error))
        jobs.finish(finished)
        return finished


def _begins(num_logits: list[int]) -> list[int]:
    return [end - width for end, width in zip(accumulate(num_logits), num_logits)]


def _take(row: Row, token: int) -> bool:
    """Appends a token to a row; whether that finishes it."""
    row.tokens.append(token)
    row.length += 1
    rules: RowRules = row.rules
    if rules.ended(token, row.length):
        row.finish_reason = "stop"
    elif row.length >= row.limit:
        row.finish_reason = "length"
    else:
        return False
    return True
