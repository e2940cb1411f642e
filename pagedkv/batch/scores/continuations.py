"""Continuations of contexts: rows whose next tokens are known, and how the model scores these.

A context is computed once. Its continuations are samples of one prompt, in the words of `rows.py`:
the context's last logits score the first token of each, and those with more tokens fork from it.
Behind its context a row is fed its continuation, as much of it as a step takes. Each token fed
scores the next one, so the last token is not fed.
"""

from __future__ import annotations

from math import isnan

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from pagedkv.arrays import Ints, Tokens
from pagedkv.batch.logprobs import logprobs_of
from pagedkv.batch.packed import PackedModel
from pagedkv.batch.results import GenerationStats, Score
from pagedkv.batch.rows import Batch, Outcome, Row
from pagedkv.batch.runner import StepRunner, begins_of
from pagedkv.hf.model import text_config
from pagedkv.pages.salts import Salt

LOGITS_BYTES = 96 * 2**20  # of the logits of a step, in float32
NO_NUMBERS = "the model's logits are no numbers"


def most_logits(model: PreTrainedModel, planned: int | None) -> int:
    """Returns how many tokens of a step get logits: as planned, or as many as fit LOGITS_BYTES."""
    if planned is not None:
        return planned
    return max(1, LOGITS_BYTES // (4 * text_config(model).vocab_size))


class Continuation(Row):
    """A continuation behind its context, which is its `prompt`.

    Attributes:
        given: `[m]` ids, at least one. `tokens` are the first of them, which were scored already.
        logprobs, greedy: for each of `tokens` its log-probability, and whether none is likelier.
    """

    def __init__(
        self, prompt: Tokens, given: Tokens, index: int = 0, choice: int = 0, salt: Salt = b""
    ) -> None:
        super().__init__(prompt, len(prompt) + len(given), index, choice, salt)
        self.given, self.greedy = given, list[bool]()

    @property
    def is_prefilling(self) -> bool:
        """True always: every token that it is fed is known."""
        return True

    def join(self, text: Tokens, done: int) -> None:
        """Notes the row's sequence; while samples have yet to fork, only the context is fed."""
        super().join(text, done)
        if self.tokens or not self.samples:
            self.ids = self._known()

    def take_all(self, logprobs: list[float], greedy: list[bool]) -> bool:
        """Takes the log-probabilities of its next tokens; returns whether they finish the row."""
        begin = len(self.tokens)
        if not begin:
            self.ids = self._known()
        self.tokens += self.given[begin : begin + len(logprobs)].tolist()
        self.length = len(self.prompt) + len(self.tokens)
        self.logprobs += logprobs
        self.greedy += greedy
        if any(map(isnan, logprobs)):
            self.error = NO_NUMBERS
        elif self.length == self.limit:
            self.finish_reason = "length"
        return self.finish_reason is not None

    def score(self) -> Score:
        """Returns the row's `Score`."""
        return Score(
            self.index,
            self.sample,
            self.tokens,
            self.logprobs,
            self.greedy,
            self.cached_tokens,
            self.error,
        )

    def _known(self) -> Tokens:
        """Returns all ids that are ever fed: the last token has no next one to score."""
        return np.concatenate([self.prompt, self.given[:-1]])


class ContinuationRunner(StepRunner):
    """The steps of a job whose rows are continuations."""

    def __init__(self, packed: PackedModel, stats: GenerationStats) -> None:
        super().__init__(packed, None, logprobs=True, stats=stats, ahead=False)

    def _compute(self, outcome: Outcome, may_repeat: bool) -> None:
        batch = outcome.batch
        logits = self._logits(batch)
        self._commit(outcome, batch.num_fed)
        outcome.forking = [row for row in batch.sampling if row.samples]
        parts = _parts(batch)
        if not parts:
            return
        places = np.concatenate([np.arange(begin, begin + width) for _, begin, width in parts])
        ids = [one.given[len(one.tokens) :][:width] for one, _, width in parts]
        logprobs, greedy = self._ranks.share(look_up(logits, places, np.concatenate(ids)))
        end = 0
        for one, _, width in parts:
            begin, end = end, end + width
            if one.take_all(logprobs[begin:end], greedy[begin:end]):
                outcome.finished.append(one)
            elif one.error:
                outcome.failed.append(one)
        self.stats.scored += end


def _parts(batch: Batch) -> list[tuple[Continuation, int, int]]:
    """Lists the rows and samples that get logits of a step, where theirs begin, and their count."""
    widths = batch.num_logits
    return [
        (one, begin, width)  # type: ignore[misc]
        for row, begin, width in zip(batch.sampling, begins_of(widths), widths)
        for one in (row, *row.samples)
    ]


def look_up(logits: Tensor, places: Ints, ids: Tokens) -> tuple[list[float], list[bool]]:
    """Returns the log-probability of each of n tokens, and whether none is likelier.

    Args:
        logits: `[rows, vocab]`.
        places: `[n]`, in which row each token stands.
        ids: `[n]`.
    """
    at, wanted = (torch.from_numpy(x).to(logits.device, torch.long) for x in (places, ids))
    is_likeliest = logits.argmax(-1)[at] == wanted
    return logprobs_of(logits, at, wanted).tolist(), is_likeliest.tolist()
