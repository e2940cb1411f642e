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
        self.looks_back = bool(self.processors) and self.alike is None  # at ids, to choose the next

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


class Chosen:
    """The next token of n rows, on its way from the device to the host.

    Attributes:
        tokens: `[n]` ids on the device.
        errors: by its place why a row could get no token.
    """

    def __init__(self, tokens: Tensor, logprobs: Tensor | None, errors: dict[int, str]) -> None:
        self.tokens, self.errors = tokens, errors
        self._tokens = tokens.to("cpu", non_blocking=True)
        self._logprobs = None if logprobs is None else logprobs.to("cpu", non_blocking=True)
        # What is launched behind the copies must not be waited for.
        self._copied = (
            torch.cuda.current_stream(tokens.device).record_event() if tokens.is_cuda else None
        )

    def read(self) -> tuple[list[int], list[float] | None]:
        """The ids, and if asked for the log-probability of each under the model's distribution."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._tokens.tolist(), None if self._logprobs is None else self._logprobs.tolist()


def choose(rows: Sequence[Any], logits: Tensor, with_logprobs: bool) -> Chosen:
    """The next token of every row, without waiting for the device.

    Args:
        rows: n of them, each with its `rules` and the `length` of its text so far.
        logits: `[n, vocab]`.
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
        logprobs = picked - logits.float().logsumexp(-1)
    return Chosen(chosen, logprobs, errors)


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
