"""The next token of every row, by rules that are transformers' own.

Processors and criteria see one row's ids, `[1, n]`, never padding; processors that do not look at
ids run once for all rows that have the same ones. A row draws from its own generator, exactly as
`generate` would for this row alone after `torch.manual_seed(seed)`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList, StoppingCriteriaList


@dataclass
class RowRules:
    """How one row's next token is chosen, and when it ends.

    Attributes:
        limit: tokens its text may reach.
        ends: ids that end it.
        alike: rows with the same value have the same processors, none of which looks at ids; None
            if one does.
        processors, criteria: transformers' lists; empty where there is nothing to do.
        generator: what it samples with; None if greedy.
        ids: `[1, n]`, room for the text, kept where a processor or criterion looks at it.
    """

    limit: int
    ends: frozenset[int]
    alike: Any
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    generator: torch.Generator | None
    ids: Tensor | None

    def __post_init__(self) -> None:
        self.is_plain = self.generator is None and not self.processors  # the largest logit wins

    def text(self, length: int) -> Tensor | None:
        """The first `length` ids `[1, length]`, where they are kept."""
        return None if self.ids is None else self.ids[:, :length]

    def ended(self, token: int, length: int) -> bool:
        """Whether the text ends with `token`, the last of its `length`."""
        if self.ids is not None:
            if length > self.ids.shape[1]:
                self.ids = torch.cat([self.ids, torch.empty_like(self.ids)], dim=1)
            self.ids[0, length - 1] = token
        if token in self.ends or not self.criteria:
            return token in self.ends
        return bool(self.criteria(self.text(length), None).all())


def choose(
    rows: Sequence[Any], logits: Tensor, with_logprobs: bool
) -> tuple[list[int], list[float] | None, dict[int, str]]:
    """The next token of every row.

    Args:
        rows: n of them, each with its `rules` and the `length` of its text so far.
        logits: `[n, vocab]`.

    Returns:
        n ids; if asked for the log-probability of each under the model's own distribution; and by
        its place why a row could get no token.
    """
    errors: dict[int, str] = {}
    if all(row.rules.is_plain for row in rows):
        chosen = logits.argmax(-1)
    else:
        chosen = torch.zeros(len(rows), dtype=torch.long, device=logits.device)
        for at in _groups([row.rules for row in rows]):
            scores = logits[at].to(torch.float32, copy=True)
            first = rows[at[0]]
            try:
                scores = first.rules.processors(first.rules.text(first.length), scores)
            except Exception as error:  # whatever a caller's own processor may raise
                errors |= dict.fromkeys(at, _reason(error))
                continue
            for i, row_scores in zip(at, scores):
                try:
                    chosen[i] = _draw(rows[i].rules, row_scores)
                except RuntimeError as error:  # every token is forbidden, or a score is no number
                    errors[i] = _reason(error)
    logprobs = None
    if with_logprobs:
        picked = logits.gather(1, chosen[:, None])[:, 0].float()
        logprobs = (picked - logits.float().logsumexp(-1)).tolist()
    return chosen.tolist(), logprobs, errors


def _reason(error: Exception) -> str:
    return f"{type(error).__name__} while choosing a token: {error}"


def _draw(rules: RowRules, scores: Tensor) -> Tensor:
    if rules.generator is None:
        return scores.argmax(-1)
    return torch.multinomial(scores.softmax(-1), 1, generator=rules.generator)[0]


def _groups(rules: list[RowRules]) -> list[list[int]]:
    """Places of rows that are processed together."""
    groups: dict[Any, list[int]] = {}
    for i, row in enumerate(rules):
        groups.setdefault(i if row.alike is None else row.alike, []).append(i)
    return list(groups.values())
