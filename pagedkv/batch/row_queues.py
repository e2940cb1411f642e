"""The rows of a job that hold pages: they join, fork, are put back, end and leave.

- A row joins when the pages that it is expected to need can be set aside. It is expected to use as
  large a share of its limit as finished rows used of theirs, so a job whose rows stop early runs
  more of them at once.
- When pages run short all the same, the youngest row gives its pages back. It is computed again
  later, from what is still findable of it, or its K and V wait in host memory if copying them takes
  less time (`preemption.py`). No row joins until one has finished, perhaps one of another thread
  (`cache/fair_turns.py`). A row that was put back gets a token before it is put back again, unless
  no row has got one.
"""

from __future__ import annotations

from collections import deque

from pagedkv.arrays import Tokens
from pagedkv.cache.cache import PagedKVCache
from pagedkv.cache.fair_turns import Turn
from pagedkv.errors import OutOfPagesError, TooManySequencesError
from pagedkv.interrupt import Uninterrupted

from .branches import Branches
from .drafts.drafter import Drafter
from .preemption import Preemption
from .results import GenerationStats
from .rows import NOT_RUNNING, Row


class RowQueues:
    """Rows of one job on the pages of a cache that others may use as well.

    Args:
        most: rows that may run.
        stats: where it counts what was reused, put back and offloaded, and keeps the peak.
        drafter: is told of rows that give their sequences back.

    Attributes:
        running: rows with a sequence.
        waiting: rows without one, in the order in which they join.
        ended: rows that have finished or failed since this list was last taken.
        is_changed: whether the next step may decode other rows than the latest one.
        turn: the job's turn on the pages, which threads share.
    """

    def __init__(
        self,
        cache: PagedKVCache,
        branches: Branches,
        most: int,
        stats: GenerationStats,
        drafter: Drafter,
    ) -> None:
        self.cache, self.branches = cache, branches
        self.turns, self.turn = cache.turns, Turn()
        config = cache.config
        self._most = min(config.max_sequences, config.max_step_tokens, most)
        self.stats, self.drafter = stats, drafter
        self.preemption = Preemption(cache)
        self.running: list[Row] = []
        self.waiting: deque[Row] = deque()
        self.ended: list[Row] = []
        self.is_changed = False
        self._evicts = config.policy is not None
        self._share_used, self._finished = 1.0, 1  # before any has finished, expect the worst

    @property
    def may_wait(self) -> bool:
        """Whether a row that finds no pages will find some, if it waits."""
        return (
            bool(self.running)
            or self.turns.others_may_leave(self)
            or self.turns.put_others_back(self)
        )

    # ------------------------------------------------------------------ rows come

    def join(self, row: Row) -> None:
        """Gives a row its sequence, with pages set aside for what it is expected to need.

        Raises:
            OutOfPagesError, TooManySequencesError: it cannot join now.
            SequenceTooLongError: it can never join.
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
            self._begin(row, ids, None)  # evictions make its room as it goes: nothing is set aside

    def _begin(self, row: Row, ids: Tokens, max_tokens: int | None) -> None:
        if row.offloaded_seq == NOT_RUNNING:
            row.seq = self.cache.add(ids, salt=row.salt, max_tokens=max_tokens)
        else:
            self.preemption.restore(row, max_tokens)

    def fork(self, row: Row) -> None:
        """Starts a row's samples on all of its text; where pages are short they wait instead.

        Each sample has got its first token from the row's last logits, which may have finished it.
        """
        samples, row.samples = row.samples, []
        for sample in samples:
            sample.cached_tokens, sample.joined_before = len(row.prompt), True
        going = [sample for sample in samples if not (sample.finish_reason or sample.error)]
        room = max(0, self._most - len(self.running))
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
            self.is_changed = True
        if waiting:
            self.branches.keep([row])
        self.stats.reused += len(row.prompt) * (len(samples) - len(waiting))
        for sample in waiting:
            sample.cached_tokens, sample.joined_before = 0, False

    # ------------------------------------------------------------------ rows are put back

    def preempt(self, error: OutOfPagesError) -> None:
        """Puts the youngest row that has got a token since it joined back in front of the queue."""
        moved = [row for row in self.running if len(row.tokens) > row.joined_with]
        # If no row has got one, they hold too much together: all but the oldest are put back.
        victim = (moved or self.running)[-1]
        if len(self.running) > 1 or self.turns.others_may_leave(self):
            self._put_back(victim)
        elif not self.turns.put_others_back(self):
            self.fail_with_samples(victim, str(error) + self.turns.who_holds(self))

    def put_all_back(self) -> None:
        """Puts all rows back in front of the queue, since others need their pages."""
        while self.running:
            self._put_back(self.running[-1])

    def _put_back(self, row: Row) -> None:
        with Uninterrupted():
            self.turns.short_at = self.turns.departures
            is_offloaded = self.preemption.offload_if_cheaper(row)
            self.stats.offloaded += is_offloaded
            if not is_offloaded:
                self.branches.keep([row])
            self._leave([row])
            self.waiting.appendleft(row)
            self.stats.preemptions += 1

    # ------------------------------------------------------------------ rows leave

    def finish(self, rows: list[Row]) -> None:
        """Gives back the pages of rows that are done."""
        if not self.waiting:
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

    def fail_with_samples(self, row: Row, reason: str) -> None:
        """Ends a row that cannot go on, and the samples that would have forked from it."""
        for one in (row, *row.samples):
            self.fail(one, reason)

    def fail_waiting(self, reason: str) -> None:
        """Ends the rows that wait: as finished if they have got tokens before, else as errors."""
        while self.waiting:
            row = self.waiting.popleft()
            if row.tokens:
                self.preemption.free([row])
                row.finish_reason = "stop"
                self.ended.append(row)
            else:
                self.fail_with_samples(row, reason)

    def set_aside(self, row: Row) -> None:
        """Takes a row out of those that run or wait. What it computed stays findable."""
        if row.seq != NOT_RUNNING:
            self.branches.keep([row])
            self._depart([row])
        elif row in self.waiting:
            self.waiting.remove(row)
            self.preemption.free([row])

    def close(self) -> None:
        """Gives back the pages of rows that still run. What was computed stays findable."""
        step = self.cache.open_step
        if step is not None and {row.seq for row in self.running} & set(step.seqs.tolist()):
            self.cache.abort(step)  # interrupted before its commit
        self._depart(list(self.running))
        self.drafter.close()
        self.preemption.free(self.waiting)
        self.waiting.clear()

    def close_later(self) -> None:
        """`close`, at a moment when the cache may be in the middle of a call."""
        offloaded = (row.offloaded_seq for row in self.waiting)
        self.cache.release_later([row.seq for row in self.running])
        self.cache.release_later([seq for seq in offloaded if seq != NOT_RUNNING])
        self.drafter.close_later()
        self.running = []
        self.waiting.clear()
        self.turns.forget(self)

    def _depart(self, rows: list[Row]) -> None:
        """Lets rows leave for good; others may join now, also those of other threads."""
        self._leave(rows)
        self.turns.departures += bool(rows)

    def _leave(self, rows: list[Row]) -> None:
        if not rows:
            return
        stats = self.cache.stats()
        if self.stats.peak is None or stats.live > self.stats.peak.live:
            self.stats.peak = stats
        leaving = set(map(id, rows))
        self.is_changed = True
        with Uninterrupted():
            self.cache.free([row.seq for row in rows if row.seq != NOT_RUNNING])
            self.running = [row for row in self.running if id(row) not in leaving]
            for row in rows:
                row.seq, row.most_fed = NOT_RUNNING, None
            self.drafter.forget(rows)
