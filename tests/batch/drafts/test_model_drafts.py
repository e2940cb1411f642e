"""A draft model changes how many steps a job takes, and nothing else.

Pages are in debug mode, also those of the draft model, and it raises nothing: a warning fails.
"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LogitsProcessor

from pagedkv.batch.runner import StepRunner
from tests.batch.drafts.drafted import assert_draft_changes_nothing, noisy, outcome
from tests.batch.drawn import any_job
from tests.batch.generating import (
    alone,
    assert_like_alone,
    assert_nothing_held,
    branches,
    generator,
    ragged,
)
from tests.effort import each_value, examples, few, sampled
from tests.hf.tiny import FAMILIES, VARIED, prompts, tiny

pytestmark = pytest.mark.filterwarnings("error:draft")
MODELS = {family: tiny(family) for family in ("llama", "gemma3", "mistral")}
DRAFTS = {family: noisy(model, 0.02) for family, model in MODELS.items()}
SAMPLED = {"do_sample": True, "seed": 3}


@pytest.fixture
def model():
    return MODELS["llama"]


@pytest.fixture
def draft():
    return DRAFTS["llama"]


# ------------------------------------------------------------------ the same tokens


@pytest.mark.parametrize("family", few(FAMILIES, *VARIED[::3]))
def test_every_family_gets_the_tokens_of_generate_alone_and_may_draft(family):
    model = tiny(family)
    sizes = {"draft": noisy(model, 0.02), "step_tokens": 11}
    _, batched = assert_like_alone(model, prompts(5, 23, 1), sizes, max_new_tokens=16)
    assert batched.stats.accepted > 0


@pytest.mark.parametrize(
    ("family", "other"), [("llama", "gemma3"), ("gemma3", "llama"), ("mistral", "gpt2")]
)
def test_a_draft_may_be_of_another_family(family, other):
    stats, _ = assert_draft_changes_nothing(MODELS[family], tiny(other), ragged())
    assert stats.drafted > 0


@sampled
@settings(max_examples=examples(25))
@given(st.sampled_from(sorted(MODELS)), any_job(widths=[2, 3, 8]), st.integers(0, 2))
def test_any_job_gets_the_same_tokens(family, job, which):
    rows, sizes, options = job
    draft = [DRAFTS[family], MODELS[family], DRAFTS["llama"]][which]
    assert_like_alone(MODELS[family], rows, {**sizes, "draft": draft}, **options)


@pytest.mark.parametrize(
    ("family", "options"),
    each_value(
        sorted(MODELS),
        [
            {"do_sample": False, "logprobs": True},
            {**SAMPLED, "num_return_sequences": 3, "logprobs": True},
            {**SAMPLED, "temperature": 0.7, "top_p": 0.8, "repetition_penalty": 1.2},
            {"do_sample": True, "temperature": [0, 0.5, 1.5, 0, 1, 1], "seed": [1, 2, 3, 4, 5, 6]},
        ],
    ),
)
def test_everything_a_row_gets_is_the_same(family, options):
    stats, expected = assert_draft_changes_nothing(
        MODELS[family], DRAFTS[family], ragged(), **options
    )
    assert 0 < stats.accepted <= stats.drafted
    assert stats.steps < expected.steps


def test_int8_pages_are_verified_as_they_are_decoded():
    model = tiny("qwen3")
    sizes = {"kv_format": "int8"}
    draft = noisy(model, 0.02)
    stats, expected = assert_draft_changes_nothing(model, draft, ragged(), sizes, max_new_tokens=24)
    assert stats.steps < expected.steps


def test_sampled_rows_are_distributed_as_the_model_says(model, draft):
    """Each second token is drafted; its counts are compared with the model's distribution."""
    (row,), n = prompts(6), 1500
    options = {"do_sample": True, "top_k": 4, "temperature": 1.5, "max_new_tokens": 3, "seed": 1}
    sizes = {"draft": draft, "max_tokens": 32768, "max_sequences": n, "step_tokens": 4096}
    with generator(model, **sizes) as batched:
        batched.generate([row], **options)  # then samples need not wait for one another's prompt
        results = batched.generate([row], num_return_sequences=n, **options)
        assert batched.stats.drafted == n
        assert batched.stats.accepted > n // 2
    seen = np.array([result.tokens[:2] for result in results])
    with torch.no_grad():
        for first in np.unique(seen[:, 0]):
            followed = seen[seen[:, 0] == first, 1]
            logits = model(torch.cat([row, torch.tensor([first])])[None]).logits[0, -1] / 1.5
            best = logits.topk(4)
            expected = best.values.softmax(-1) * len(followed)
            counts = torch.tensor([(followed == token).sum() for token in best.indices.tolist()])
            assert counts.sum() == len(followed)
            # Three degrees of freedom: 27 is passed once in 200,000 times.
            assert ((counts - expected) ** 2 / expected).sum() < 27


