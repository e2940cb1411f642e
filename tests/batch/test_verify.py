"""Guessed tokens change how many steps a job takes, and nothing else.

Pages are in debug mode: a rejected token that anything still reads is NaN and would show.
"""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LogitsProcessor, StoppingCriteria

from pagedkv import PagedKVCache
from pagedkv.batch.drafts.prompt_lookup import PromptLookup
from pagedkv.batch.options import GenerationOptions
from pagedkv.batch.rows import Outcome, Row
from pagedkv.batch.runner import StepRunner
from pagedkv.batch.scheduler import Scheduler
from pagedkv.hf import PagedCache
from tests.batch.drafts.drafted import assert_drafts_change_nothing, outcome
from tests.batch.drawn import any_job
from tests.batch.generating import assert_like_alone, assert_nothing_held, failing, generator
from tests.batch.generating import tokens_alone as alone
from tests.cases import one_group
from tests.contents import Boom
from tests.effort import each_value, examples, few, sampled
from tests.hf.tiny import FAMILIES, VARIED, named, prompts, tiny

WIDE = {"verify_width": 8}
MODELS = {family: tiny(family) for family in ("llama", "gemma3", "mistral")}


class Cycle(LogitsProcessor):
    """Makes every text go round in the tokens `2 .. 2 + length`."""

    def __init__(self, length: int = 5) -> None:
        self.length = length

    def __call__(self, input_ids, scores):
        wanted = 2 + (input_ids[:, -1:] - 1) % self.length
        return scores.scatter_add(1, wanted, torch.full(wanted.shape, 1e3))


@pytest.fixture(scope="module")
def model():
    return tiny()


@pytest.fixture
def oracle(monkeypatch):
    """Guesses are told what is right, or that and some that are wrong."""
    right = SimpleNamespace(texts=[], wrong_after=1 << 30)

    def draft(self, tokens, most):
        text = [*self._text[: self._begin].tolist(), *tokens]
        for whole in right.texts:
            if whole[: len(text)] == text:
                ids = np.array(whole[len(text) :][:most], np.int32)
                ids[right.wrong_after :] = 2 + (ids[right.wrong_after :] - 1) % 90
                return ids
        return np.empty(0, np.int32)

    monkeypatch.setattr(PromptLookup, "draft", draft)
    return right


@pytest.fixture
def steps_made(monkeypatch):
    """Notes of every step: tokens, rows, drafts of each decoding row."""
    made = []
    logits = StepRunner._logits

    def noting(self, batch):
        drafts = [len(draft) for draft in batch.drafts]
        made.append((batch.step.num_tokens, len(batch.rows), drafts))
        return logits(self, batch)

    monkeypatch.setattr(StepRunner, "_logits", noting)
    return made


def assert_width_changes_nothing(model, rows, sizes=None, **options):
    """Stats with drafts and without; everything a row got is compared."""
    return assert_drafts_change_nothing(
        model, rows, WIDE, sizes, **{"max_new_tokens": 12, **options}
    )


# ------------------------------------------------------------------ the same tokens


@pytest.mark.parametrize("family", few(FAMILIES, *VARIED[::2]))
def test_every_family_gets_the_tokens_of_generate_alone(family):
    rows = [*prompts(5, 23, 1), torch.tensor([3, 4, 5, 6] * 5)]
    _, batched = assert_like_alone(
        tiny(family), rows, {**WIDE, "step_tokens": 11}, max_new_tokens=16
    )
    assert batched.stats.drafted > 0


@sampled
@settings(max_examples=examples(20))
@given(st.sampled_from(sorted(MODELS)), any_job(widths=[2, 3, 8, 32]))
def test_any_job_gets_the_same_tokens(family, job):
    rows, sizes, options = job
    assert_like_alone(MODELS[family], rows, sizes, **options)


