"""One call of `BatchGenerator`: its prompts become rows, and steps are computed until all ended.

The scheduler composes a step, the runner computes it, and the scheduler books it; the two do not
know each other. Between two steps other threads have their turn on the same pages.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import suppress
from time import perf_counter
from typing import Any

import numpy as np

from pagedkv.errors import ModelChangedError, UnsupportedModelError
from pagedkv.hf.adapters import without_adapter
from pagedkv.hf.model import longest_of

from .image_prompts import ImagePrompt
from .options import GenerationOptions
from .prompt_queue import WITH_IMAGES, Coming, PromptQueue
from .prompts import Unread
from .rank_sync import rank_sync
from .rows import Batch, Row
from .runner import StepRunner
from .scheduler import Scheduler


class Job:
    """The rows of one call; `_rows` makes those of a prompt.

    Args:
        source: the prompts, each with its salt; some may have to be read first.
    """

    def __init__(self, scheduler: Scheduler, runner: StepRunner, source: PromptQueue) -> None:
        self._scheduler, self._runner, self._source = scheduler, runner, source
        self._packed, self._stats, self._sight = runner.packed, runner.stats, runner.sight
        self._turns = runner.cache.turns
        self._longest = longest_of(self._packed.model)
        self._adapters, self._vocabulary = b"", 0
        self._sync = rank_sync(runner.cache.ranks)

    # ------------------------------------------------------------------ the loop

    def run(self) -> Generator[Any]:
        """Yields what `_step` returns: by default the rows in the order in which they end."""
        rows, lock, turns = self._scheduler.rows, self._packed.kv.lock, self._turns
        self._sync.begin()
        try:
            turns.ask(rows)
            with lock:
                turns.begin(rows)
                is_stale = self._begin()
                turns.end(rows)
            while True:
                self._sync.begin_turn(self._is_over, is_stale)
                is_stale = False
                self._read_on()
                turns.ask(rows)
                with lock:  # jobs of several threads take turns
                    turns.begin(rows)
                    if self._sync.is_stale:
                        self._packed.kv.clear_prefixes()
                    ended = self._timed()
                    turns.end(rows, waits=ended == [] and not rows.running)
                    if ended is None:
                        turns.leave(rows)
                        break
                yield from ended
                if ended:  # the caller may have cast the model since
                    self._packed.require_same_kind()
        except GeneratorExit:  # perhaps from a garbage collection in the middle of anything
            rows.close_later()
            raise
        except BaseException as error:
            try:
                with lock:
                    rows.close()
                    turns.leave(rows)
            except BaseException:  # a second Ctrl-C, perhaps while it waits for the lock
                rows.close_later()
                raise
            self._sync.tell(error)
            raise
        finally:
            self._sync.end()
        if self._source.error is not None:
            raise self._source.error

    def _begin(self) -> bool:
        """Checks the model's weights: if they have changed, no earlier prefix is found.

        Returns:
            Whether they have changed on this rank.
        """
        self._packed.require_same_kind()
        is_stale = self._packed.forget_stale()
        self._adapters = self._packed.adapters()
        if self._runner.graphs is not None:
            self._runner.graphs.forget_stale()
        return is_stale

    def _timed(self) -> list[Any] | None:
        """Runs a turn, and adds its time and counts to the statistics."""
        stats, since = self._stats, perf_counter()
        steps, computed = stats.steps, stats.computed
        ended = self._turn()
        seconds = perf_counter() - since
        stats.seconds += seconds
        stats.step_cost.add(stats.steps - steps, stats.computed - computed, seconds)
        return ended

    def _turn(self) -> list[Any] | None:
        """Runs a step; if it raises, the rows are released before other threads go on."""
        try:
            self._packed.require_open()
            self._packed.take_over()
            ended = self._sync.apart(self._step)
            if ended:
                self._packed.require_adapters(self._adapters)
            return ended
        except BaseException as error:
            self._scheduler.rows.close()
            with suppress(ModelChangedError):  # asked only to forget prefixes
                self._packed.require_adapters(self._adapters)
            if isinstance(error, Exception):  # perhaps because another thread closed the generator
                self._packed.require_open()
            raise

    def _step(self) -> list[Any] | None:
        """Takes in prompts and computes a step; returns rows that ended, None at the job's end."""
        scheduler, runner = self._scheduler, self._runner
        self._take_in()
        if not scheduler.rows.ended:
            batch = runner.in_flight or scheduler.schedule()
            if batch is not None and self._sees(batch):
                outcome = runner.run(batch, scheduler.may_repeat(batch))
                scheduler.book(outcome)
        ended = scheduler.take_ended()
        return ended if ended or scheduler.rows.running or scheduler.rows.waiting else None

    def _sees(self, batch: Batch) -> bool:
        """Whether the images of a step could be looked at; if not, the step is taken back."""
        failed = [] if self._sight is None else self._sight.look(batch)
        if failed:
            self._scheduler.take_back(batch, failed)
        return not failed

    # ------------------------------------------------------------------ prompts

    @property
    def _is_over(self) -> bool:
        """Whether the caller's time for the whole call is over."""
        return False

    def _read_on(self) -> None:
        """Reads as many prompts as the scheduler wants to look at."""
        if self._sync.is_over:
            self._source.end()
        reading = self._scheduler.rows.turn.reading(self._put_back)
        self._sync.read(self._source, self._scheduler.room, reading)

    def _put_back(self) -> None:
        """Puts all rows back; a thread that waits for their pages calls it while this one reads."""
        if self._runner.in_flight is not None:
            self._scheduler.book(self._runner.land())
        self._scheduler.rows.put_all_back()

    def _take_in(self) -> None:
        """Hands the scheduler as many prompts as it wants to look at."""
        scheduler, pixels = self._scheduler, 0
        if self._sight is not None:
            pixels = sum(row.images is not None for row in scheduler.rows.waiting)
        room = scheduler.room
        embedding: Any = without_adapter(self._packed.model.get_input_embeddings())
        self._vocabulary = embedding.num_embeddings
        while room > 0 and pixels < WITH_IMAGES:
            coming = self._source.take(min(room, self._sync.at_once))
            if not coming:
                break
            room -= len(coming)
            for rows in self._sync.rows(self._rows, coming):
                scheduler.submit(rows)
                pixels += rows[0].images is not None
        if self._sync.is_over:
            scheduler.rows.fail_waiting("max_time: it was over before this row could begin")

    def _rows(self, coming: Coming) -> list[Row]:
        """Makes the rows of a prompt, at least one; a row may have an error."""
        raise NotImplementedError

    def _what_is_wrong(self, ids: Any, what: str = "prompt") -> str | None:
        if not ids.size:
            return f"{what}: expected at least one token, got none"
        if ids.size > self._longest:
            return f"{what}: the model takes {self._longest} tokens, got {ids.size}"
        if what == "prompt":
            self._packed.warn_of_room(ids.size)
        least, most = int(ids.min()), int(ids.max())
        if least < 0 or most >= self._vocabulary:
            return f"{what}: expected ids 0..{self._vocabulary - 1}, got {least}..{most}"
        return None


