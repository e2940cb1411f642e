"""The scores that `pagedkv score` makes: of choices behind texts, or of the texts themselves."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import exp, fsum, inf
from typing import TYPE_CHECKING, Any

from .answers import OWN
from .errors import UsageError
from .prompts import Prompt
from .text_files import text_of

if TYPE_CHECKING:  # it brings torch along
    from pagedkv.batch.results import Score

LABEL = "label"
BEFORE_A_SPACE = ".,:;?!"  # behind these, letters and digits a word begins with a space


@dataclass(frozen=True)
class Scoring:
    """The choices that are scored, and how one of them becomes a label.

    Attributes:
        choices: the texts to score behind each prompt; empty if the prompts themselves are scored.
        normalize: whether choices are compared by the mean over their tokens, not by the sum.
        label: name of the column that gets the best choice.
    """

    choices: tuple[str, ...] = ()
    normalize: bool = False
    label: str = LABEL

    @property
    def most_tokens(self) -> int:
        """An upper bound of a choice's tokens: one a byte, and one for the space before it."""
        return max((len(choice.encode()) + 1 for choice in self.choices), default=1)

    @property
    def types(self) -> dict[str, str]:
        """The types of a row's own columns by their names, in their order."""
        own = {"logprob": "double", "perplexity": "double", "num_tokens": "int64"}
        if self.choices:
            shares = dict.fromkeys(map(_column, self.choices), "double")
            own = {self.label: "string", "logprob": "double", **shares}
        return {"index": "int64", "sample": "int64", **own, "error": "string"}

    def made_with(self) -> dict[str, Any]:
        """The options that rows are computed with, as JSON values; None where one was not given."""
        return {
            "command": "score",
            "choices": [*self.choices] or None,
            "normalize": self.normalize or None,
            "label": self.label if self.choices else None,
        }

    def require_room(self, prompts: Iterable[Prompt]) -> None:
        """Raises if labels would replace a column, which perhaps has the right labels."""
        taken = [name for name in replace(self, label="").types if name] + [*OWN]
        if self.choices and (not self.label or self.label in taken):
            raise UsageError(
                f"--label: expected a name other than {', '.join(taken)}, got {self.label!r}"
            )
        if self.choices and any(self.label in prompt.columns for prompt in prompts):
            raise UsageError(
                f"--label: the table has a column {self.label!r} already; --label NAME calls the "
                "labels something else"
            )

    def row(self, index: int, scores: list[Score]) -> dict[str, Any]:
        """Makes a row of the scores of a prompt's choices, in their order."""
        row: dict[str, Any] = {"index": index, "sample": 0}
        if wrong := next((score.error for score in scores if score.error), None):
            return row | {"error": wrong}
        if not self.choices:
            (score,) = scores
            return row | {
                "logprob": score.logprob,
                "perplexity": _perplexity(score.mean),
                "num_tokens": len(score.tokens),
            }
        values = [score.mean if self.normalize else score.logprob for score in scores]
        best = values.index(max(values))
        if values[best] == -inf:
            return row | {"error": "no choice has a probability above 0"}
        odds = [exp(value - values[best]) for value in values]
        shares = {_column(c): odd / fsum(odds) for c, odd in zip(self.choices, odds)}
        return row | {self.label: self.choices[best], "logprob": scores[best].logprob} | shares


def choices_of(text: str | None) -> tuple[str, ...]:
    """The choices that --choices gives: with commas between them, or a file's lines.

    Raises:
        UsageError: they are fewer than two, or not different.
    """
    if text is None:
        return ()
    lines = text_of(text[1:], "--choices").split("\n") if text[:1] == "@" else text.split(",")
    found = [line.strip() for line in lines]
    if text[:1] == "@":
        found = [line for line in found if line]
    if "" in found:
        raise UsageError(f"--choices: expected texts with commas between them, got {text!r}")
    if twice := next((one for one in found if found.count(one) > 1), None):
        raise UsageError(f"--choices: expected different ones, got {twice!r} twice")
    if len(found) < 2:
        said = ", ".join(found) or "none"
        raise UsageError(
            f"--choices: expected two or more, such as billing,login,other, or @FILE, got {said}"
        )
    return tuple(found)


def behind(text: str, choice: str) -> str:
    """Returns a choice as it continues a text: with a space if words, or a colon, demand one.

    Scripts that write without spaces are left alone.
    """
    last, first = text[-1:], choice[0]
    ends = last.isascii() and (last.isalnum() or last in BEFORE_A_SPACE)
    return f" {choice}" if last and ends and first.isascii() and first.isalnum() else choice


def _perplexity(mean: float) -> float:
    try:
        return exp(-mean)
    except OverflowError:  # a float ends at exp(709.8)
        return inf


def _column(choice: str) -> str:
    return f"p_{choice}"
