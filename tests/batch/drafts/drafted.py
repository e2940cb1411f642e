"""Models that draft for others, and what rows get with them and without."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import pytest
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
    return assert_drafts_change_nothing(
        model, rows, {"draft": draft}, sizes, **{"max_new_tokens": 16, **options}
    )


def assert_drafts_change_nothing(
    model: PreTrainedModel,
    rows: Sequence[Any],
    drafting: dict[str, Any],
    sizes: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[GenerationStats, GenerationStats]:
    """Stats of a generator that drafts and of one that does not, with the same results."""
    options, sizes = {"do_sample": False, **options}, sizes or {}
    mine, stats = outcome(model, rows, {**drafting, **sizes}, **options)
    theirs, expected = outcome(model, rows, {**sizes, "verify_width": 1}, **options)
    for a, b in zip(mine, theirs, strict=True):
        assert (a.index, a.sample, a.tokens) == (b.index, b.sample, b.tokens)
        assert (a.finish_reason, a.error) == (b.finish_reason, b.error)
        if b.logprobs is not None:
            assert a.logprobs == pytest.approx(b.logprobs, abs=1e-4)
    assert stats.new_tokens == expected.new_tokens
    assert expected.drafted == expected.accepted == 0
    return stats, expected
