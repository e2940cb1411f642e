"""Decides which rows a batch job computes next: composes batches, opens steps, lets rows join.

`schedule` composes a batch and opens its step; `book` takes in what the step did. `row_queues.py`
has the rows that hold pages, `heads.py` says which prompts wait for one another.

Rows join and leave at every step. A step feeds every decoding row its last token and fills the rest
of its token budget with prompts, in the order of their queue, in which prompts of one prefix may
stand together (`order.py`). Two rules shape the rest:

- A row with samples joins only when there are places for these, too. Without places the samples
  would join later, when the pages that they share with the row may be gone.
- Drafts for decoding rows get what prompts left of the budget, and are dropped before a row is put
  back for their pages.
"""

from __future__ import annotations

import numpy as np

from pagedkv.arrays import Tokens
from pagedkv.cache.cache import PagedKVCache
from pagedkv.errors import OutOfPagesError, SequenceTooLongError, TooManySequencesError
from pagedkv.interrupt import Uninterrupted

from .branches import Branches, StateBranches
from .drafts.drafter import Drafter
from .drafts.prompt_lookup import Lookups
from .heads import Heads
from .results import GenerationStats
from .row_queues import RowQueues
from .rows import Batch, Outcome, Row

LOOKAHEAD = 256  # waiting rows examined a step, so that a million prompts cost no more


