"""The results of a batch job: a `Result` for each sample, and what the job took."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from math import fsum, nan
from typing import Literal, TypeVar

from pagedkv.pages.stats import CacheStats

from .step_cost import StepCost

FinishReason = Literal["stop", "length", "error", "cancelled"]
T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class Result:
    """One finished sample of one prompt.

    Attributes:
        index: the prompt's place in the list given.
        sample: which of its `num_return_sequences`.
        tokens: generated ids, the one that ended it included.
        text: the decoded tokens, without special ones; None without a tokenizer.
        logprobs: log-probability of each token under the model's own distribution, if asked for.
        finish_reason: `stop` (an end token, a stop string or another criterion), `length`, `error`;
            `cancelled` for a row of events.
        cached_tokens: prompt tokens whose K and V were found, not computed.
        error: why it could not be finished; `tokens` has those it got before.
    """

    index: int
    sample: int
    tokens: list[int]
    text: str | None
    logprobs: list[float] | None
    finish_reason: FinishReason
    cached_tokens: int
    error: str | None = None


@dataclass(frozen=True)
class Running:
    """A row that runs at this moment.

    Attributes:
        index, sample: as of its `Result`.
        tokens: ids generated so far.
        uncomputed: tokens of its prompt that are still to be computed.
    """

    index: int
    sample: int
    tokens: list[int]
    uncomputed: int


@dataclass(frozen=True)
class Score:
    """The score of one continuation of one prompt.

    Attributes:
        index: the prompt's place in the list given.
        choice: the continuation's place in the list given for this prompt.
        tokens: ids of the continuation.
        logprobs: log-probability of each of them under the model's own distribution.
        greedy: for each of them, whether it is the likeliest token.
        cached_tokens: prompt tokens whose K and V were found, not computed.
        error: why it could not be scored; `tokens` has those that were scored before.
    """

    index: int
    choice: int
    tokens: list[int]
    logprobs: list[float]
    greedy: list[bool]
    cached_tokens: int
    error: str | None = None

    @property
    def logprob(self) -> float:
        """The log-probability of the whole continuation: the sum; NaN with an error."""
        return nan if self.error else fsum(self.logprobs)

    @property
    def mean(self) -> float:
        """The log-probability per token; NaN with an error."""
        return nan if self.error else self.logprob / len(self.logprobs)

    @property
    def is_greedy(self) -> bool:
        """Whether greedy search would go on with this continuation."""
        return not self.error and all(self.greedy)


@dataclass
class GenerationStats:
    """Counts and times of one call.

    Attributes:
        seconds: time in its steps, without what the caller did between results.
        steps: forwards of the model.
        prompt_tokens: tokens of all prompts that were run.
        new_tokens: tokens that were generated.
        computed: tokens that went through the model.
        reused: tokens not computed, because they were found as a prefix or shared by a fork.
        preemptions: rows put back because pages ran short.
        offloaded: rows put back whose K and V waited in host memory.
        peak: the pages at the moment when the most were live.
        drafted: tokens computed as drafts.
        accepted: drafted tokens that were right and kept.
        draft_steps: forwards of the draft model.
        draft_seconds: time spent on drafts, these steps included; a part of `seconds`.
        vision_forwards: how often images or audio of a prompt went through the model.
        scored: tokens of continuations that were scored.
        step_cost: an estimate of a step's time, from the latest steps.
    """

    seconds: float = 0.0
    steps: int = 0
    prompt_tokens: int = 0
    new_tokens: int = 0
    computed: int = 0
    reused: int = 0
    preemptions: int = 0
    peak: CacheStats | None = None
    drafted: int = 0
    accepted: int = 0
    draft_steps: int = 0
    draft_seconds: float = 0.0
    offloaded: int = 0
    vision_forwards: int = 0
    scored: int = 0
    step_cost: StepCost = field(default_factory=StepCost, repr=False, compare=False)

    @property
    def drafts(self) -> str:
        """The part of the report on drafts that follows the number of right ones."""
        said = f"{self.drafted:,} drafted tokens were right"
        if self.draft_steps:
            said += f", made in {self.draft_steps:,} steps of the draft model"
            said += f", {self.draft_seconds:.1f} s"
        return said

    def __str__(self) -> str:
        done = self.scored or self.new_tokens
        verb = "scored" if self.scored else "generated"
        speed = done / self.seconds if self.seconds else 0.0
        lines = [
            f"{done:,} tokens {verb} in {self.seconds:.1f} s, {speed:,.1f} a second",
            f"{self.computed:,} tokens computed in {self.steps:,} steps, {self.reused:,} reused",
        ]
        if (peak := self.peak) is not None:
            size = f"{peak.live:,} of {peak.pages:,} pages, {peak.live_bytes / 2**20:,.1f} MiB"
            alone = f"{peak.unshared:,} pages, {peak.unshared_bytes / 2**20:,.1f} MiB"
            lines.append(f"{size} in use at their fullest; without sharing {alone}")
        if self.preemptions:
            where = f", {self.offloaded:,} of them to host memory" if self.offloaded else ""
            lines.append(f"{self.preemptions:,} rows put back because pages ran short{where}")
        if self.drafted:
            lines.append(f"{self.accepted:,} of {self.drafts}")
        if self.vision_forwards:
            lines.append(f"{self.vision_forwards:,} times images or audio went through the model")
        return "\n".join(lines)


def finished(stream: Iterable[T], what: str, arranged: Callable[[list[T]], list[R]]) -> list[R]:
    """Arranges all that a stream gives until Ctrl-C; an error carries what came as its `results`.

    Args:
        what: words for the error's note on what came before it.
    """
    found: list[T] = []
    try:
        with suppress(KeyboardInterrupt):
            found.extend(stream)
    except Exception as error:
        error.__dict__["results"] = arranged(found)
        error.add_note(f"{len(found)} {what}: `results` of this error has them")
        raise
    return arranged(found)


def in_order(results: list[Result]) -> list[Result]:
    """Sorts results by prompt and sample."""
    return sorted(results, key=lambda result: (result.index, result.sample))


def by_choice(scores: list[Score], prompts: int) -> list[list[Score]]:
    """Returns the scores of each prompt, in the order of its continuations."""
    found: list[list[Score]] = [[] for _ in range(prompts)]
    for score in sorted(scores, key=lambda score: score.choice):
        found[score.index].append(score)
    return found
