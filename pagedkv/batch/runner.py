"""Computes the steps of a job: the forward, the choice of tokens, handing them to their rows.

While rows only decode, a step is launched before the tokens of the previous step are read: it is
fed from the device, and the host reads, applies stopping rules and books while the device computes.
A row that turns out to have ended has computed one token too many, which is dropped.

Where tokens are drafted, a step computes a row's last token and its draft. The row then gets one
token after the other by its own rules, as long as each equals its draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from time import perf_counter
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from pagedkv.errors import OutOfPagesError
from pagedkv.kernels.sending import sent

from .graphs import DecodeGraphs
from .packed import PackedModel
from .results import GenerationStats
from .rows import Batch, Outcome, Row
from .sampling import Chosen, choose, reason
from .step_images import StepImages

# The largest block that glibc learns from (DEFAULT_MMAP_THRESHOLD_MAX), less what lies around it.
LEARNT_BYTES = (32 << 20) - (64 << 10)


class InFlight(NamedTuple):
    """A step that was computed, or is being computed, and whose tokens were not read yet."""

    batch: Batch
    chosen: Chosen


class StepRunner:
    """The steps of one job.

    Args:
        logprobs: whether rows keep the log-probability of each token.
        stats: where it counts steps and tokens.
        ahead: launch a step before the last one's tokens are read, where no rule needs these.
        sight: runs the model on images, in a job that may have some.
    """

    def __init__(
        self,
        packed: PackedModel,
        graphs: DecodeGraphs | None,
        logprobs: bool,
        stats: GenerationStats,
        ahead: bool,
        sight: StepImages | None = None,
    ) -> None:
        self.packed, self.graphs, self.cache = packed, graphs, packed.kv
        self.logprobs, self.stats, self.ahead, self.sight = logprobs, stats, ahead, sight
        self._flight: InFlight | None = None
        self._ranks = packed.kv.ranks
        keep_freed_memory(self.cache.device)

    @property
    def in_flight(self) -> Batch | None:
        """The batch whose tokens were not read yet; it has to be run again before any other."""
        return None if self._flight is None else self._flight.batch

    @torch.inference_mode()
    def run(self, batch: Batch, may_repeat: bool) -> Outcome:
        """Computes the step of a batch and commits it, or goes on with the step in flight.

        Args:
            may_repeat: whether the next step has the same rows, if none of them ends.
        """
        since, (flight, self._flight) = perf_counter(), (self._flight, None)
        outcome = Outcome(batch)
        if flight is None:
            self._compute(outcome, may_repeat)
        else:
            self._read(flight, outcome, may_repeat)
        if self.sight is not None:
            self.sight.forget(batch)
        outcome.seconds = perf_counter() - since
        return outcome

    def land(self) -> Outcome:
        """Reads the tokens of the step in flight, and launches nothing."""
        flight, self._flight = self._flight, None
        assert flight is not None
        outcome = Outcome(flight.batch)
        self._hand_out(outcome, flight.batch.rows, flight.chosen)
        return outcome

    def _compute(self, outcome: Outcome, may_repeat: bool) -> None:
        batch = outcome.batch
        logits = self._logits(batch)
        if not batch.drafts:
            self._commit(outcome, batch.num_fed)
        rows, first = batch.sampling, logits
        if not rows:
            return
        outcome.forking = [row for row in rows if row.samples]
        if outcome.forking or batch.drafts:
            begins = begins_of(batch.num_logits)
            first = logits[[at for row, at in zip(rows, begins) for _ in (row, *row.samples)]]
            rows = [one for row in rows for one in (row, *row.samples)]
        chosen = choose(rows, first, self.logprobs, self._ranks)
        if may_repeat and not outcome.forking and self._may_run_ahead(batch, chosen):
            self._flight = InFlight(batch, chosen)
            return
        self._hand_out(outcome, rows, chosen)
        if batch.drafts:
            self._verify(outcome, logits)

    def _verify(self, outcome: Outcome, logits: Tensor) -> None:
        """Gives rows the token behind each right draft, and commits the tokens up to there."""
        batch = outcome.batch
        kept = list(batch.num_fed)
        begins, going = begins_of(batch.num_logits), list(range(len(batch.drafts)))
        for depth in range(max(map(len, batch.drafts))):
            going = [i for i in going if batch.is_as_drafted(i, depth)]
            if not going:
                break
            rows = [batch.rows[i] for i in going]
            after = [begins[i] + depth + 1 for i in going]
            chosen = choose(rows, logits[after], self.logprobs, self._ranks)
            for i in going:
                kept[i] += 1
            self._hand_out(outcome, rows, chosen)
        self._commit(outcome, kept)
        self.stats.drafted += sum(map(len, batch.drafts))
        self.stats.accepted += sum(kept) - sum(batch.num_fed)

    def _read(self, flight: InFlight, outcome: Outcome, may_repeat: bool) -> None:
        """Launches the next step from the tokens of the one in flight, then reads them."""
        batch, rows = flight.batch, flight.batch.rows
        try:
            batch.step = self.cache.prepare(
                [row.seq for row in rows], flight.chosen.tokens, num_new=1
            )
        except OutOfPagesError:  # the scheduler knows what to do, once the tokens are read
            return self._hand_out(outcome, rows, flight.chosen)
        logits = self._logits(batch)
        fed, _ = flight.chosen.read()  # the device is busy with the step just launched
        if flight.chosen.corrected:  # that step was fed other tokens
            self.cache.abort(batch.step)
            return self._hand_out(outcome, rows, flight.chosen)
        chosen = choose(rows, logits, self.logprobs, self._ranks)
        self._commit(outcome, batch.num_fed, fed)
        self._hand_out(outcome, rows, flight.chosen)
        gone = {id(row) for row in (*outcome.finished, *outcome.failed)}
        if may_repeat and not gone and self._may_run_ahead(batch, chosen):
            self._flight = InFlight(batch, chosen)
        else:
            going = [i for i, row in enumerate(rows) if id(row) not in gone]
            self._hand_out(outcome, rows, chosen, going)

    def _may_run_ahead(self, batch: Batch, chosen: Chosen) -> bool:
        """Whether the next step may begin before tokens are read: no limit or rule needs them."""
        longest = self.cache.config.max_sequence_length
        return (
            self.ahead
            and not chosen.errors
            and all(
                row.length + 1 < min(row.limit, longest) and not row.rules.looks_back
                for row in batch.rows
            )
        )

    def _logits(self, batch: Batch) -> Tensor:
        """Returns logits of sampling rows and their drafts, `[n, vocab]`, in the order of feeding.

        If the forward fails, the step stays open until the job's rows give their pages back.
        """
        step = batch.step
        inputs = None if self.sight is None else self.sight.inputs(batch)
        logits = None
        if self.graphs is not None and inputs is None:  # graphs count positions like text
            logits = self.graphs.logits(step)
        if logits is None:
            return self.packed.logits(step, self._wanted(batch), inputs)
        return logits if batch.sampling_at is None else logits[batch.sampling_at]

    def _wanted(self, batch: Batch) -> Tensor:
        """`[n]`, packed tokens that need logits."""
        step = batch.step
        last = step.last_rows if batch.sampling_at is None else step.last_rows[batch.sampling_at]
        if batch.is_narrow:
            return last
        ends = np.cumsum(step.num_new)[batch.sampling_at or slice(None)]
        widths = zip(ends.tolist(), batch.num_logits)
        wanted = np.concatenate([np.arange(end - width, end) for end, width in widths])
        return sent(wanted, last.device)

    def _commit(self, outcome: Outcome, kept: list[int], fed: list[int] | None = None) -> None:
        """Commits a step, on the host, while the device computes it."""
        batch = outcome.batch
        self.cache.commit(batch.step, accepted=kept if batch.drafts else None, tokens=fed)
        outcome.kept = kept
        self.stats.steps += 1
        self.stats.computed += batch.step.num_tokens

    def _hand_out(
        self,
        outcome: Outcome,
        rows: Sequence[Row],
        chosen: Chosen,
        at: Sequence[int] | None = None,
    ) -> None:
        """Gives rows their tokens, and notes which rows finish or fail by them.

        Args:
            at: places in `rows`; default all.
        """
        longest = self.cache.config.max_sequence_length
        tokens, logprobs = chosen.read()
        errors, places = chosen.errors, range(len(rows)) if at is None else at
        self.stats.new_tokens += len(places) - sum(i in places for i in errors)
        for i in places:
            row = rows[i]
            if i in errors:
                row.error = errors[i]
                outcome.failed.append(row)
                continue
            if logprobs is not None:
                row.logprobs.append(logprobs[i])
            try:
                ended = row.take(tokens[i])
            except Exception as error:  # whatever a caller's own criterion may raise
                row.error = reason(error, "looking whether the text ends")
                outcome.failed.append(row)
                continue
            if ended:
                outcome.finished.append(row)
            elif row.length > longest:
                row.error = f"max_tokens: the text reached {longest} tokens, all the cache takes"
                outcome.failed.append(row)
        if self._ranks.size > 1 and any(rows[i].rules.criteria for i in places):
            self._follow_endings(outcome, [rows[i] for i in places])

    def _follow_endings(self, outcome: Outcome, rows: list[Row]) -> None:
        """Applies the first rank's decision on which rows ended: criteria may look at a clock."""
        said = self._ranks.share([(row.finish_reason, row.error) for row in rows])
        judged = set(map(id, rows))
        outcome.finished = [row for row in outcome.finished if id(row) not in judged]
        outcome.failed = [row for row in outcome.failed if id(row) not in judged]
        for row, (how, error) in zip(rows, said):
            row.finish_reason, row.error = how, error
            if row.error:
                outcome.failed.append(row)
            elif row.finish_reason:
                outcome.finished.append(row)


def begins_of(num_logits: list[int]) -> list[int]:
    """Where the logits of each row begin."""
    return [end - width for end, width in zip(accumulate(num_logits), num_logits)]


def keep_freed_memory(device: torch.device) -> None:
    """Lets the C library keep, for the next layer, some of what a forward on a processor frees.

    glibc returns the free end of its heap to the system once that exceeds twice the largest block
    it has seen freed, of at most 32 MiB (mallopt(3)). The temporaries of a long prompt exceed it
    together, so the system cleared memory anew for each layer: 190,000 page faults, 7 % of the time
    for 2,048 tokens of a model of 576 channels. So this function frees a block of the largest size;
    nobody has written to it, so it takes no memory. If somebody has set thresholds, for example by
    `MALLOC_TRIM_THRESHOLD_`, glibc does not learn, and these hold.
    """
    if device.type == "cpu":
        torch.empty(LEARNT_BYTES, dtype=torch.uint8, device="cpu")