class Scheduler:
    """Rows of one job on the pages of a cache that others may use as well.

    Args:
        step_tokens: most tokens a step computes, though never fewer than one for each running row.
        verify_width: most tokens of a decoding row in a step, all but the first of them drafted.
        most_sampling: tokens of a step that may get logits, and so rows that may run; default any.
        stats: where it counts what was reused, put back and offloaded, and keeps the peak.
        drafter: makes drafts if `verify_width` is above 1; default prompt lookup.

    Attributes:
        rows: the rows that run, wait, and have ended.
    """

    def __init__(
        self,
        cache: PagedKVCache,
        step_tokens: int,
        verify_width: int = 1,
        most_sampling: int | None = None,
        stats: GenerationStats | None = None,
        drafter: Drafter | None = None,
    ) -> None:
        self.cache, self.step_tokens = cache, min(step_tokens, cache.config.max_step_tokens)
        self.turns = cache.turns
        self.verify_width = verify_width
        self.drafter: Drafter = Lookups() if drafter is None else drafter
        most = cache.config.max_step_tokens
        self.most_sampling = most if most_sampling is None else most_sampling
        self.stats = GenerationStats() if stats is None else stats
        self.branches = StateBranches(cache) if cache.config.states else Branches()
        self.rows = RowQueues(cache, self.branches, self.most_sampling, self.stats, self.drafter)
        self._evicts = cache.config.policy is not None
        self._decoding: list[Row] = []
        self._shut_at = -1  # departures when a row could not join: none joins until there are more
        self._logits_left = self.most_sampling

    # ------------------------------------------------------------------ one step

    def schedule(self) -> Batch | None:
        """Lets rows join, composes a batch and opens its step.

        Returns:
            None if there is nothing to compute, or if rows had to leave: then compose another.
        """
        batch = self._compose()
        return batch if batch is not None and self._open(batch) else None

    def book(self, outcome: Outcome) -> None:
        """Takes in what a step did: its rows advance, multiply and leave."""
        batch = outcome.batch
        for row, count in zip(batch.rows, outcome.kept):
            row.done += count
        self.branches.reached(batch.rows)
        if len(self.rows.running) == 1 and not self.rows.waiting:
            self.branches.end_of_prompt(self.rows.running[0])
        if batch.counts is not None:
            self.rows.is_changed = True
            self.rows.preemption.computing.add(batch.step.num_tokens, outcome.seconds)
        for row in outcome.forking:
            self.rows.fork(row)
        self.rows.finish(outcome.finished)
        for row in outcome.failed:
            self.rows.fail(row, str(row.error))

    def may_repeat(self, batch: Batch) -> bool:
        """Whether the next step has the rows of this one, if none ends, and nothing is drafted."""
        return (
            self.verify_width == 1
            and batch.counts is None
            and not self.rows.is_changed
            and not self.rows.ended
            and len(batch.rows) == len(self.rows.running)
            and (
                not self.rows.waiting
                or self._admission_is_closed
                or len(self.rows.running) >= self.most_sampling
            )
        )

    def _compose(self) -> Batch | None:
        if self.rows.is_changed:
            # Rows that share a prefix stand side by side: attention serves them together.
            order = sorted(self.rows.running, key=lambda row: row.key)
            self._decoding = [row for row in order if not row.is_prefilling]
            self.rows.is_changed = False
        decoding = self._decoding
        prefilling = []
        if len(decoding) < len(self.rows.running):
            # Rows that have tokens already go first: they give their pages back sooner.
            prefilling = [row for row in self.rows.running if row.is_prefilling]
            prefilling.sort(key=lambda row: not row.tokens)
        budget = self.step_tokens - len(decoding)
        self._logits_left = self.most_sampling - len(decoding)
        fed: list[tuple[Row, int]] = []
        for row in prefilling:
            budget = self._feed(row, budget, fed)
        if budget > 0 and self.rows.waiting and not self._admission_is_closed:
            with Uninterrupted():  # every row is in `waiting` or in `running`
                self._admit(prefilling, budget, fed)
        if not fed:
            if not decoding:
                return None
            batch = Batch(decoding, np.array([row.tokens[-1] for row in decoding]), None)
        else:
            tokens = [*np.array([row.tokens[-1] for row in decoding], np.int32)[:, None]]
            tokens += [row.ids[row.done : row.done + count] for row, count in fed]
            counts = [1] * len(decoding) + [count for _, count in fed]
            batch = Batch(decoding + [row for row, _ in fed], tokens, counts)
        if self.verify_width > 1:
            budget = self.step_tokens - sum(batch.num_fed)
            budget = min(budget, self.most_sampling - len(batch.rows))
            batch.drafts = self._draft(decoding, budget)
        return batch

    def _draft(self, rows: list[Row], budget: int) -> list[Tokens]:
        """Returns a draft for each row; an empty list if no row has one."""
        longest = self.cache.config.max_sequence_length
        # Even if all drafts are right, a token is chosen behind the last one.
        most = [min(self.verify_width, min(r.limit, longest) - r.length) - 1 for r in rows]
        drafts = self.drafter.drafts(rows, most, budget)
        return drafts if any(map(len, drafts)) else []

    def _feed(self, row: Row, budget: int, fed: list[tuple[Row, int]]) -> int:
        count = min(self.branches.most(row), budget, row.most_fed or budget)
        before = row.length - 1 - row.done  # tokens that need no logits
        count = min(count, before + self._logits_left)
        if count > 0:
            fed.append((row, count))
            self._logits_left -= max(0, count - before)
        # While a prompt is fed in short chunks no row can join; trying would only close admission.
        return 0 if row.most_fed else budget - count

    def _open(self, batch: Batch) -> bool:
        """Opens a batch's step, without drafts if need be; returns whether there were pages."""
        try:
            batch.step = self.cache.prepare([row.seq for row in batch.rows], batch.fed)
            return True
        except OutOfPagesError as error:
            if batch.drafts:
                batch.drafts = []
                return self._open(batch)
            if not self._feed_less(batch):
                self.rows.preempt(error)
            return False

    def _feed_less(self, batch: Batch) -> bool:
        """Halves the steps of a lone prompt so that evictions make room; returns whether it did."""
        fed = sum(batch.num_fed)
        if not self._evicts or len(batch.rows) > 1 or fed == 1:
            return False
        batch.rows[0].most_fed = fed // 2
        return True

    # ------------------------------------------------------------------ rows come

    @property
    def room(self) -> int:
        """How many more waiting rows the scheduler wants to look at."""
        return max(0, LOOKAHEAD - len(self.rows.waiting))

    def submit(self, rows: list[Row]) -> None:
        """Takes the samples of one prompt; those that have an error end at once."""
        self.rows.ended += [row for row in rows if row.error]
        good = [row for row in rows if not row.error]
        if good:
            good[0].samples = good[1:]  # they fork from it
            self.rows.waiting.append(good[0])
            self.stats.prompt_tokens += len(good[0].prompt)
            self.branches.meet(self.rows.running, good[0])

    @property
    def _admission_is_closed(self) -> bool:
        if not self.turns.may_join(self.rows):
            return True
        if self.turns.departures not in (self._shut_at, self.turns.short_at):
            return False
        return bool(self.rows.running) or self.turns.others_may_leave(self.rows)

    def _admit(self, prefilling: list[Row], budget: int, fed: list[tuple[Row, int]]) -> None:
        departures, waiting = self.turns.departures, self.rows.waiting
        heads = Heads(self.cache.config.page_size, self.branches, prefilling)
        most = min(self.cache.config.max_sequences, self.most_sampling)
        coming = sum(row.forks for row in prefilling)
        passed: list[Row] = []
        for _ in range(min(LOOKAHEAD, len(waiting))):
            if len(self.rows.running) >= self.most_sampling:
                break
            if self.rows.running and len(self.rows.running) + coming + waiting[0].forks >= most:
                break  # its samples would find no room, and what they share might be lost
            row = waiting.popleft()
            if heads.delay(row):
                passed.append(row)
                continue
            try:
                self.rows.join(row)
            except (OutOfPagesError, TooManySequencesError) as error:
                if self.rows.may_wait:
                    passed.append(row)
                    self._shut_at = departures
                    break
                self.rows.fail_with_samples(row, str(error) + self.turns.who_holds(self.rows))
                continue
            except SequenceTooLongError as error:
                self.rows.fail_with_samples(row, str(error))
                continue
            coming += row.forks
            heads.add(row)
            budget = self._feed(row, budget, fed)
            if budget <= 0:
                break
        waiting.extendleft(reversed(passed))

    # ------------------------------------------------------------------ rows leave

    def take_ended(self) -> list[Row]:
        """Returns the rows that have finished or failed since the last call."""
        ended, self.rows.ended = self.rows.ended, []
        return ended

    def take_back(self, batch: Batch, failed: list[Row]) -> None:
        """Aborts an open step; the failed rows, which have their `error`, end."""
        self.cache.abort(batch.step)
        for row in failed:
            self.rows.fail_with_samples(row, str(row.error))