def test_a_row_that_draws_is_drafted_with_the_numbers_that_it_draws(model):
    """A model that drafts for itself is right, whatever the temperature."""
    stats, expected = assert_draft_changes_nothing(
        model, model, ragged(), **SAMPLED, temperature=2.0, max_new_tokens=21
    )
    assert stats.accepted == stats.drafted > 0
    # One more than rows need: a prefix in common is computed first. Then five tokens a step.
    assert (expected.steps, stats.steps) == (1 + 21, 1 + 5)


def test_processors_see_only_what_was_chosen(model, draft):
    """Also those that follow one text, which were made for one row."""
    seen = []

    class Follows(LogitsProcessor):
        def __init__(self):
            self.length = None

        def __call__(self, input_ids, scores):
            n = input_ids.shape[1]
            assert self.length in (None, n - 1)
            self.length = n
            seen.append(tuple(input_ids[0].tolist()))
            return scores

    options = {"processors": lambda index, sample: [Follows()], **SAMPLED, "temperature": 0.3}
    stats, _ = assert_draft_changes_nothing(model, draft, prompts(5, 11), **options)
    assert stats.accepted > 0
    assert all(seen.count(text) == 2 for text in seen)
    assert len(seen) == 2 * stats.new_tokens


def test_what_forbids_tokens_without_a_look_at_the_text_is_kept_to_by_drafts(model):
    row = prompts(5)[0]
    first = alone(model, row, max_new_tokens=12, do_sample=False).sequences[0, 5:].tolist()
    stats, _ = assert_draft_changes_nothing(model, model, [row], suppress_tokens=first[:4])
    assert stats.accepted == stats.drafted > 0


# ------------------------------------------------------------------ what it costs


