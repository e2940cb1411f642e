"""Applies `top_k` and the rules behind it to few tokens, where they cost next to nothing.

The rules stay transformers' own: they are called with the scores of candidates instead of all.
They then leave the same, but for rounding: a sum over fewer probabilities may differ in its last
bit, and each candidate's probability is divided by it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import generation

# These look at scores alone, and ignore those that are -inf.
AMONG_FEW = (
    generation.EpsilonLogitsWarper,
    generation.EtaLogitsWarper,
    generation.MinPLogitsWarper,
    generation.TemperatureLogitsWarper,
    generation.TopKLogitsWarper,
    generation.TopPLogitsWarper,
)
# There are SPARE candidates for each token that `top_k` asks for, since others may have the same
# score as the last of these. There are at least FEWEST, since a card sorts more than 32 scores so
# that equal ones keep their order, as it does a whole vocabulary.
SPARE, FEWEST = 4, 128
SORTING = "cpu", "cuda"  # devices whose order of equal scores is known


class Candidates(NamedTuple):
    """The candidates of m rows, and the scores that rules have left them.

    Attributes:
        scores, ids: `[m, K]` of the candidates, in the order of the vocabulary.
        unsure: `[m]`, whether rules over all scores might have left other tokens.
    """

    scores: Tensor
    ids: Tensor
    unsure: Tensor


def rules_among_few(processors: Sequence[Any], vocab: int) -> tuple[int, int] | None:
    """Returns the first processor that candidates suffice for, and their number; None if none."""
    kinds = [type(processor) for processor in processors]
    if generation.TopKLogitsWarper not in kinds:
        return None
    begin = top = kinds.index(generation.TopKLogitsWarper)
    for processor in processors[top:]:
        known = type(processor) in AMONG_FEW
        if not known or getattr(processor, "filter_value", -torch.inf) != -torch.inf:
            return None
    while begin and kinds[begin - 1] is generation.TemperatureLogitsWarper:
        begin -= 1  # temperature keeps the order of scores
    width = max(FEWEST, SPARE * processors[top].top_k)
    return (begin, width) if SPARE * width <= vocab else None


def by_all(processors: Sequence[Any], scores: Tensor) -> Tensor:
    """Returns the scores `[m, vocab]` that such processors leave."""
    for processor in processors:
        scores = processor(None, scores)
    return scores


def among_few(processors: Sequence[Any], scores: Tensor, width: int) -> Candidates:
    """Returns what processors leave of the `width` best scores of each row of `[m, vocab]`.

    A row is unsure if `top_k` leaves all candidates, as others may have the same score. On a CPU
    it is also unsure if a later rule drops some of several equal scores: there the number of sorted
    scores decides which of them.
    """
    ids = scores.topk(width, sorted=False).indices.sort(-1).values
    few, left = scores.gather(1, ids), None
    for processor in processors:
        few = processor(None, few)
        if left is None and type(processor) is generation.TopKLogitsWarper:
            left = few
    assert left is not None
    unsure = (left > -torch.inf).all(-1)
    if not scores.is_cuda:
        kept = few > -torch.inf
        least = left.masked_fill(~kept, torch.inf).amin(-1)
        unsure |= least == left.masked_fill(kept, -torch.inf).amax(-1)
    return Candidates(few, ids, unsure)
