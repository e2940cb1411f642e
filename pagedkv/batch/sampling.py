"""Chooses the next token of every row, by transformers' own rules.

A caller's processors and criteria see one row's ids, `[1, n]`. Transformers' own run once for all
rows that have the same ones, `[B, n]`; if they look at ids, only for rows of one length, so they
never see padding. A row draws from its own generator, exactly as `generate` would for this row
alone after `torch.manual_seed(seed)`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList, StoppingCriteriaList

from pagedkv.ranks import ALONE, Ranks

from .candidates import SORTING, Candidates, among_few, by_all, rules_among_few
from .drawing import Redrawing, Scored, draw, index_of
from .logprobs import logprobs_of

UNSURE = 2**32  # added to the id of a row that may have to be drawn again
NO_TOKEN = "no token can be chosen: every one is forbidden, or a score is no number"


@dataclass
class RowRules:
    """How one row's next token is chosen, and when it ends.

    Attributes:
        limit: tokens its text may reach.
        ends: ids that end it.
        alike: rows with the same value have the same processors, which change every row
            independently of others; None if it is unknown what a processor does.
        processors, criteria: transformers' lists; empty where there is nothing to do.
        generator: the generator it samples with; None if greedy.
        ids: `[1, n]`, a buffer for the text; None if no processor or criterion looks at it.
        by_text: whether a processor looks at ids; an unknown one is taken to do so.
    """

    limit: int
    ends: frozenset[int]
    alike: Any
    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    generator: torch.Generator | None
    ids: Tensor | None
    by_text: bool = False

    def __post_init__(self) -> None:
        self.is_plain = self.generator is None and not self.processors  # the largest logit wins
        by_text = self.by_text or self.alike is None
        self.looks_back = bool(self.processors) and by_text  # a processor reads ids
        self.follows = self.ids is not None or bool(self.criteria)  # each token is read

    def text(self, length: int) -> Tensor | None:
        """Returns the first `length` ids `[1, length]`; None if they are not kept."""
        return None if self.ids is None else self.ids[:, :length]

    def ended(self, token: int, length: int) -> bool:
        """Whether a criterion ends the text at `token`, the last of its `length`."""
        if self.ids is not None:
            if length > self.ids.shape[1]:
                self.ids = torch.cat([self.ids, torch.empty_like(self.ids)], dim=1)
            self.ids[0, length - 1].fill_(token)  # assigning would wait for the device
        return bool(self.criteria) and bool(self.criteria(self.text(length), None).all())


class Chosen:
    """The next token of n rows, on its way from the device to the host.

    Attributes:
        tokens: `[n]` ids on the device.
        errors: why a row got no token, by the row's place; complete once the tokens were read.
        corrected: whether reading the tokens replaced one of them.
    """

    def __init__(
        self,
        tokens: Tensor,
        logprobs: Tensor | None,
        errors: dict[int, str],
        fine: Tensor,
        ranks: Ranks = ALONE,
        redrawing: Redrawing | None = None,
    ) -> None:
        # One copy to the host tells all, without an extra wait: a row without a token sends the
        # complement of an id, an unsure row its id plus `UNSURE`.
        told = tokens
        if redrawing is not None:
            told = torch.where(redrawing.unsure, tokens + UNSURE, tokens)
        told = torch.where(fine, told, ~tokens)
        self._reasons, self._ranks = errors, ranks
        self._redrawing, self.corrected = redrawing, False
        if ranks.size > 1:  # only the first rank's choice counts
            for i in errors:
                told[i] = ~tokens[i]
            errors, told = {}, ranks.follow(told.contiguous())
            tokens = torch.where(told < 0, ~told, told) % UNSURE
            logprobs = None if logprobs is None else ranks.follow(logprobs.contiguous())
        self.tokens, self.errors = tokens, errors
        self._tokens = told.to("cpu", non_blocking=True)
        self._logprobs = None if logprobs is None else logprobs.to("cpu", non_blocking=True)
        # `read` waits for this event, not for what is launched after the copies.
        self._copied = (
            torch.cuda.current_stream(tokens.device).record_event() if tokens.is_cuda else None
        )

    def read(self) -> tuple[list[int], list[float] | None]:
        """Returns ids, and if asked for each log-probability under the model's distribution."""
        if self._copied is not None:
            self._copied.synchronize()
        tokens = self._tokens.tolist()
        logprobs = None if self._logprobs is None else self._logprobs.tolist()
        if unsure := [i for i, token in enumerate(tokens) if token >= UNSURE]:
            self._redraw(unsure, tokens, logprobs)
        wrong = [i for i, token in enumerate(tokens) if token < 0]
        for i in wrong:
            self.errors.setdefault(i, self._reasons.get(i, NO_TOKEN))
            tokens[i] = ~tokens[i]
        if wrong:
            self.errors = self._ranks.share(self.errors)
        return tokens, logprobs

    def _redraw(self, unsure: list[int], tokens: list[int], logprobs: list[float] | None) -> None:
        again = None
        if self._ranks.is_first:
            assert self._redrawing is not None
            again = self._redrawing.tokens(unsure)
        for i, (token, logprob) in zip(unsure, self._ranks.share(again)):
            self.corrected |= token != tokens[i] - UNSURE
            tokens[i] = token
            if logprobs is not None:
                logprobs[i] = logprob


