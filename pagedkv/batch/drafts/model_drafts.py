"""Drafts by a smaller model, for all rows of a job in one batch.

A decoding row has a sequence in the pages of the draft model. The first step of a turn feeds it the
tokens of the row's text that it lacks, a prompt in chunks; each further step feeds one draft.
Drafts that turned out wrong are cut off when the row's next draft is asked for.

A draft is chosen as the row itself chooses: greedily, or with the very numbers that the row is
about to draw, read from a copy of its generator. So where the two models nearly agree, the draft is
the token that the row draws, and the row's own generator is not touched.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from time import perf_counter

import numpy as np
import torch
from transformers import LogitsProcessorList, StoppingCriteriaList

from pagedkv.arrays import Tokens
from pagedkv.batch.branches import shared_length
from pagedkv.batch.options import WITHOUT_IDS
from pagedkv.batch.results import GenerationStats
from pagedkv.batch.rows import NOT_RUNNING, Row
from pagedkv.batch.sampling import RowRules, choose
from pagedkv.errors import OutOfPagesError, TooManySequencesError
from pagedkv.hf.telling import warn
from pagedkv.interrupt import Uninterrupted
from pagedkv.pages.prefix import leading
from pagedkv.pages.salts import Salt
from pagedkv.ranks import ALONE, Ranks
from pagedkv.step.metadata import StepMetadata

from .draft_length import DraftLength
from .draft_model import DraftModel
from .drafter import Drafter

NONE = np.empty(0, np.int32)


@dataclass(eq=False)
class Follower:
    """The sequence by which the draft model follows a row.

    Attributes:
        row: whose text its sequence follows.
        rules: how its drafts are chosen: by the row's rules, without those that look at ids.
        draft_length: how many drafts it gets.
        seq: its sequence in the pages of the draft model.
        done: tokens of the row's text that are committed there.
        fed: drafts that are committed behind them.
        length, drafted: the row's length when it last got drafts, and these drafts.
    """

    row: Row
    rules: RowRules
    draft_length: DraftLength
    seq: int = NOT_RUNNING
    done: int = 0
    fed: list[int] = field(default_factory=list)
    length: int = 0
    drafted: list[int] = field(default_factory=list)

    @property
    def behind(self) -> int:
        """Tokens of the row's text that the draft model has not computed."""
        return self.row.length - self.done


@dataclass
class Chunk:
    """A row's part of a draft step: ids that its follower lacks, and how many drafts it gets."""

    follower: Follower
    ids: Tokens
    wanted: int
    is_last: bool


