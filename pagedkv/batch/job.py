"""One call of `BatchGenerator`: its prompts become rows, and steps are computed until all ended.

A step is scheduled, run and booked, in this order and by three parts that do not know one another.
Between two steps other threads have their turn on the same pages.
"""

from __future__ import annotations

import sys
from collections.abc import Generator
from contextlib import suppress
from time import perf_counter
from typing import Any

import numpy as np

from pagedkv.config import field_of
from pagedkv.errors import ModelChangedError, UnsupportedModelError
from pagedkv.hf.adapters import without_adapter
from pagedkv.hf.model import text_config

from .graphs import DecodeGraphs
from .image_prompts import ImagePrompt
from .options import GenerationOptions
from .packed import PackedModel
from .prompts import Unread
from .results import GenerationStats
from .rows import Batch, Row
from .runner import StepRunner
from .scheduler import Scheduler
from .sight import Sight
from .source import WITH_IMAGES, Coming, Source
from .together import Together


class Job:
    """The rows of one call; `_rows` says which a prompt has.

    Args:
        source: the prompts, each with its salt; some may have to be read first.
        sight: what sees for them; None where all are ids.
    """

    def __init__(
        self,
        packed: PackedModel,
        graphs: DecodeGraphs | None,
        scheduler: Scheduler,
        runner: StepRunner,
        source: Source,
        stats: GenerationStats,
        sight: Sight | None = None,
    ) -> None:
        self._packed, self._graphs, self._turns = packed, graphs, packed.kv.turns
        self._scheduler, self._runner = scheduler, runner
        self._source, self._stats = source, stats
        positions = field_of(text_config(packed.model), "max_position_embeddings")
        self._longest = positions or sys.maxsize
        self._adapters, self._sight = b"", sight
        ranks = packed.kv.ranks
        self._together = Together(ranks) if ranks.size > 1 else None

    # ------------------------------------------------------------------ the loop

    def run(self) -> Generator[Any]:
        """The rows in the order in which they end, or what else `_step` gives."""
        scheduler, lock, turns = self._scheduler, self._packed.kv.lock, self._turns
        together = self._together
        if together is not None:
            together.begin()
        try:
            turns.ask(scheduler)
            with lock:
                turns.begin(scheduler)
                self._begin()
                turns.end(scheduler)
            while True:
                if together is not None:
                    together.begin_turn(self._is_over)
                self._read_on()
                turns.ask(scheduler)
                with lock:  # jobs of several threads take turns
                    turns.begin(scheduler)
                    ended = self._timed()
                    turns.end(scheduler, waits=ended == [] and not scheduler.running)
                    if ended is None:
                        turns.leave(scheduler)
                        break
                yield from ended
                if ended:  # who took them may have cast the model
                    self._packed.require_same_kind()
        except GeneratorExit:  # perhaps from a garbage collection in the middle of anything
            scheduler.close_later()
            raise
        except BaseException as error:
            try:
                with lock:
                    scheduler.close()
                    turns.leave(scheduler)
            except BaseException:  # a second Ctrl-C, perhaps while it waits for the lock
                scheduler.close_later()
                raise
            if together is not None:
                together.tell(error)
            raise
        finally:
            if together is not None:
                together.end()
        if self._source.error is not None:
            raise self._source.error

    def _begin(self) -> None:
        """Looks at the model's weights: pages of others are not found behind changed ones."""
        self._packed.require_same_kind()
        self._packed.forget_stale()
        self._adapters = self._packed.adapters()
        if self._graphs is not None:
            self._graphs.forget_stale()

    def _timed(self) -> list[Any] | None:
        """A step, and what it took."""
        stats, since = self._stats, perf_counter()
        steps, computed = stats.steps, stats.computed
        ended = self._turn()
        seconds = perf_counter() - since
        stats.seconds += seconds
        stats.step_cost.add(stats.steps - steps, stats.computed - computed, seconds)
        return ended

    def _turn(self) -> list[Any] | None:
        """A step; of one that ends in an error other threads meet nothing."""
        try:
            self._packed.require_open()
            self._packed.take_over()
            ended = self._step() if self._together is None else self._together.apart(self._step)
            if ended:
                self._packed.require_adapters(self._adapters)
            return ended
        except BaseException:
            self._scheduler.close()
            with suppress(ModelChangedError):  # which rows that have not ended did not see
                self._packed.require_adapters(self._adapters)
            raise

    def _step(self) -> list[Any] | None:
        """Takes in prompts and computes a step; the rows that ended, None when there is no more."""
        scheduler, runner = self._scheduler, self._runner
        self._take_in()
        if not scheduler.ended:
            batch = runner.in_flight or scheduler.schedule()
            if batch is not None and self._sees(batch):
                outcome = runner.run(batch, scheduler.may_repeat(batch))
                scheduler.book(outcome)
        ended, scheduler.ended = scheduler.ended, []
        return ended if ended or scheduler.running or scheduler.waiting else None

    def _sees(self, batch: Batch) -> bool:
        """Whether the images of a step could be looked at; if not, the step is taken back."""
        failed = [] if self._sight is None else self._sight.look(batch)
        if failed:
            self._scheduler.take_back(batch, failed)
        return not failed

    # ------------------------------------------------------------------ prompts

    @property
    def _is_over(self) -> bool:
        """Whether the time for the whole call is over; if nobody gave one, it never is."""
        return False

    @property
    def _ends(self) -> bool:
        """Whether the first rank says that the time is over."""
        return self._is_over if self._together is None else self._together.is_over

    def _read_on(self) -> None:
        """Reads as many prompts as the scheduler wants to look at."""
        if self._ends:
            self._source.end()
        if self._together is not None:
            self._together.read(self._source, self._scheduler.room)
        else:
            with self._scheduler.turn.reading(self._put_back):
                self._source.read(self._scheduler.room)

    def _put_back(self) -> None:
        """Puts all rows back; a thread that waits for their pages calls it while this one reads."""
        if self._runner.in_flight is not None:
            self._scheduler.book(self._runner.land())
        self._scheduler.put_all_back()

    def _take_in(self) -> None:
        """Hands the scheduler as many prompts as it wants to look at."""
        scheduler, pixels = self._scheduler, 0
        if self._sight is not None:
            pixels = sum(row.images is not None for row in scheduler.waiting)
        if self._together is not None:
            self._take_in_alike(self._together)
        for _ in range(scheduler.room):
            if pixels >= WITH_IMAGES or (coming := self._source.take()) is None:
                break
            rows = self._rows(coming)
            scheduler.submit(rows)
            pixels += rows[0].images is not None
        if self._ends:
            scheduler.fail_waiting("max_time: it was over before this row could begin")

    def _take_in_alike(self, together: Together) -> None:
        """Takes prompts in on several ranks, where no prompt has images."""
        room = range(self._scheduler.room)
        coming = [one for _ in room if (one := self._source.take()) is not None]
        if coming:
            for rows in together.rows(lambda: [self._rows(one) for one in coming]):
                self._scheduler.submit(rows)

    def _rows(self, coming: Coming) -> list[Row]:
        """The rows of a prompt, some of them perhaps with an error; at least one."""
        raise NotImplementedError

    def _what_is_wrong(self, ids: Any, what: str = "prompt") -> str | None:
        embedding: Any = without_adapter(self._packed.model.get_input_embeddings())
        vocabulary = embedding.num_embeddings
        if not ids.size:
            return f"{what}: expected at least one token, got none"
        if ids.size > self._longest:
            return f"{what}: the model takes {self._longest} tokens, got {ids.size}"
        if what == "prompt":
            self._packed.warn_of_room(ids.size)
        if ids.min() < 0 or ids.max() >= vocabulary:
            return f"{what}: expected ids 0..{vocabulary - 1}, got {ids.min()}..{ids.max()}"
        return None


class GenerationJob(Job):
    """A job whose rows generate.

    Args:
        options: the rules of its rows; None where each prompt has its own.
        job: what `Job` takes.
    """

    def __init__(self, options: GenerationOptions | None, *job: Any) -> None:
        super().__init__(*job)
        self._options = options

    @property
    def _is_over(self) -> bool:
        return self._options is not None and self._options.is_over

    def _rows(self, coming: Coming) -> list[Row]:
        """The rows of a prompt, one for each sample, some of them perhaps with an error."""
        index, own, options = coming.place, coming.own, self._options_of(coming)
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

    def _options_of(self, coming: Coming) -> GenerationOptions:
        """The options of a prompt: those of the call."""
        assert self._options is not None
        return self._options

    def _read(self, given: Any) -> tuple[Any, ImagePrompt | None, str | None]:
        """The ids of a prompt, its images if it has any, and what is wrong with it."""
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