def choose(
    rows: Sequence[Any], logits: Tensor, with_logprobs: bool, ranks: Ranks = ALONE
) -> Chosen:
    """Chooses the next token of every row, without waiting for the device.

    Args:
        rows: n of them, each with its `rules` and the `length` of its text so far.
        logits: `[n, vocab]`.
        ranks: those of the job; the first one's tokens count for all.
    """
    errors: dict[int, str] = {}
    redrawing = None
    if all(row.rules.is_plain for row in rows):
        best, chosen = logits.max(-1)  # of equal ones the first, as argmax, in half its time
        fine = best > -torch.inf
    else:
        chosen, fine, late = _by_rules(rows, logits, errors)
        if late:
            redrawing = Redrawing(late, len(rows), logits.clone() if with_logprobs else None)
    logprobs = None
    if with_logprobs:
        logprobs = logprobs_of(logits, torch.arange(len(chosen), device=chosen.device), chosen)
    return Chosen(chosen, logprobs, errors, fine, ranks, redrawing)


def _by_rules(
    rows: Sequence[Any], logits: Tensor, errors: dict[int, str]
) -> tuple[Tensor, Tensor, list[Scored]]:
    """Returns each row's token, `[n]`, whether it is valid, and the rows drawn from candidates.

    A token is invalid if all were forbidden or a score is NaN. Rows that were drawn from candidates
    may have to be drawn again, which the host cannot know yet.
    """
    order, best, tokens = [], [], []
    drawn: dict[Any, list[Scored]] = {}
    groups = _groups(rows)
    for at in groups:
        group, own = [rows[i] for i in at], logits[index_of(at, logits.device)]
        first = group[0]
        try:
            if first.rules.is_plain:
                top: tuple[Tensor, Tensor] = own.max(-1)
            else:
                scores = own.to(torch.float32, copy=True)
                if first.rules.generator is not None:
                    for part in _scored(at, group, scores):
                        drawn.setdefault(part.kind, []).append(part)
                    continue
                top = _process(group, scores).max(-1)
        except Exception as error:  # whatever a caller's own processor may raise
            if len(at) > 1:  # one row with a NaN may make transformers' own raise
                groups += [[i] for i in at]
                continue
            errors |= dict.fromkeys(at, reason(error, "choosing a token"))
            top = own.max(-1)  # valid ids to go on with; no row gets them
        order += at
        best.append(top[0])
        tokens.append(top[1])
    for parts in drawn.values():
        at = [i for part in parts for i in part.at]
        top = draw([rows[i].rules.generator for i in at], parts)
        order += at
        best.append(top[0])
        tokens.append(top[1])
    chosen, fine = torch.cat(tokens), torch.cat(best) > -torch.inf
    if order != sorted(order):
        back = index_of(sorted(range(len(rows)), key=order.__getitem__), logits.device)
        chosen, fine = chosen[back], fine[back]
    every = (part for parts in drawn.values() for part in parts)
    late = [part for part in every if part.few is not None and not waits(logits.device)]
    return chosen, fine, late


def _scored(at: list[int], group: Sequence[Any], scores: Tensor) -> list[Scored]:
    """Prepares alike rows for drawing, from candidates where these are enough."""
    rules, device = group[0].rules, scores.device
    known = rules_among_few(rules.processors, scores.shape[1]) if device.type in SORTING else None
    if known is None:
        return [Scored(at, _process(group, scores))]
    begin, width = known
    scores, rest = _process(group, scores, begin), rules.processors[begin:]
    few = among_few(rest, scores, width)
    if not waits(device) or not few.unsure.any():
        return [Scored(at, scores, few, rest)]
    sure, unsure = (which.nonzero()[:, 0] for which in (~few.unsure, few.unsure))
    parts = [Scored([at[i] for i in unsure.tolist()], by_all(rest, scores[unsure]))]
    if len(sure):
        few = Candidates(*(each[sure] for each in few))
        parts.append(Scored([at[i] for i in sure.tolist()], scores[sure], few, rest))
    return parts


def waits(device: torch.device) -> bool:
    """Whether the host can read a device's results at no cost, because it always waits for them."""
    return device.type == "cpu"


def reason(error: Exception, what: str) -> str:
    """Describes an error of the caller's own code, for the row that it ends."""
    return f"{type(error).__name__} while {what}" + (f": {error}" if str(error) else "")


def _process(group: Sequence[Any], scores: Tensor, most: int | None = None) -> Tensor:
    """Applies the processors of alike rows to their scores; each has to keep the shape.

    Args:
        most: apply only so many processors; default all.

    Raises:
        TypeError: a processor returned something else than scores.
    """
    rules, shape, device = group[0].rules, scores.shape, scores.device
    ids = rules.text(group[0].length)
    if rules.looks_back and len(group) > 1:
        ids = torch.cat([row.rules.text(row.length) for row in group])
    for processor in rules.processors[:most]:
        scores = processor(ids, scores)
        good = isinstance(scores, Tensor) and scores.is_floating_point()
        if not good or scores.shape != shape or scores.device != device:
            got = type(scores).__name__
            if isinstance(scores, Tensor):
                got = f"{scores.dtype} {list(scores.shape)} on {scores.device}"
            raise TypeError(
                f"logits_processor: expected {type(processor).__name__} to return float scores "
                f"{list(shape)} on {device}, got {got}"
            )
    return scores


def _groups(rows: Sequence[Any]) -> list[list[int]]:
    """Groups the places of rows that are processed together, ascending."""
    groups: dict[Any, list[int]] = {}
    for i, row in enumerate(rows):
        rules = row.rules
        together = (rules.alike, row.length if rules.looks_back else None)
        groups.setdefault(i if rules.alike is None else together, []).append(i)
    return list(groups.values())