def test_a_model_that_drafts_for_itself_is_always_right(model):
    stats, expected = assert_draft_changes_nothing(
        model, model, prompts(9), {"verify_width": 8}, max_new_tokens=41
    )
    assert (stats.steps, expected.steps) == (1 + 40 // 8, 41)
    assert stats.accepted == stats.drafted == 35
    assert stats.draft_steps == 5 * 7
    assert 0 < stats.draft_seconds < stats.seconds
    assert "35 of 35 drafted tokens were right, made in 35 steps of the draft model" in str(stats)


def test_a_draft_that_is_always_wrong_is_soon_asked_for_little(model):
    stats, expected = assert_draft_changes_nothing(
        model, noisy(model, 3.0), prompts(9), max_new_tokens=40
    )
    assert stats.steps == expected.steps
    assert 4 <= stats.drafted < 10
    assert stats.computed - expected.computed == stats.drafted


def test_nothing_is_drafted_behind_an_end_token(model):
    row = prompts(9)[0]
    tokens = alone(model, row, max_new_tokens=8, do_sample=False).sequences[0, 9:].tolist()
    at = next(i for i in range(2, 8) if tokens[i] not in tokens[:i])
    stats, _ = assert_draft_changes_nothing(
        model, model, [row], {"verify_width": 12}, eos_token_id=tokens[at], max_new_tokens=30
    )
    assert (stats.drafted, stats.accepted) == (at, at - 1)  # nothing is fed behind the last


def test_a_prefix_of_several_rows_is_computed_once_by_the_draft_model(model):
    rows = branches(3, 5, 2, 6)
    with generator(model, draft=model) as batched:
        batched.generate(rows, max_new_tokens=8, do_sample=False)
        stats = batched._draft.cache.stats()
        assert stats.tokens_computed < 32 + 16 + 4 * 10
        computed = stats.tokens_computed
        batched.generate(rows, max_new_tokens=8, do_sample=False)
        assert batched._draft.cache.stats().tokens_computed - computed < 4 * 10
        assert_nothing_held(batched)


def test_samples_share_their_prompt_in_the_draft_model(model):
    with generator(model, draft=model) as batched:
        batched.generate(
            prompts(40), max_new_tokens=8, num_return_sequences=4, **SAMPLED, temperature=1.0
        )
        assert batched._draft.cache.stats().tokens_computed <= 40 + 4 * 10
        assert_nothing_held(batched)


def test_a_long_prompt_is_drafted_for_once_the_draft_model_has_caught_up(model):
    stats, expected = assert_draft_changes_nothing(
        model, model, prompts(40, 3), {"step_tokens": 8}, max_new_tokens=24
    )
    assert stats.steps < expected.steps
    assert stats.accepted == stats.drafted > 0


@pytest.mark.parametrize("width", [2, 5, 9])
def test_steps_have_no_more_than_the_width(model, monkeypatch, width):
    drafts, logits = [], StepRunner._logits

    def noting(self, batch):
        drafts.extend(map(len, batch.drafts))
        return logits(self, batch)

    monkeypatch.setattr(StepRunner, "_logits", noting)
    outcome(model, prompts(5, 9), {"draft": model, "verify_width": width}, max_new_tokens=30)
    assert max(drafts) == width - 1


# ------------------------------------------------------------------ pages


@pytest.mark.parametrize(
    ("family", "sizes"), each_value(sorted(MODELS), [{}, {"host_tokens": 512}]), ids=str
)
def test_rows_that_are_put_back_draft_again(family, sizes, monkeypatch):
    from pagedkv.batch.row_queues import RowQueues

    def join_for_nothing(self, row, join=RowQueues.join):
        self._share_used = 0.0  # rows are expected to need little, so that pages run short
        join(self, row)

    monkeypatch.setattr(RowQueues, "join", join_for_nothing)
    stats, _ = assert_draft_changes_nothing(
        MODELS[family], DRAFTS[family], prompts(9, 9, 9), {"max_tokens": 64, **sizes},
        max_new_tokens=24,
    )  # fmt: skip
    assert family == "mistral" or stats.preemptions
    assert stats.accepted


def test_nobody_is_put_back_for_the_pages_of_the_draft_model(model):
    rows, options = prompts(9, 9, 9, 9), {"max_new_tokens": 16, "do_sample": False}
    expected, _ = outcome(model, rows, {}, **options)
    with generator(model, draft=model) as batched:
        cache = batched._draft.cache
        held = [cache.add(max_tokens=240), cache.add(max_tokens=240)]
        results = batched.generate(rows, **options)
        assert [r.tokens for r in results] == [r.tokens for r in expected]
        assert batched.stats.preemptions == 0
        assert 0 < batched.stats.accepted < 3 * 16  # some rows draft, there is no room for all
        held.append(cache.add(max_tokens=32))
        assert [r.tokens for r in batched.generate(rows, **options)] == [r.tokens for r in expected]
        assert batched.stats.drafted == 0
        cache.free(held)
        assert_nothing_held(batched)


def test_a_text_that_the_draft_model_is_too_short_for_goes_on_without(model):
    short = tiny("gpt2", n_positions=24)
    stats, _ = assert_draft_changes_nothing(model, short, prompts(5, 30), max_new_tokens=40)
    assert stats.drafted > 0


def test_salts_keep_prefixes_apart_in_the_draft_model_too(model):
    (row,) = prompts(40)
    with generator(model, draft=model) as batched:
        computed = []
        for salt in (b"a", b"b", b"a"):
            before = batched._draft.cache.stats().tokens_computed
            batched.generate([row], max_new_tokens=4, do_sample=False, salt=salt)
            computed.append(batched._draft.cache.stats().tokens_computed - before)
    assert min(computed[:2]) >= 40
    assert computed[2] < 10


def test_images_are_not_drafted_for(draft):
    from tests.hf.images import pictured, seeing_model

    seeing = seeing_model("qwen2_5_vl")
    other = tiny("llama", vocab_size=seeing.config.get_text_config().vocab_size)
    for row, drafts in ((pictured(seeing, prompts(4)[0]), False), (prompts(7)[0], True)):
        stats, _ = assert_draft_changes_nothing(seeing, other, [row], max_new_tokens=6)
        assert bool(stats.drafted) == drafts