@pytest.mark.parametrize(("family", "wrong_after"), each_value(sorted(MODELS), [0, 1, 3, 1 << 30]))
def test_right_and_wrong_drafts_in_one_step_are_told_apart(oracle, family, wrong_after):
    """Rejected tokens leave nothing in windows without rollback, whatever page they began."""
    model, rows = MODELS[family], prompts(5, 23)
    new = 20
    oracle.texts = [
        [*row.tolist(), *alone(model, row, max_new_tokens=new, do_sample=False)] for row in rows
    ]
    oracle.wrong_after = wrong_after
    for page_size in (1, 4):
        _, batched = assert_like_alone(
            model, rows, {**WIDE, "page_size": page_size}, max_new_tokens=new
        )
        assert batched.cache.config.rollback == 0
        most = 1 + min(wrong_after, 7)
        assert batched.stats.steps == 1 + -(-(new - 1) // most)
        assert batched.stats.accepted == sum(new - 1 - -(-(new - 1) // most) for _ in rows)


def test_sampling_draws_the_same_numbers_and_drafts_are_right_at_times(model):
    stats, _ = assert_width_changes_nothing(
        model, prompts(5, 23), do_sample=True, temperature=0.05, seed=[3, 4],
        max_new_tokens=30, num_return_sequences=3, logprobs=True,
    )  # fmt: skip
    assert 0 < stats.accepted < stats.drafted


def test_a_generator_has_drawn_once_for_each_token_that_was_chosen(model, monkeypatch):
    made = []
    rules = GenerationOptions.rules

    def noting(self, *args):
        made.append(rules(self, *args))
        return made[-1]

    monkeypatch.setattr(GenerationOptions, "rules", noting)
    states = []
    for width in (1, 8):
        made.clear()
        outcome(
            model, [torch.tensor([3, 4] * 6)], {"verify_width": width}, do_sample=True, seed=1,
            max_new_tokens=30, logits_processor=[Cycle()],
        )  # fmt: skip
        states.append(made[0].generator.get_state())
    assert torch.equal(*states)


def test_processors_see_the_text_up_to_each_token(model):
    seen = []

    class NeverAfterItself(LogitsProcessor):
        def __call__(self, input_ids, scores):
            seen.append(tuple(input_ids[0].tolist()))
            return scores.scatter(1, input_ids[:, -1:], -torch.inf)

    options = {"logits_processor": [Cycle(), NeverAfterItself()], "max_new_tokens": 20}
    stats, _ = assert_width_changes_nothing(model, prompts(5, 11), **options)
    assert stats.accepted > 10
    # Each text was seen twice, once with drafts and once without, never one that was not chosen.
    assert len(seen) == 2 * 2 * 20
    assert all(seen.count(text) == 2 for text in seen)


def test_a_processor_that_raises_behind_a_right_draft_ends_its_row_alone(model):
    class TooLong(LogitsProcessor):
        def __call__(self, input_ids, scores):
            if input_ids.shape[1] == 25:
                raise ValueError("too long")
            return scores

    rows = [torch.tensor([2, 3, 4, 5, 6] * 3), torch.tensor([2, 3, 4, 5, 6] * 6)]
    stats, _ = assert_width_changes_nothing(
        model, rows, logits_processor=[Cycle(), TooLong()], max_new_tokens=20, logprobs=True
    )
    assert stats.accepted > 15


# ------------------------------------------------------------------ where a text ends


@pytest.mark.parametrize("new", [1, 2, 3, 8, 9, 10, 14])
def test_a_limit_within_a_right_draft_is_kept(model, new):
    row = torch.tensor([2, 3, 4, 5, 6] * 3)
    _, stats = outcome(
        model, [row], WIDE, max_new_tokens=new, do_sample=False, logits_processor=[Cycle()]
    )
    assert stats.new_tokens == new
    assert stats.steps == 1 + -(-(new - 1) // 8)
    assert stats.computed == len(row) + new - 1  # nothing is drafted beyond the limit
    assert_width_changes_nothing(
        model, [row], max_new_tokens=new, logits_processor=[Cycle()], logprobs=True
    )


@pytest.mark.parametrize("length", range(22, 26))
def test_a_text_that_fills_the_cache_within_a_draft_ends_as_ever(model, length):
    sizes = {"max_sequence_length": length}
    row = torch.tensor([2, 3, 4, 5, 6] * 3)
    stats, _ = assert_width_changes_nothing(
        model, [row], sizes, max_new_tokens=30, logits_processor=[Cycle()]
    )
    assert stats.accepted > 0


def test_an_end_token_within_a_right_draft_ends_the_row(model, oracle):
    row = prompts(9)[0]
    tokens = alone(model, row, max_new_tokens=20, do_sample=False)
    oracle.texts = [[*row.tolist(), *tokens]]
    ends = [token for i, token in enumerate(tokens) if i > 1 and token not in tokens[:i]]
    assert len(ends) > 8
    for end in ends[::3]:  # at its beginning, within it, and at its end
        stats, _ = assert_width_changes_nothing(
            model, [row, *prompts(4)], max_new_tokens=20, eos_token_id=end, logprobs=True
        )
        assert stats.accepted > 0


def test_a_criterion_that_looks_at_the_text_ends_it_within_a_draft(model):
    class Third(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return torch.tensor([input_ids.shape[1] % 23 == 0])

    rows = [torch.tensor([2, 3, 4, 5, 6] * 3), torch.tensor([3, 4, 5])]
    stats, _ = assert_width_changes_nothing(
        model, rows, max_new_tokens=40, stopping_criteria=[Third()], logits_processor=[Cycle()]
    )
    assert stats.accepted > 10
    assert stats.new_tokens == (23 - 15) + (23 - 3)


# ------------------------------------------------------------------ what it costs and saves


def test_a_text_that_repeats_takes_few_steps(model):
    row = torch.tensor([2, 3, 4, 5, 6] * 4)
    stats, expected = assert_width_changes_nothing(
        model, [row], max_new_tokens=41, logits_processor=[Cycle()]
    )
    assert expected.steps == 41
    assert stats.steps == 1 + 40 / 8
    assert stats.accepted == stats.drafted == 35


def test_a_text_without_repetition_is_fed_one_token_a_step(model, steps_made):
    class NeverTwice(LogitsProcessor):
        def __call__(self, input_ids, scores):
            return scores.scatter(1, input_ids, -torch.inf)

    stats, expected = assert_width_changes_nothing(
        model, [torch.arange(2, 12)], logits_processor=[NeverTwice()]
    )
    assert stats.drafted == 0
    assert (stats.steps, stats.computed) == (expected.steps, expected.computed)
    assert all(tokens == rows for tokens, rows, _ in steps_made if tokens < 10)


@pytest.mark.parametrize("most", ["step_tokens", "max_step_tokens"])
def test_drafts_never_exceed_what_a_step_may_compute(model, steps_made, most):
    rows = [torch.tensor([2, 3, 4, 5, 6] * n) for n in (3, 4, 7, 2)]
    stats, _ = assert_width_changes_nothing(
        model, rows, {most: 11}, max_new_tokens=[5, 30, 12, 9], logits_processor=[Cycle()]
    )
    assert max(tokens for tokens, _, _ in steps_made) == 11
    assert stats.accepted > 10
    # A prompt that waits for its turn is not held up: it got its share before the drafts.
    assert any(sum(drafts) and tokens == 11 for tokens, _, drafts in steps_made)


def test_a_prompt_is_not_held_up_by_drafts(model):
    early, late = torch.tensor([2, 3, 4, 5, 6] * 3), prompts(60)[0]
    steps = []
    for width in (1, 8):
        with generator(model, step_tokens=16, verify_width=width) as batched:
            stream = batched.stream(
                [early, late], max_new_tokens=[60, 1], logits_processor=[Cycle()]
            )
            assert next(stream).index == 1
            steps.append(batched.stats.steps)
            stream.close()
    assert steps[0] == steps[1]


def test_drafts_are_dropped_before_anybody_is_put_back(model):
    """Rows that just fit: drafts of one would need the pages of the others."""
    rows = [torch.tensor([2 + i, 3, 4, 5, 6] * 3) for i in range(4)]
    sizes = {"max_tokens": 4 * (15 + 5), "page_size": 1}
    stats, expected = assert_width_changes_nothing(
        model, rows, sizes, max_new_tokens=6, logits_processor=[Cycle()]
    )
    assert expected.preemptions == stats.preemptions == 0
    assert stats.steps < expected.steps


def test_no_row_is_put_back_for_the_pages_of_a_draft():
    cache = PagedKVCache(one_group(max_tokens=12, page_size=1), device="cpu", debug=True)
    jobs = Scheduler(cache, 64, verify_width=8)
    row = Row(np.array([1, 2, 1, 2, 1, 2], np.int32), limit=100)
    jobs.rows.waiting.append(row)
    jobs.rows._share_used = 0.01  # little is set aside
    first = jobs.schedule()
    cache.commit(first.step, layers=())
    jobs.book(Outcome(first, first.num_fed))
    row.tokens.append(1)
    row.length += 1
    other = cache.add(max_tokens=4)
    assert [len(draft) for draft in jobs._compose().drafts] == [4]
    batch = jobs.schedule()
    assert (batch.step.num_tokens, batch.drafts, jobs.stats.preemptions) == (1, [], 0)
    cache.commit(batch.step, layers=())
    cache.free([other, row.seq])
    cache.check()


def test_what_was_rejected_is_not_found(model, oracle, monkeypatch):
    """The next prompt is the rejected text itself: only what was accepted is there."""
    row = prompts(9)[0]
    tokens = alone(model, row, max_new_tokens=20, do_sample=False)
    oracle.texts, oracle.wrong_after = [[*row.tolist(), *tokens]], 2
    drafted, told = [], PromptLookup.draft

    def noting(self, *args):
        drafted.append(told(self, *args).tolist())
        return np.array(drafted[-1], np.int32)

    monkeypatch.setattr(PromptLookup, "draft", noting)
    with generator(model, **WIDE) as batched:
        batched.generate([row], max_new_tokens=6, do_sample=False)
        assert drafted[0][:2] == tokens[1:3]
        assert drafted[0][2] != tokens[3]
        rejected = [*row.tolist(), tokens[0], *drafted[0], 2]
        kept = [*row.tolist(), *tokens]
        for text, found in ((rejected, 9 + 3), (kept, 9 + 5)):
            (result,) = batched.generate([text], max_new_tokens=1, do_sample=False)
            assert result.cached_tokens == found
        assert_nothing_held(batched)


# ------------------------------------------------------------------ what can go wrong


@pytest.mark.parametrize("at_call", range(4))
def test_a_forward_that_fails_leaves_nothing_behind(model, at_call):
    rows = [torch.tensor([2, 3, 4, 5, 6] * 3), prompts(5)[0]]
    options = {"max_new_tokens": 20, "do_sample": False, "logits_processor": [Cycle()]}
    with generator(model, **WIDE) as batched:
        with failing(model, at_call, Boom()), pytest.raises(Boom):
            batched.generate(rows, **options)
        assert_nothing_held(batched)


@pytest.mark.parametrize("error", [Boom, KeyboardInterrupt])
def test_a_criterion_that_fails_within_a_draft_leaves_nothing_behind(model, error):
    class Broken(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            if input_ids.shape[1] == 20:
                raise error
            return torch.tensor([False])

    options = {"stopping_criteria": [Broken()], "logits_processor": [Cycle()]}
    with generator(model, **WIDE) as batched:
        results = batched.generate(
            [torch.tensor([2, 3, 4, 5, 6] * 3)], max_new_tokens=20, **options
        )
        if error is Boom:
            assert results[0].error == "Boom while looking whether the text ends"
            assert results[0].tokens == [2, 3, 4, 5, 6]
        else:
            assert results == []
            assert batched.stats.steps == 1  # it failed while the second step was open
        assert_nothing_held(batched)


def test_a_forward_in_a_processor_does_not_take_back_the_step_it_is_called_from(model):
    """While tokens are drafted the step is open when the processors run."""
    row, options = torch.tensor([2, 3, 4, 5, 6] * 3), {"max_new_tokens": 8, "do_sample": False}

    def calls(ids, scores):
        with PagedCache(model, cache=batched.cache) as cache, torch.no_grad():
            model(ids, **named(cache))
        return scores

    with generator(model, verify_width=4, max_sequences=4) as batched:
        (refused,) = batched.generate([row], logits_processor=[calls, Cycle()], **options)
        assert (
            "OpenStepError while choosing a token: a forward was called inside an open step"
            in refused.error
        )
        assert_nothing_held(batched)
        (result,) = batched.generate([row], logits_processor=[Cycle()], **options)
    assert result.tokens == [2, 3, 4, 5, 6, 2, 3, 4]


def test_nothing_runs_ahead_of_drafts(model, monkeypatch):
    monkeypatch.setattr(StepRunner, "_read", None)
    row = torch.tensor([2, 3, 4, 5, 6] * 3)
    with generator(model, **WIDE) as batched:
        batched._ahead = True
        batched.generate([row], max_new_tokens=20, logits_processor=[Cycle()])
        assert batched.stats.accepted > 10
        batched.generate([torch.arange(2, 12)], max_new_tokens=3)


@pytest.mark.parametrize("width", [0, -1, True, 2.0, "4"])
def test_a_width_that_is_no_positive_int_is_refused(model, width):
    with pytest.raises(ValueError, match="verify_width: expected a positive int"):
        generator(model, verify_width=width)
