"""Draws a token for each row by its scores: by all of them, or by those of its candidates.

Rows draw as `torch.multinomial` does, to the bit: its sample of one is `argmax(p / q)` with q
exponential. It is not called itself, because it waits for the device, and because a row whose
probabilities are invalid would end the process's work on a card: here that row's `p / q` is NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pagedkv.kernels.sending import sent

from .candidates import Candidates, by_all
from .logprobs import logprobs_of


@dataclass
class Scored:
    """Rows that are ready to be drawn for.

    Attributes:
        at: their places among all rows, ascending.
        scores: `[m, vocab]`; where there are candidates, before the rules applied only to these.
        few: their candidates.
        rules: the rules that were applied only to candidates.
        q: `[m, vocab]`, the exponential numbers they were drawn with; kept to draw rows again.
    """

    at: list[int]
    scores: Tensor
    few: Candidates | None = None
    rules: Sequence[Any] = ()
    q: Tensor | None = None

    @property
    def kind(self) -> Any:
        """Parts of one kind are drawn together."""
        return self.scores.dtype, 0 if self.few is None else self.few.ids.shape[1]


def draw(generators: Sequence[torch.Generator], parts: Sequence[Scored]) -> tuple[Tensor, Tensor]:
    """Draws for rows of one kind; returns the largest `p / q` and its id for each row, `[n]` each.

    Args:
        generators: one for each of the n rows of all parts.
    """
    few = [part.few for part in parts if part.few is not None]
    scores = _joined([part.scores for part in parts] if not few else [one.scores for one in few])
    probs = scores.softmax(-1)
    q = _exponentials(generators, parts[0].scores)
    if not few:
        top = torch.div(probs, q, out=q).max(-1)
        return top[0], top[1]
    ids = _joined([one.ids for one in few])
    best, at = torch.div(probs, q.gather(1, ids)).max(-1, keepdim=True)
    for part, own in zip(parts, q.split([len(part.at) for part in parts])):
        part.q = own
    return best[:, 0], ids.gather(1, at)[:, 0]


class Redrawing:
    """Draws again, by all scores, for rows whose candidates turn out to be too few.

    Args:
        parts: rows with candidates, after they were drawn.
        logits: `[n, vocab]` of all rows, if log-probabilities are asked for.

    Attributes:
        unsure: `[n]`, on the device: the rows that have to be drawn again.
    """

    def __init__(self, parts: Sequence[Scored], rows: int, logits: Tensor | None) -> None:
        device = parts[0].scores.device
        self.unsure = torch.zeros(rows, dtype=torch.bool, device=device)
        for part in parts:
            assert part.few is not None
            self.unsure[index_of(part.at, device)] = part.few.unsure
        self._parts, self._logits = parts, logits

    def tokens(self, places: Sequence[int]) -> list[tuple[int, float | None]]:
        """Draws the rows at these places again; returns each token and its log-probability."""
        return [self._token(place) for place in places]

    def _token(self, place: int) -> tuple[int, float | None]:
        (part,) = (part for part in self._parts if place in part.at)
        assert part.q is not None
        own = slice(i := part.at.index(place), i + 1)
        scores = by_all(part.rules, part.scores[own])
        token = (scores.softmax(-1) / part.q[own]).argmax(-1)
        if self._logits is None:
            return int(token), None
        logits = self._logits[place : place + 1]
        return int(token), float(logprobs_of(logits, torch.zeros_like(token), token))


def index_of(at: list[int], device: torch.device) -> Any:
    """Makes an index of places, without waiting for the device."""
    if at == list(range(at[0], at[0] + len(at))):
        return slice(at[0], at[0] + len(at))
    return sent(np.array(at), device)


def _joined(tensors: list[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)


def _exponentials(generators: Sequence[torch.Generator], like: Tensor) -> Tensor:
    """`[n, vocab]` exponential numbers, each row from its generator.

    A card makes them on a stream of their own, while the forward computes the logits that they are
    for: they take one launch a row, and depend on nothing.
    """
    shape = len(generators), like.shape[1]
    if not like.is_cuda:
        return _fill(torch.empty(shape, dtype=like.dtype, device=like.device), generators)
    now, beside = torch.cuda.current_stream(like.device), _stream(like.device)
    with torch.cuda.stream(beside):
        q = _fill(torch.empty(shape, dtype=like.dtype, device=like.device), generators)
    now.wait_stream(beside)
    q.record_stream(now)
    return q


def _fill(q: Tensor, generators: Sequence[torch.Generator]) -> Tensor:
    for row, generator in zip(q, generators):
        row.exponential_(1, generator=generator)
    return q


@cache
def _stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)