class ModelDrafts(Drafter):
    """The `Drafter` of one job that makes drafts with a model.

    If the model raises, a warning says so, and the job goes on without drafts.

    Args:
        step_tokens: most tokens that a step of the draft model computes.
        stats: where it counts its steps and their time.
        ranks: those that share the main model.
    """

    def __init__(
        self,
        model: DraftModel,
        step_tokens: int,
        stats: GenerationStats,
        ranks: Ranks = ALONE,
    ) -> None:
        self.model, self.cache, self.stats, self._ranks = model, model.cache, stats, ranks
        self._step_tokens = min(step_tokens, model.cache.config.max_step_tokens or step_tokens)
        self._of: dict[Row, Follower] = {}
        self._right = self._tried = 1  # of the drafts of all rows
        self._begun = self._failed = False

    def drafts(self, rows: Sequence[Row], most: Sequence[int], budget: int) -> list[Tokens]:
        if self._failed:
            return []
        since = perf_counter()
        try:
            if not self._begun:
                self.model.begin()
                self._begun = True
            self._draft(rows, most, budget)
        except Exception as error:
            if self._ranks.size > 1:
                raise  # other ranks may have drafts, and all must have the same
            self.close()
            self._failed = True
            warn(
                f"draft: {type(self.model.packed.model).__name__} raised {type(error).__name__}: "
                f"{error}; the rows of this call go on without drafts"
            )
            return []
        finally:
            self.stats.draft_seconds += perf_counter() - since
        return [self._drafted(row) for row in rows]

    def forget(self, rows: Iterable[Row]) -> None:
        for row in rows:
            if (follower := self._of.get(row)) is not None:
                self._free(follower)
                del self._of[row]

    def close(self) -> None:
        self.forget(list(self._of))

    def close_later(self) -> None:
        held = [one.seq for one in self._of.values() if one.seq != NOT_RUNNING]
        self.cache.release_later(held)
        self._of = {}

    # ------------------------------------------------------------------ one turn

    def _draft(self, rows: Sequence[Row], most: Sequence[int], budget: int) -> None:
        asking: list[tuple[Follower, int]] = []
        for row, limit in zip(rows, most):
            follower = self._follower(row)
            self._learn(follower)
            limit = min(limit, budget, self.model.longest - row.length)
            wanted = min(limit, follower.draft_length.next()) if limit > 0 else 0
            if wanted > 0:
                asking.append((follower, wanted))
                budget -= wanted
        chunks = self._chunks(asking)
        step = self._open(chunks)
        if step is None:
            return
        self._compute(step, chunks)
        going = [chunk for chunk in chunks if self._goes_on(chunk)]
        while going:
            seqs = [chunk.follower.seq for chunk in going]
            last = [chunk.follower.drafted[-1] for chunk in going]
            try:
                step = self.cache.prepare(seqs, np.array(last))
            except OutOfPagesError:
                return
            for chunk, token in zip(going, last):
                chunk.ids, chunk.is_last = np.array([token], np.int32), True
            self._compute(step, going)
            going = [chunk for chunk in going if self._goes_on(chunk)]

    def _goes_on(self, chunk: Chunk) -> bool:
        drafted = chunk.follower.drafted
        return 0 < len(drafted) < chunk.wanted and drafted[-1] not in chunk.follower.rules.ends

    def _drafted(self, row: Row) -> Tokens:
        follower = self._of.get(row)
        if follower is None or follower.length != row.length:
            return NONE
        return np.array(follower.drafted, np.int32)

    def _learn(self, follower: Follower) -> None:
        """Compares the last drafts with the tokens that came, and cuts off the wrong ones."""
        row = follower.row
        since = row.since(follower.length)
        most = min(len(follower.drafted), len(since))
        right = leading(np.equal(follower.drafted[:most], since[:most]))
        # Verified drafts bring the row one token more than were right; otherwise they were dropped.
        if follower.drafted and right < len(since):
            follower.draft_length.learn(len(follower.drafted), right)
            self._right += right
            self._tried += right + (right < len(follower.drafted))
        follower.length, follower.drafted = row.length, []
        stored = follower.done + len(follower.fed)
        # The last token is always fed, even if it was fed as a draft before: it brings logits.
        done = min(follower.done + min(right, len(follower.fed)), row.length - 1)
        if follower.seq != NOT_RUNNING:
            with Uninterrupted():
                if done < stored:
                    self.cache.truncate(follower.seq, done)
                follower.done, follower.fed = done, []

    # ------------------------------------------------------------------ what a step feeds

    def _follower(self, row: Row) -> Follower:
        if row not in self._of:
            draft_length = DraftLength(self.model.width - 1, self._right / self._tried)
            self._of[row] = Follower(row, _rules_of(row), draft_length)
        return self._of[row]

    def _chunks(self, asking: Sequence[tuple[Follower, int]]) -> list[Chunk]:
        """Composes a step of the rows that ask; those that lack the fewest tokens come first."""
        room, chunks = self._step_tokens, []
        computing: dict[tuple[Salt, bytes], list[Tokens]] = {}
        for follower, wanted in sorted(asking, key=lambda one: one[0].behind):
            if room <= 0:
                break
            alike = computing.setdefault(self._head(follower.row), [])
            if follower.seq == NOT_RUNNING and not self._join(follower, alike):
                continue
            ids = follower.row.since(follower.done)
            if int(ids.max()) >= self.model.vocabulary:  # the number of an image is no id
                follower.draft_length.pause()
                continue
            count = min(len(ids), room)
            if count > 1:
                alike.append(follower.row.text())
            chunks.append(Chunk(follower, ids[:count], wanted, count == len(ids)))
            room -= count
        return chunks

    def _head(self, row: Row) -> tuple[Salt, bytes]:
        """Returns the salt and first tokens; rows that differ here do not wait for one another."""
        return row.salt, row.key[: row.prompt.itemsize * self.cache.config.page_size]

    def _join(self, follower: Follower, alike: Sequence[Tokens]) -> bool:
        """Gives a row its sequence, unless another row is computing tokens that both share."""
        row = follower.row
        ids = row.text()
        if int(ids.max()) >= self.model.vocabulary:
            follower.draft_length.pause()
            return False
        found = self.cache.stored_prefix(ids, salt=row.salt)[1]
        least = found + self.cache.config.page_size
        if any(shared_length(ids, text) >= least for text in alike):
            return False
        try:
            with Uninterrupted():
                follower.seq = self.cache.add(ids, salt=row.salt)
                follower.done = self.cache.length(follower.seq)
        except (OutOfPagesError, TooManySequencesError):
            follower.draft_length.pause()
            return False
        return True

    def _open(self, chunks: list[Chunk]) -> StepMetadata | None:
        """Opens a step; if pages are short, the last rows go without drafts."""
        while chunks:
            try:
                return self.cache.prepare(
                    [chunk.follower.seq for chunk in chunks], [chunk.ids for chunk in chunks]
                )
            except OutOfPagesError:
                last = chunks.pop().follower
                last.draft_length.pause()
                self._free(last)
        return None

    @torch.inference_mode()
    def _compute(self, step: StepMetadata, chunks: Sequence[Chunk]) -> None:
        """Runs the model, commits the step, and gives a draft to rows that have caught up."""
        last = [i for i, chunk in enumerate(chunks) if chunk.is_last]
        logits = self.model.logits(step, last)
        with Uninterrupted():
            self.cache.commit(step)
            for chunk in chunks:
                follower = chunk.follower
                if follower.drafted:
                    follower.fed += chunk.ids.tolist()
                else:
                    follower.done += len(chunk.ids)
        self.stats.draft_steps += 1
        if not last:
            return
        followers = [chunks[i].follower for i in last]
        for one in followers:
            own, rows = one.rules.generator, one.row.rules.generator
            if not one.drafted and own is not None:
                own.set_state(rows.get_state())
        chosen = choose(followers, logits, with_logprobs=False, ranks=self._ranks)
        tokens, _ = chosen.read()
        for i, one in enumerate(followers):
            if i not in chosen.errors:
                one.drafted.append(tokens[i])

    def _free(self, follower: Follower) -> None:
        """Frees a sequence; aborts a step that an interrupt left open before."""
        if follower.seq == NOT_RUNNING:
            return
        if (step := self.cache.open_step) is not None:
            self.cache.abort(step)
        with Uninterrupted():
            self.cache.free(follower.seq)
            follower.seq, follower.done, follower.fed = NOT_RUNNING, 0, []


def _rules_of(row: Row) -> RowRules:
    """Returns a row's rules without those that look at its text, with their own generator."""
    rules: RowRules = row.rules
    pure = [one for one in rules.processors if type(one) in WITHOUT_IDS]
    generator = rules.generator
    return replace(
        rules,
        processors=LogitsProcessorList(pure),
        criteria=StoppingCriteriaList(),
        generator=None if generator is None else torch.Generator(generator.device),
        ids=None,
        by_text=False,
    )
