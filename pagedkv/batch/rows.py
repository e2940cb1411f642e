"""The rows of a job, the batch that a step computes, and its outcome: data, no decisions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import numpy as np

from pagedkv.arrays import Tokens
from pagedkv.pages.salts import Salt
from pagedkv.step.metadata import StepMetadata

from .results import Result

if TYPE_CHECKING:
    from .image_prompts import ImagePrompt
    from .sampling import RowRules

NOT_RUNNING = -1


class Row:
    """One sequence of a job: a sample of a prompt.

    Attributes:
        index, sample: which prompt of the job, and which sample of it.
        prompt: `[n]` ids, at least one; an image token has the number by which it is found.
        images: the prompt's, if it has any; its samples share them.
        limit: tokens its text may reach, the prompt included.
        salt: its prefixes are shared only with rows of the same salt.
        samples: rows of the same prompt that fork from this one once it is computed.
        rules: how its tokens are chosen.
        tokens: ids generated so far; `logprobs` of them, if asked for.
        length: tokens of its text, the one not yet fed included.
        cached_tokens: prompt tokens that were found stored when it first joined.
        finish_reason, error: why it ended, or could not go on.
        seq: its sequence on the device.
        offloaded_seq: its sequence, if that waits in host memory.
        ids: the text that it had when it joined, which has to be computed.
        done: committed tokens of its text.
        joined_with: tokens that were generated when it last joined.
        most_fed: most tokens a step may feed it, if evictions between its steps have to make room.
        cuts: lengths of its text, ascending, at which a step ends so that its state can be kept.
    """

    def __init__(
        self, prompt: Tokens, limit: int = 0, index: int = 0, sample: int = 0, salt: Salt = b""
    ) -> None:
        self.prompt, self.limit, self.index, self.sample = prompt, limit, index, sample
        self.salt = salt
        self.samples: list[Row] = []
        self.images: ImagePrompt | None = None
        self.rules: Any = None  # `RowRules` of a row that generates
        self.tokens: list[int] = []
        self.length = len(prompt)
        self.key = prompt.tobytes()  # sorts rows that begin alike side by side
        self.logprobs: list[float] = []
        self.cached_tokens = 0
        self.finish_reason: str | None = None
        self.error: str | None = None

        self.seq = self.offloaded_seq = NOT_RUNNING
        self.ids, self.done, self.joined_with = prompt, 0, 0
        self.joined_before = False
        self.most_fed: int | None = None
        self.cuts: list[int] = []
        self.waits_for: tuple[Row, int] | None = None

    @property
    def is_prefilling(self) -> bool:
        """Whether nothing was generated since it joined: its text is still being computed."""
        return len(self.tokens) == self.joined_with

    @property
    def forks(self) -> int:
        """Counts the samples that need a sequence once it is computed: those of several tokens."""
        return sum(sample.limit > sample.length + 1 for sample in self.samples)

    def join(self, text: Tokens, done: int) -> None:
        """Notes the row's sequence, which holds the first `done` tokens of its text."""
        self.ids, self.done, self.joined_with = text, done, len(self.tokens)

    def result(self, text: str | None, logprobs: bool) -> Result:
        """Returns the row's `Result`.

        Args:
            text: its decoded tokens.
            logprobs: whether it has their log-probabilities.
        """
        return Result(
            self.index,
            self.sample,
            self.tokens,
            text,
            self.logprobs if logprobs else None,
            "error" if self.error else self.finish_reason,  # type: ignore[arg-type]
            self.cached_tokens,
            self.error,
        )

    def text(self) -> Tokens:
        """`[n]`, prompt and generated ids."""
        if not self.tokens:
            return self.prompt
        return np.concatenate([self.prompt, np.asarray(self.tokens, np.int32)])

    def since(self, length: int) -> Tokens:
        """`[n]`, the ids of its text from `length` on."""
        if length < len(self.prompt):
            return self.text()[length:]
        return np.asarray(self.tokens[length - len(self.prompt) :], np.int32)

    def take(self, token: int) -> bool:
        """Appends a token; returns whether that finishes the row."""
        rules: RowRules = self.rules
        self.tokens.append(token)
        self.length += 1
        if token in rules.ends or (rules.follows and rules.ended(token, self.length)):
            self.finish_reason = "stop"
        elif self.length >= self.limit:
            self.finish_reason = "length"
        else:
            return False
        return True


class Batch:
    """The rows of one step, the tokens each is fed, and which get logits.

    Attributes:
        rows: decoding rows first.
        tokens: `[B]`, or an array for each row.
        counts: how many tokens each row is fed; None if one each.
        sampling: the rows whose text this step computes to its end, so that they get a token.
        sampling_at: their places in `rows`; None if they are all rows.
        widths: fed tokens of each sampling row that need logits, without drafts; None if one each.
            A row has more if its next tokens are known: it is a continuation.
        drafts: ids fed behind the tokens of the first rows; empty if nothing is drafted.
        step: the step that was opened for them; the latest, where a batch is repeated.
    """

    step: StepMetadata

    def __init__(self, rows: list[Row], tokens: Any, counts: list[int] | None) -> None:
        self.rows, self.tokens, self.counts = rows, tokens, counts
        self.drafts: list[Tokens] = []
        self.sampling, self.sampling_at, self.widths = rows, None, None
        if counts is not None:
            widths = [row.done + count - row.length + 1 for row, count in zip(rows, counts)]
            at = [i for i, width in enumerate(widths) if width > 0]
            self.sampling, self.sampling_at = [rows[i] for i in at], at
            self.widths = [widths[i] for i in at]

    @property
    def fed(self) -> Any:
        """Tokens and drafts: what `PagedKVCache.prepare` takes."""
        if not self.drafts:
            return self.tokens
        both = zip_longest(self.tokens, self.drafts, fillvalue=self.drafts[0][:0])
        return [np.append(tokens, draft) for tokens, draft in both]

    @property
    def num_fed(self) -> list[int]:
        """Tokens of each row that are not drafted."""
        return [1] * len(self.rows) if self.counts is None else self.counts

    @property
    def num_logits(self) -> list[int]:
        """Tokens of each sampling row that need logits, its draft among them."""
        drafted = [1 + len(draft) for draft in self.drafts]
        widths = [1] * len(self.sampling) if self.widths is None else self.widths
        return drafted + widths[len(drafted) :]

    @property
    def is_narrow(self) -> bool:
        """Whether no row needs the logits of more than one token."""
        return not self.drafts and (self.widths is None or max(self.widths, default=1) == 1)

    def is_as_drafted(self, i: int, depth: int) -> bool:
        """Whether a row goes on, and its last token is its draft's token at a depth."""
        row, draft = self.rows[i], self.drafts[i]
        if row.finish_reason or row.error or depth >= len(draft):
            return False
        return row.tokens[-1] == draft[depth]


@dataclass
class Outcome:
    """The outcome of a step for the rows of its batch.

    Attributes:
        batch: the batch that the step computed.
        kept: committed tokens of each row; empty if no step was committed.
        seconds: how long it took.
        finished: rows whose text ended.
        failed: rows that cannot go on, each with its `error`.
        forking: rows whose samples got their first token and want sequences.
    """

    batch: Batch
    kept: Sequence[int] = ()
    seconds: float = 0.0
    finished: list[Row] = field(default_factory=list)
    failed: list[Row] = field(default_factory=list)
    forking: list[Row] = field(default_factory=list)
