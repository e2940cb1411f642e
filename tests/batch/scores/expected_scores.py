"""Expected scores: by a plain forward of a context and a continuation, in float64."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest
import torch
from transformers import PreTrainedModel

from pagedkv.batch.results import Score
from tests.hf.tiny import VOCAB

Scores = list[list[Score]]


def continuations(*lengths: int, seed: int = 0) -> list[list[int]]:
    """Random ids, one continuation for each length."""
    made = torch.Generator().manual_seed(seed)
    return [torch.randint(2, VOCAB, (n,), generator=made).tolist() for n in lengths]


class Exact:
    """A model's log-probabilities in float64, one forward for each continuation."""

    def __init__(self, model: PreTrainedModel, dtype: torch.dtype = torch.float64) -> None:
        self.model = copy.deepcopy(model).to(dtype)
        self.model.config._attn_implementation = "eager"
        self.model.config._experts_implementation = "eager"  # the other takes no float64

    @torch.no_grad()
    def __call__(self, context: Sequence[int], given: Sequence[int]) -> tuple[list[float], ...]:
        """Log-probability and the lead of the likeliest token, of each token given."""
        ids = torch.tensor([[*context, *given]])
        logprobs = self.model(ids).logits[0, len(context) - 1 : -1].log_softmax(-1)
        own = logprobs.gather(1, torch.tensor(list(given))[:, None])[:, 0]
        return own.tolist(), (logprobs.max(-1).values - own).tolist()


def assert_exact(
    model: PreTrainedModel, contexts: Sequence, each: Sequence, scores: Scores, most: float = 2e-5
) -> None:
    """Every score is that of a plain forward, token by token."""
    exact = Exact(model)
    for i, (context, own) in enumerate(zip(contexts, each, strict=True)):
        for k, (given, score) in enumerate(zip(own, scores[i], strict=True)):
            assert (score.index, score.choice, score.error) == (i, k, None)
            assert score.tokens == given
            expected, lead = exact(context, given)
            assert score.logprobs == pytest.approx(expected, abs=most, rel=0)
            assert all(greedy == (ahead <= 0) for greedy, ahead in zip(score.greedy, lead))


def error_of_plain(model: PreTrainedModel, contexts: Sequence, each: Sequence) -> float:
    """How far the log-probability of a token is from float64 in a plain float32 forward."""
    exact, plain = Exact(model), Exact(model, torch.float32)
    pairs = [(context, given) for context, own in zip(contexts, each, strict=True) for given in own]
    return max(
        abs(x - y)
        for context, given in pairs
        for x, y in zip(exact(context, given)[0], plain(context, given)[0], strict=True)
    )


def largest_difference(some: Scores, others: Scores) -> float:
    """Between the log-probability of a token here and there."""
    pairs = [(a, b) for own, theirs in zip(some, others, strict=True) for a, b in zip(own, theirs)]
    assert [(a.index, a.choice, a.tokens, a.error) for a, _ in pairs] == [
        (b.index, b.choice, b.tokens, b.error) for _, b in pairs
    ]
    return max(abs(x - y) for a, b in pairs for x, y in zip(a.logprobs, b.logprobs, strict=True))
