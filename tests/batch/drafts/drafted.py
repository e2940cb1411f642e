"""Models that draft for others, and what rows get with them and without."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from transformers import PreTrainedModel

from pagedkv import Result
from pagedkv.batch.results import GenerationStats
from tests.batch.generating import assert_nothing_held, generator


def noisy(model: PreTrainedModel, scale: float, seed: int = 1) -> PreTrainedModel:
    """Copies a model and adds noise to its weights: it says the same at times."""
    draft, noise = copy.deepcopy(model), torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in draft.parameters():
            weight += torch.randn(weight.shape, generator=noise) * scale * weight.std()
    return draft


def outcome(
    model: PreTrainedModel, rows: Sequence[Any], sizes: dict[str, Any], **options: Any
) -> tuple[list[Result], GenerationStats]:
    """Generates all rows by a generator, which must hold nothing afterwards."""
    with generator(model, **sizes) as batched:
        results = batched.generate(rows, **options)
        assert_nothing_held(batched)
    return results, batched.stats


def assert_draft_changes_nothing(
    model: PreTrainedModel,
    draft: PreTrainedModel,
    rows: Sequence[Any],
    sizes: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[GenerationStats, GenerationStats]:
    """Stats with a draft model and without; everything a row got is compared."""
    options = {"max_new_tokens": 16, "do_sample": False, **options}
    sizes = dict(sizes or {})
    theirs, expected = outcome(model, rows, {**sizes, "verify_width": 1}, **options)
    mine, stats = outcome(model, rows, {**sizes, "draft": draft}, **options)
    for a, b in zip(mine, theirs, strict=True):
        assert (a.index, a.sample, a.tokens) == (b.index, b.sample, b.tokens)
        assert (a.finish_reason, a.error) == (b.finish_reason, b.error)
        if b.logprobs is not None and a.logprobs is not None:
            assert len(a.logprobs) == len(b.logprobs)
            differ = torch.tensor(a.logprobs) - torch.tensor(b.logprobs)
            assert differ.abs().max() < 1e-4
    assert stats.new_tokens == expected.new_tokens
    return stats, expected
