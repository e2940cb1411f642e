"""Which rows a batch job computes next: admission, chunked prefill, forks, preemption.

`schedule` composes a batch and opens its step; `book` takes in what the step did.

Rows join and leave at every step. A step feeds every decoding row its last token and fills what is
left of its token budget with prompts, in the order they came: that of their source, which may have
put those of one prefix together (`order.py`). Five rules shape the rest:

- A prefix of a page or more is computed once. A prompt that shares more with one still being
  computed than is stored so far waits for that, instead of computing it again beside it.
- A row joins when pages for what it is expected to need can be set aside. Expected is its limit
  times the share of theirs that finished rows have used, so that a job whose rows stop early packs
  more of them.
- A row with samples joins when there are places for these, too. They would not be lost without, but
  what they share with it might be by the time they join.
- When pages run short all the same, the youngest row gives its pages back. It is computed again
  later, with what is still findable of it, or its K and V wait in host memory if copying them takes
  less time (`preemption.py`). Nobody joins until somebody has finished, and a row is not put back
  twice without having got a token in between. Rows of other threads count as somebody
  (`cache/turns.py`).
- Drafts of what decoding rows go on with get what prompts left of the budget, and are dropped
  before anybody is put back for their pages.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from pagedkv.arrays import Tokens
from pagedkv.cache.cache import PagedKVCache
from pagedkv.cache.turns import Turn
from pagedkv.errors import OutOfPagesError, SequenceTooLongError, TooManySequencesError
from pagedkv.interrupt import Uninterrupted
from pagedkv.pages.salts import Salt, shared_tokens, up_to

from .branches import Branches, shared_length
from .drafts.drafter import Drafter
from .drafts.prompt_lookup import Lookups
from .preemption import Preemption
from .results import GenerationStats
from .rows import NOT_RUNNING, Batch, Outcome, Row

LOOKAHEAD = 256  # waiting rows examined a step: what a job of a million prompts may cost


class Scheduler:
    """Rows of one job on the pages of a cache that others may use as well.

    Args:
        step_tokens: most tokens a step computes, though never fewer than one for each running row.
        verify_width: most tokens of a decoding row in a step, all but the first of them drafted.
        most_sampling: tokens of a step that may get logits, and so rows that may run; default any.
        stats: where it counts what was reused, put back and offloaded, and the fullest moment.
        drafter: what drafts where `verify_width` is above 1; default prompt lookup.

    Attributes:
        waiting: rows without a sequence, in the order in which they join.
        running: rows with one.
        ended: rows that left since somebody took this list: finished ones and failed ones.
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
        self.turns, self.turn = cache.turns, Turn()
        self.verify_width = verify_width
        self.drafter: Drafter = Lookups() if drafter is None else drafter
        most = cache.config.max_step_tokens
        self.most_sampling = most if most_sampling is None else most_sampling
        self.stats = GenerationStats() if stats is None else stats
        self.waiting: deque[Row] = deque()
        self.running: list[Row] = []
        self.preemption = Preemption(cache)
        self.branches = Branches(cache) if cache.config.states else None
        self._evicts = cache.config.policy is not None
        self.ended: list[Row] = []
        self._decoding: list[Row] = []
        self._chunk_limit: dict[Row, int] = {}  # prompts that make their own room: tokens a step
        self._changed = False  # who decodes
        self._shut_at = -1  # departures when a row could not join: none does until there are more
        self._logits_left = self.most_sampling
        self._share_used, self._finished = 1.0, 1  # before any has finished, expect the worst

    # ------------------------------------------------------------------ one step

    def schedule(self) -> Batch | None:
        """Lets rows join, composes a batch and opens its step.

        Returns:
            None if there is nothing to compute, or rows had to leave and another must be composed.
        """
        batch = self._compose()
        return batch if batch is not None and self._open(batch) else None

    def book(self, outcome: Outcome) -> None:
        """Takes in what a step did: its rows advance, multiply and leave."""
        batch = outcome.batch
        for row, count in zip(batch.rows, outcome.kept):
            row.done += count
        if self.branches:
            self.branches.reached(batch.rows)
            if len(self.running) == 1 and not self.waiting:
                self.branches.end_of_prompt(self.running[0])
        if batch.counts is not None:
            self._changed = True
            self.preemption.computing.add(batch.step.num_tokens, outcome.seconds)
        for row in outcome.forking:
            self._fork(row)
        self._finish(outcome.finished)
        for row in outcome.failed:
            self.fail(row, str(row.error))

    def may_repeat(self, batch: Batch) -> bool:
        """Whether the next step has the rows of this one, if none ends, and nothing is drafted."""
        return (
            self.verify_width == 1
            and batch.counts is None
            and not self._changed
            and not self.ended
            and len(batch.rows) == len(self.running)
            and (
                not self.waiting
                or self._admission_is_closed
                or len(self.running) >= self.most_sampling
            )
        )

    def _compose(self) -> Batch | None:
        if self._changed:
            # Rows that share a prefix side by side: attention serves them together.
            order = sorted(self.running, key=lambda row: row.key)
            self._decoding = [row for row in order if not row.is_prefilling]
            self._changed = False
        decoding = self._decoding
        prefilling = []
        if len(decoding) < len(self.running):
            # What has tokens already goes first: it gives its pages back sooner.
            prefilling = [row for row in self.running if row.is_prefilling]
            prefilling.sort(key=lambda row: not row.tokens)
        budget = self.step_tokens - len(decoding)
        self._logits_left = self.most_sampling - len(decoding)
        fed: list[tuple[Row, int]] = []
        for row in prefilling:
            budget = self._feed(row, budget, fed)
        if budget > 0 and self.waiting and not self._admission_is_closed:
            with Uninterrupted():  # a row that waits is in `waiting` or in `running`
                self._admit(prefilling, budget, fed)
        if not fed:
            if not decoding:
                return None
            batch = Batch(decoding, np.array([row.tokens[-1] for row in decoding]), None)
        else:
            tokens = [np.array(row.tokens[-1:]) for row in decoding]
            tokens += [row.ids[row.done : row.done + count] for row, count in fed]
            counts = [1] * len(decoding) + [count for _, count in fed]
            batch = Batch(decoding + [row for row, _ in fed], tokens, counts)
        if self.verify_width > 1:
            budget = self.step_tokens - sum(batch.num_fed)
            budget = min(budget, self.most_sampling - len(batch.rows))
            batch.drafts = self._draft(decoding, budget)
        return batch

    def _draft(self, rows: list[Row], budget: int) -> list[Tokens]:
        """What each row may go on with; empty if no row has a draft."""
        longest = self.cache.config.max_sequence_length
        # Even if all are right, a token is chosen behind the last.
        most = [min(self.verify_width, min(r.limit, longest) - r.length) - 1 for r in rows]
        drafts = self.drafter.drafts(rows, most, budget)
        return drafts if any(map(len, drafts)) else []

    def _feed(self, row: Row, budget: int, fed: list[tuple[Row, int]]) -> int:
        count = min(len(row.ids) - row.done, budget, self._chunk_limit.get(row, budget))
        if self.branches:
            count = min(count, self.branches.most(row))
        before = row.length - 1 - row.done  # tokens that need no logits
        count = min(count, before + self._logits_left)
        if count > 0:
            fed.append((row, count))
            self._logits_left -= max(0, count - before)
        # Beside a narrow one nobody finds pages; to try would only shut the door.
        return 0 if row in self._chunk_limit else budget - count

    def _open(self, batch: Batch) -> bool:
        """Opens the step of a batch, if need be without its drafts; whether there were pages."""
        try:
            batch.step = self.cache.prepare([row.seq for row in batch.rows], batch.fed)
            return True
        except OutOfPagesError as error:
            if batch.drafts:
                batch.drafts = []
                return self._open(batch)
            if not self._feed_less(batch):
                self._preempt(error)
            return False

    def _feed_less(self, batch: Batch) -> bool:
        """Shortens the steps of a prompt that is alone: what has left makes room for what comes."""
        fed = sum(batch.num_fed)
        if not self._evicts or len(batch.rows) > 1 or fed == 1:
            return False
        self._chunk_limit[batch.rows[0]] = fed // 2
        return True

    # ------------------------------------------------------------------ rows come

    @property
    def room(self) -> int:
        """How many more rows it wants to look at while they wait."""
        return max(0, LOOKAHEAD - len(self.waiting))

    def submit(self, rows: list[Row]) -> None:
        """Takes the samples of one prompt; those that have an error end at once."""
        self.ended += [row for row in rows if row.error]
        good = [row for row in rows if not row.error]
        if good:
            good[0].samples = good[1:]  # they fork from it
            self.waiting.append(good[0])
            self.stats.prompt_tokens += len(good[0].prompt)
            if self.branches:
                for row in self.running:
                    self.branches.consider(row, good[0])

    @property
    def _admission_is_closed(self) -> bool:
        if not self.turns.may_join(self):
            return True
        if self.turns.departures not in (self._shut_at, self.turns.short_at):
            return False
        return bool(self.running) or self.turns.others_may_leave(self)

    def _admit(self, prefilling: list[Row], budget: int, fed: list[tuple[Row, int]]) -> None:
        departures = self.turns.departures
        heads: dict[tuple[Salt, bytes], list[Row]] = {}
        for row in prefilling:
            if row.done < len(row.prompt):  # behind it rows of one prompt part
                heads.setdefault(self._head(row), []).append(row)
        most = min(self.cache.config.max_sequences, self.most_sampling)
        coming = sum(row.forks for row in prefilling)
        passed: list[Row] = []
        for _ in range(min(LOOKAHEAD, len(self.waiting))):
            if len(self.running) >= self.most_sampling:
                break
            if self.running and len(self.running) + coming + self.waiting[0].forks >= most:
                break  # its samples would find no room, and what they share might be lost
            row = self.waiting.popleft()
            alike = heads.setdefault(self._head(row), [])
            if self._must_wait(row, alike):
                passed.append(row)
                continue
            try:
                self._join(row)
            except (OutOfPagesError, TooManySequencesError) as error:
                if self._may_wait:
                    passed.append(row)
                    self._shut_at = departures
                    break
                self._fail_with_samples(row, str(error) + self.turns.who_holds(self))
                continue
            except SequenceTooLongError as error:
                self._fail_with_samples(row, str(error))
                continue
            coming += row.forks
            if row.done < len(row.prompt):
                alike.append(row)
            budget = self._feed(row, budget, fed)
            if budget <= 0:
                break
        self.waiting.extendleft(reversed(passed))

    @property
    def _may_wait(self) -> bool:
        """Whether a row that finds no pages will find some, if it waits."""
        return (
            bool(self.running)
            or self.turns.others_may_leave(self)
            or self.turns.others_put_back(self)
        )

    def _head(self, row: Row) -> tuple[Salt, bytes]:
        """The salt and tokens two rows have in common if waiting for one another is worth it."""
        size = self.cache.config.page_size
        return up_to(row.salt, size), row.key[: row.prompt.itemsize * size]

    def _must_wait(self, row: Row, alike: list[Row]) -> bool:
        """Whether a row that computes its prompt now will hold more of this one's than it does."""
        if row.waits_for is not None:
            other, shared = row.waits_for
            if other.seq != NOT_RUNNING and other.is_prefilling and other.done < shared:
                return True
        row.waits_for = None
        ids, size = row.text(), self.cache.config.page_size
        for other in alike:
            shared = min(shared_length(ids, other.ids), shared_tokens(row.salt, other.salt, size))
            # Even for a token: equal prompts that start together are computed once.
            if shared > other.done and (not self.branches or self.branches.counts(row, shared)):
                row.waits_for = other, shared
                if self.branches:
                    self.branches.cut(other, shared)
                return True
        return False

    def _join(self, row: Row) -> None:
        """Gives a row its sequence, with pages set aside for what it is expected to need.

        Raises:
            OutOfPagesError, TooManySequencesError: not now.
            SequenceTooLongError: never.
        """
        ids = row.text()
        most = max(len(ids), self.cache.config.max_sequence_length)
        rest = min(row.limit, most) - len(ids)
        expected = len(ids) + max(1, round(rest * self._share_used / self._finished))
        with Uninterrupted():
            try:
                self._begin(row, ids, min(expected, most))
            except OutOfPagesError:
                if self.running or self.turns.others_may_leave(self):
                    raise
                self._begin_alone(row, ids, min(len(ids) + 1, most))
            self.running.append(row)
            self.cache.running.add(row.seq)
        row.join(ids, self.cache.length(row.seq))
        if self.branches:
            self.branches.plan(row, self.waiting)
        self.stats.reused += row.done
        if not row.joined_before:
            row.cached_tokens, row.joined_before = row.done, True

    def _begin_alone(self, row: Row, ids: Tokens, max_tokens: int) -> None:
        try:
            self._begin(row, ids, max_tokens)
        except OutOfPagesError:
            if not self._evicts:
                raise
            self._begin(row, ids, None)  # never all there at once: nothing can be promised

    def _begin(self, row: Row, ids: Tokens, max_tokens: int | None) -> None:
        if row.offloaded_seq == NOT_RUNNING:
            row.seq = self.cache.add(ids, salt=row.salt, max_tokens=max_tokens)
        else:
            self.preemption.restore(row, max_tokens)

    # ------------------------------------------------------------------ rows multiply and leave

    def _fork(self, row: Row) -> None:
        """Starts a row's samples on all of its text; where pages are short they wait instead.

        Each has got its first token from the row's last logits, and may be finished by it.
        """
        samples, row.samples = row.samples, []
        for sample in samples:
            sample.cached_tokens, sample.joined_before = len(row.prompt), True
        going = [sample for sample in samples if not (sample.finish_reason or sample.error)]
        config = self.cache.config
        most = min(config.max_sequences, config.max_step_tokens, self.most_sampling)
        room = max(0, most - len(self.running))
        joining, waiting = going[:room], going[room:]
        with Uninterrupted():
            try:
                seqs = self.cache.fork(row.seq, len(joining)) if joining else []
            except (OutOfPagesError, TooManySequencesError):
                joining, waiting, seqs = [], going, []
            for sample, seq in zip(joining, seqs):
                sample.seq, sample.done = seq, row.done
            self.running += joining
            self.cache.running.update(seqs)
            self.waiting.extendleft(reversed(waiting))
            self._changed = True
        if self.branches and waiting:
            self.branches.keep([row])
        self.stats.reused += len(row.prompt) * (len(samples) - len(waiting))
        for sample in waiting:
            sample.cached_tokens, sample.joined_before = 0, False

    def _finish(self, rows: list[Row]) -> None:
        """Rows that are done give their pages back."""
        if self.branches and not self.waiting:
            self.branches.keep(rows)
        self._depart(rows)
        self.ended += rows
        longest = self.cache.config.max_sequence_length
        for row in rows:
            room = min(row.limit, longest) - len(row.prompt)
            self._share_used += min(1.0, len(row.tokens) / max(1, room))
            self._finished += 1

    def fail(self, row: Row, reason: str) -> None:
        """Ends a row that cannot go on."""
        if row.seq != NOT_RUNNING:
            self._depart([row])
        self.preemption.free([row])
        row.error = reason
        self.ended.append(row)

    def set_aside(self, row: Row) -> None:
        """Takes a row out of those that run or wait. What it computed stays findable."""
        if row.seq != NOT_RUNNING:
            if self.branches:
                self.branches.keep([row])
            self._depart([row])
        elif row in self.waiting:
            self.waiting.remove(row)
            self.preemption.free([row])

    def part(self) -> None:
        """Lets the next step have other rows than the latest one."""
        self._changed = True

    def take_back(self, batch: Batch, failed: list[Row]) -> None:
        """Takes back an open step, some of whose rows cannot be computed: each has its `error`."""
        self.cache.abort(batch.step)
        for row in failed:
            self._fail_with_samples(row, str(row.error))

    def fail_waiting(self, reason: str) -> None:
        """Ends the rows that wait: as errors, or as they are if they have got tokens before."""
        while self.waiting:
            row = self.waiting.popleft()
            if row.tokens:
                self.preemption.free([row])
                row.finish_reason = "stop"
                self.ended.append(row)
            else:
                self._fail_with_samples(row, reason)

    def close(self) -> None:
        """Gives back the pages of whatever still runs. What was computed stays findable."""
        step = self.cache.open_step
        if step is not None and {row.seq for row in self.running} & set(step.seqs.tolist()):
            self.cache.abort(step)  # interrupted before its commit
        self._depart(list(self.running))
        self.drafter.close()
        self.preemption.free(self.waiting)
        self.waiting.clear()

    def close_later(self) -> None:
        """`close`, at a moment when the cache may be in the middle of a call."""
        self.cache.release_later([row.seq for row in self.running])
        self.cache.release_later(
            [row.offloaded_seq for row in self.waiting if row.offloaded_seq != NOT_RUNNING]
        )
        self.drafter.close_later()
        self.running = []
        self.waiting.clear()
        self.turns.forget(self)

    def _fail_with_samples(self, row: Row, reason: str) -> None:
        for one in (row, *row.samples):
            self.fail(one, reason)

    def _preempt(self, error: OutOfPagesError) -> None:
        """Puts the youngest row that has got a token since it joined back in front of the queue."""
        moved = [row for row in self.running if len(row.tokens) > row.joined_with]
        # If none has got one, they hold too much together: all but the oldest try again.
        victim = (moved or self.running)[-1]
        if len(self.running) > 1 or self.turns.others_may_leave(self):
            self._put_back(victim)
        elif not self.turns.others_put_back(self):
            self._fail_with_samples(victim, str(error) + self.turns.who_holds(self))

    def put_all_back(self) -> None:
        """Puts all rows back in front of the queue, since others need their pages."""
        while self.running:
            self._put_back(self.running[-1])

    def _put_back(self, row: Row) -> None:
        with Uninterrupted():
            self.turns.short_at = self.turns.departures
            is_offloaded = self.preemption.offload_if_cheaper(row)
            self.stats.offloaded += is_offloaded
            if self.branches and not is_offloaded:
                self.branches.keep([row])
            self._leave([row])
            self.waiting.appendleft(row)
            self.stats.preemptions += 1

    def _depart(self, rows: list[Row]) -> None:
        """Rows leave for good, and others may join: also those of other threads."""
        self._leave(rows)
        self.turns.departures += bool(rows)

    def _leave(self, rows: list[Row]) -> None:
        if not rows:
            return
        stats = self.cache.stats()
        if self.stats.peak is None or stats.live > self.stats.peak.live:
            self.stats.peak = stats
        leaving = set(map(id, rows))
        self._changed = True
        with Uninterrupted():
            self.cache.free([row.seq for row in rows if row.seq != NOT_RUNNING])
            self.running = [row for row in self.running if id(row) not in leaving]
            for row in rows:
                row.seq = NOT_RUNNING
                self._chunk_limit.pop(row, None)
            self.drafter.forget(rows)
