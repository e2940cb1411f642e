"""The rows of a batch job, and the batch that a step computes of them: data, no decisions."""

from __future__ import annotations

from itertools import zip_longest
from typing import Any

import numpy as np

from pagedkv.arrays import Tokens

from .prompt_lookup import PromptLookup

NOT_RUNNING = -1


class Row:
    """One sequence of a job: a sample of a prompt.

    Attributes:
        index, sample: which prompt of the job, and which sample of it.
        prompt: `[n]` ids, at least one.
        limit: tokens its text may reach, the prompt included.
        salt: its prefixes are shared only with rows of the same salt.
        samples: rows of the same prompt that fork from this one once it is computed.
        rules: how its tokens are chosen; opaque here.
        tokens: ids generated so far; `logprobs` of them, if asked for.
        length: tokens of its text, the one not yet fed included.
        cached_tokens: prompt tokens that were found stored when it first joined.
        finish_reason, error: why it ended, or could not go on.
    """

    def __init__(
        self, prompt: Tokens, limit: int = 0, index: int = 0, sample: int = 0, salt: bytes = b""
    ) -> None:
        self.prompt, self.limit, self.index, self.sample = prompt, limit, index, sample
        self.salt = salt
        self.samples: list[Row] = []
        self.rules: Any = None
        self.tokens: list[int] = []
        self.length = len(prompt)
        self.key = prompt.tobytes()  # orders rows by what they have in common
        self.logprobs: list[float] = []
        self.cached_tokens = 0
        self.finish_reason: str | None = None
        self.error: str | None = None
        self.lookup: PromptLookup | None = None  # where its tokens are guessed

        self.seq = NOT_RUNNING
        self.aside = NOT_RUNNING  # its sequence, if that waits in host memory
        self.ids = prompt  # what it has to compute since it joined
        self.done = 0  # committed tokens of its text
        self.joined_with = 0  # tokens generated when it last joined
        self.joined_before = False
        self.waits_for: tuple[Row, int] | None = None

    @property
    def is_prefilling(self) -> bool:
        """More than its last token is uncomputed, or nothing was generated since it joined."""
        return len(self.tokens) == self.joined_with

    def guess(self, most: int) -> Tokens:
        """Up to `most` ids that may come next."""
        if self.lookup is None:
            self.lookup = PromptLookup(self.prompt)
        return self.lookup.guess(self.tokens, most)

    def text(self) -> Tokens:
        """`[n]`, prompt and generated ids."""
        if not self.tokens:
            return self.prompt
        return np.concatenate([self.prompt, np.asarray(self.tokens, np.int32)])


class Batch:
    """The rows of one step, the tokens each is fed, and which get logits.

    Attributes:
        rows: decoding rows first.
        tokens: `[B]`, or of each row an array; `counts` of them, None if one each.
        ready: the rows whose text is computed to its end by this step.
        sampling_at: their places in `rows`; None if all are ready.
        guesses: what is fed behind the tokens of the first rows; empty if nothing is guessed.
    """

    def __init__(self, rows: list[Row], tokens: Any, counts: list[int] | None) -> None:
        self.rows, self.tokens, self.counts = rows, tokens, counts
        self.guesses: list[Tokens] = []
        self.ready, self.sampling_at = rows, None
        if counts is not None:
            at = [i for i, row in enumerate(rows) if row.done + counts[i] == row.length]
            self.ready, self.sampling_at = [rows[i] for i in at], at

    @property
    def fed(self) -> Any:
        """Tokens and guesses: what `PagedKVCache.prepare` takes."""
        if not self.guesses:
            return self.tokens
        both = zip_longest(self.tokens, self.guesses, fillvalue=self.guesses[0][:0])
        return [np.append(tokens, guess) for tokens, guess in both]

    @property
    def num_fed(self) -> list[int]:
        """Of each row, tokens that are no guesses."""
        return [1] * len(self.rows) if self.counts is None else self.counts

    @property
    def num_logits(self) -> list[int]:
        """Of each ready row, tokens that need logits: its last one and its guesses."""
        guessed = [1 + len(guess) for guess in self.guesses]
        return guessed + [1] * (len(self.ready) - len(guessed))

    def is_as_guessed(self, i: int, depth: int) -> bool:
        """Whether a row goes on, and its last token is its guess of that depth."""
        row, guess = self.rows[i], self.guesses[i]
        if row.finish_reason or row.error or depth >= len(guess):
            return False
        return row.tokens[-1] == guess[depth]
