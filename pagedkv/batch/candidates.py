"""The few tokens that `top_k` leaves, among which the rules behind it cost next to nothing.

The rules stay transformers' own: they are called with the scores of candidates in place of all.
What they then leave is the same but for the rounding of sums, in which each candidate's
probability is divided by another number in its last bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import generation

# These look at scores alone, and at one that is -inf only as at nothing.
AMONG_FEW = (
    generation.EpsilonLogitsWarper,
    generation.EtaLogitsWarper,
    generation.MinPLogitsWarper,
    generation.TemperatureLogitsWarper,
    generation.TopKLogitsWarper,
    generation.TopPLogitsWarper,
)
# Candidates for each token that `top_k` asks for, since more may have the score of the last of
# them; and the fewest. A card sorts more than 32 so that equal ones keep their order, as it does
# a whole vocabulary.
SPARE, FEWEST = 4, 128
SORTING = "cpu", "cuda"  # devices of which it is known how they sort


class Candidates(NamedTuple):
    """The scores that rules have left of m rows.

    Attributes:
        scores, ids: `[m, K]` of the candidates, in the order of the vocabulary.
        unsure: `[m]`, whether all scores might have left others.
    """

    scores: Tensor
    ids: Tensor
    unsure: Tensor


def rules_among_few(processors: Sequence[Any], vocab: int) -> tuple[int, int] | None:
    """From which processor on candidates are enough, and how many; None if all are needed."""
    kinds = [type(processor) for processor in processors]
    if generation.TopKLogitsWarper not in kinds:
        return None
    begin = top = kinds.index(generation.TopKLogitsWarper)
    for processor in processors[top:]:
        known = type(processor) in AMONG_FEW
        if not known or getattr(processor, "filter_value", -torch.inf) != -torch.inf:
            return None
    while begin and kinds[begin - 1] is generation.TemperatureLogitsWarper:
        begin -= 1  # it keeps the order
    width = max(FEWEST, SPARE * processors[top].top_k)
    return (begin, width) if SPARE * width <= vocab else None


def by_all(processors: Sequence[Any], scores: Tensor) -> Tensor:
    """Returns what such processors leave of scores `[m, vocab]`."""
    for processor in processors:
        scores = processor(None, scores)
    return scores


def among_few(processors: Sequence[Any], scores: Tensor, width: int) -> Candidates:
    """Returns what processors leave of scores `[m, vocab]`, computed among `width` of each row.

    A row is unsure if `top_k` leaves all candidates, as others may have the same score. On a
    processor it is, too, if rules behind cut some of equal scores: which of them depends on how
    many are sorted, there.
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