class GenerationJob(Job):
    """A job whose rows generate.

    Args:
        options: the rules of its rows; None if each prompt has its own.
        job: the arguments of a `Job`.
    """

    def __init__(self, options: GenerationOptions | None, *job: Any) -> None:
        super().__init__(*job)
        self._options = options

    @property
    def _is_over(self) -> bool:
        return self._options is not None and self._options.is_over

    def _rows(self, coming: Coming) -> list[Row]:
        """Makes the rows of a prompt, one for each sample; a row may have an error."""
        index, own = coming.place, coming.own
        options = coming.options or self._options
        assert options is not None
        ids, images, wrong = self._read(coming.prompt)
        wrong = wrong or options.what_is_wrong(index, own)
        prompt = ids if images is None else images.text
        prompt = prompt[:0].astype(np.int32) if wrong else prompt.astype(np.int32)
        salt = b"" if wrong else own["salt"]
        rows = [Row(prompt, 0, index, sample, salt) for sample in range(options.samples)]
        for row in rows:
            row.error, row.images = wrong, images
            try:
                if not wrong:
                    row.rules = options.rules(index, row.sample, ids, own)
                    row.limit = min(row.rules.limit, self._longest)
            except ValueError as error:  # the prompt is as long as its text may become
                row.error = str(error)
        return rows

    def _read(self, given: Any) -> tuple[Any, ImagePrompt | None, str | None]:
        """Returns the ids of a prompt, its images if it has any, and what is wrong with it."""
        if not isinstance(given, Unread):
            return given, None, self._what_is_wrong(given)
        ids, images = np.empty(0, np.int64), None
        try:
            ids, inputs = given.read()
            wrong = self._what_is_wrong(ids)
            if not wrong and self._sight is not None:
                images = self._sight.prompt(ids, inputs)
        except (ValueError, TypeError, RuntimeError, UnsupportedModelError) as error:
            wrong = str(error)
        return ids, images, wrong
