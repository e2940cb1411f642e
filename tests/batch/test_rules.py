"""Draws of rows, and transformers' rules row by row."""

import numpy as np
import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria
from transformers.generation import SuppressTokensLogitsProcessor, TopKLogitsWarper

from tests.batch.generating import (
    alone,
    assert_like_alone,
    assert_nothing_held,
    assert_same,
    behind_the_best,
    generator,
    tokens_alone,
)
from tests.batch.letters import tokens
from tests.contents import Boom
from tests.hf.tiny import prompts, tiny

SAMPLED = {"do_sample": True, "temperature": 0.9, "max_new_tokens": 8}


# ------------------------------------------------------------------ sampling


@pytest.mark.parametrize(
    "rules",
    [
        {},
        {"top_k": 0, "top_p": 0.8},
        {"top_k": 7, "min_p": 0.05},
        {"typical_p": 0.7, "renormalize_logits": True},
        {"epsilon_cutoff": 0.01, "eta_cutoff": 0.01, "remove_invalid_values": True},
        {"repetition_penalty": 1.5, "top_p": 0.9},
    ],
)
def test_sample_k_draws_as_generate_alone_does_after_seed_plus_k(model, rules):
    options = {**SAMPLED, "num_return_sequences": 3, "seed": 7, **rules}
    results, _ = assert_like_alone(model, prompts(5, 9), **options)
    assert len({tuple(result.tokens) for result in results[:3]}) > 1


def test_a_temperature_of_zero_in_a_list_is_greedy(model, batched):
    rows = prompts(5, 9)
    mixed = batched.generate(
        rows, do_sample=True, temperature=[0, 0.9], seed=4, max_new_tokens=8, top_p=0.8
    )
    assert_same(mixed[0], alone(model, rows[0], do_sample=False, max_new_tokens=8))
    assert_same(mixed[1], alone(model, rows[1], seed=4, top_p=0.8, **SAMPLED))


def test_every_prompt_may_have_its_own_seed_temperature_and_length(model):
    options = {"do_sample": True, "seed": [3, 1, 4], "temperature": [0.2, 1.0, 3.0]}
    assert_like_alone(model, prompts(5, 9, 2), max_new_tokens=[9, 4, 6], **options)
    arrays = {"seed": np.array([3, 1, 4]), "temperature": torch.tensor([0.5, 1.0, 2.0])}
    rows = prompts(5, 9, 2)
    with generator(model) as batched:
        a = batched.generate(rows, do_sample=True, **arrays)
        b = batched.generate(
            rows, do_sample=True, **{name: list(x.tolist()) for name, x in arrays.items()}
        )
    assert tokens(a) == tokens(b)


def test_a_seed_means_the_same_whatever_else_is_in_the_batch(model, batched):
    rows, seeds = prompts(5, 9, 2, 7, 9), [10, 11, 12, 13, 14]
    once = tokens(batched.generate(rows, seed=seeds, **SAMPLED))
    back = tokens(batched.generate(rows[::-1], seed=seeds[::-1], **SAMPLED))
    single = [tokens(batched.generate([row], seed=s, **SAMPLED))[0] for row, s in zip(rows, seeds)]
    with generator(model, step_tokens=3, max_tokens=20, max_sequences=2) as narrow:
        turns = tokens(narrow.generate(rows, seed=seeds, **SAMPLED))
    assert once == back[::-1] == single == turns


def test_without_a_seed_samples_differ_and_follow_the_global_generator(batched):
    rows = prompts(5) * 4
    torch.manual_seed(1)
    once, other = (tokens(batched.generate(rows, **SAMPLED)) for _ in "ab")
    torch.manual_seed(1)
    assert tokens(batched.generate(rows, **SAMPLED)) == once != other
    assert len(set(map(tuple, once))) > 1


# ------------------------------------------------------------------ rules that look at the text


@pytest.mark.parametrize(
    "rules",
    [
        {"repetition_penalty": 1.7},
        {"encoder_repetition_penalty": 2.0},
        {"no_repeat_ngram_size": 2},
        {"encoder_no_repeat_ngram_size": 1},
        {"bad_words_ids": [[5], [7, 9], [70], [71]]},
        {"suppress_tokens": list(range(60, 100))},
        {"begin_suppress_tokens": list(range(60, 100))},
        {"sequence_bias": {(5,): 9.0, (5, 6): 20.0}},
        {"forced_eos_token_id": 8},
        {"min_new_tokens": 6, "eos_token_id": list(range(2, 100))},
        {"min_length": 12, "eos_token_id": list(range(2, 100))},
        {"exponential_decay_length_penalty": (2, 1.6), "eos_token_id": 8},
        {"prefix_allowed_tokens_fn": lambda _, ids: [(int(ids.sum()) + i) % 90 for i in range(9)]},
    ],
    ids=lambda rules: next(iter(rules)),
)
def test_transformers_rules_apply_to_each_row(model, rules):
    rows = prompts(5, 13, 2)
    changed, _ = assert_like_alone(model, rows, max_new_tokens=12, **rules)
    assert any(behind_the_best(model, row, r.tokens).any() for row, r in zip(rows, changed))


@pytest.mark.parametrize("sampled", [False, True])
def test_rules_by_text_apply_to_each_row_among_rows_of_one_length(model, sampled):
    rules = {"min_new_tokens": 3, "repetition_penalty": 1.7, "no_repeat_ngram_size": 2}
    rules |= {"eos_token_id": list(range(2, 100, 5)), "seed": [1, 2, 3, 4, 5]}
    assert_like_alone(
        model, prompts(5, 13, 5, 5, 13), do_sample=sampled, max_new_tokens=[9, 9, 4, 9, 9], **rules
    )


class Seen(LogitsProcessor):
    def __init__(self) -> None:
        self.texts: set[tuple[int, ...]] = set()

    def __call__(self, input_ids, scores):
        assert input_ids.shape[0] == scores.shape[0] == 1
        assert scores.isfinite().all(), "something was read that was never written"
        self.texts.add(tuple(input_ids[0].tolist()))
        return scores


def test_a_custom_processor_sees_each_text_alone_and_without_padding(batched):
    rows, seen = prompts(5, 13, 2), Seen()
    results = batched.generate(rows, max_new_tokens=6, logits_processor=[seen])
    texts = [row.tolist() + result.tokens for row, result in zip(rows, results)]
    expected = {tuple(t[: len(row) + i]) for row, t in zip(rows, texts) for i in range(6)}
    assert seen.texts == expected


def test_a_custom_processor_and_the_allowed_tokens_are_those_of_generate(model):
    class Away(LogitsProcessor):
        def __call__(self, input_ids, scores):
            scores[:, input_ids[:, -1] // 2 :] -= 20
            return scores

    assert_like_alone(model, prompts(5, 13, 2), logits_processor=LogitsProcessorList([Away()]))


def test_the_allowed_tokens_are_asked_for_by_the_prompts_place(batched):
    results = batched.generate(
        prompts(5, 13, 2), max_new_tokens=3, prefix_allowed_tokens_fn=lambda i, ids: [40 + i]
    )
    assert tokens(results) == [[40] * 3, [41] * 3, [42] * 3]


class Grammar(LogitsProcessor):
    """Allows 10, then 11, then 12 ...; follows one text token by token, as xgrammar's do."""

    def __init__(self) -> None:
        self.length, self.state = None, 9

    def __call__(self, input_ids, scores):
        assert self.length in (None, input_ids.shape[1] - 1), "this is another text"
        assert self.length is None or int(input_ids[0, -1]) == self.state
        self.length, self.state = input_ids.shape[1], self.state + 1
        return torch.full_like(scores, -torch.inf).index_fill_(1, torch.tensor([self.state]), 0.0)


@pytest.mark.parametrize(
    "package", ["xgrammar.contrib.hf", "outlines.backends", "llguidance", "guidance"]
)
def test_a_processor_that_follows_one_text_is_refused_for_several_rows(batched, package):
    follows = type("LogitsProcessor", (Grammar,), {"__module__": package})
    derived = type("Mine", (follows,), {"__module__": "mine"})
    why = r"follows the text of one row, and there are 2; .*processors=lambda index, sample"
    for made in (follows(), derived()):
        options = {"logits_processor": [made], "max_new_tokens": 3}
        with pytest.raises(ValueError, match=why):
            batched.stream(prompts(5, 9), **options)
        with pytest.raises(ValueError, match=why):
            batched.stream(prompts(5), num_return_sequences=2, do_sample=True, **options)
    (alone,) = batched.generate(prompts(5), **options)  # one row may have it
    assert alone.tokens == [10, 11, 12]


@pytest.mark.parametrize(
    "sizes", [{}, {"verify_width": 4}, {"max_tokens": 24}, {"step_tokens": 3}], ids=str
)
def test_each_row_has_processors_of_its_own_that_are_made_once(model, sizes):
    made = []

    def make(index, sample):
        made.append((index, sample))
        return [Grammar()]

    options = {"do_sample": True, "num_return_sequences": 2, "max_new_tokens": 12, "seed": 1}
    with generator(model, **sizes) as batched:
        results = batched.generate(prompts(5, 9, 2), processors=make, **options)
        assert_nothing_held(batched)
    assert tokens(results) == [list(range(10, 22))] * 6
    assert sorted(made) == [(i, k) for i in range(3) for k in range(2)]


@pytest.mark.parametrize("sampled", [False, True])
def test_a_rows_own_processors_are_not_those_of_another_even_if_they_look_at_no_ids(model, sampled):
    rows = prompts(5, 9, 7)
    usual = [tokens_alone(model, row, max_new_tokens=4, do_sample=False) for row in rows]
    said = sorted({token for row in usual for token in row})

    def make(index, sample):
        if sampled:
            return [TopKLogitsWarper(1)] if index else [TopKLogitsWarper(50)]
        return [] if index else [SuppressTokensLogitsProcessor(said)]

    options = {"do_sample": sampled, "seed": 1, "max_new_tokens": 4}
    with generator(model) as batched:
        results = batched.generate(rows, processors=make, **options)
    assert tokens(results)[1:] == usual[1:]
    assert sampled or not {*results[0].tokens} & {*said}


class EndsSoon(StoppingCriteria):
    """Texts behind a prompt of two ids end with their first token, others with their twentieth."""

    def __call__(self, input_ids, scores, **kwargs):
        prompt = input_ids[0].tolist().index(10)
        return torch.tensor([input_ids.shape[1] - prompt >= (1 if prompt == 2 else 20)])


def test_a_row_that_is_put_back_keeps_its_processors(model):
    # Nine that end at once teach the schedule to expect little; then four use nearly all they may.
    rows = [[5, 6]] * 9 + [[20 + i] * 4 for i in range(4)]
    options = {"stopping_criteria": [EndsSoon()], "max_new_tokens": 24}
    with generator(model, max_tokens=48) as batched:
        results = batched.generate(rows, processors=lambda index, sample: [Grammar()], **options)
        assert batched.stats.preemptions > 0
    assert tokens(results) == [list(range(10, 10 + n)) for n in [1] * 9 + [20] * 4]


def test_a_row_whose_processors_cannot_be_made_is_its_own_error(model, batched):
    def make(index, sample):
        if (index, sample) == (0, 0):
            raise Boom("no grammar")
        return 3 if (index, sample) == (1, 1) else []

    rows, options = prompts(5, 9), {"do_sample": True, "max_new_tokens": 4}
    results = batched.generate(rows, processors=make, num_return_sequences=2, seed=1, **options)
    assert results[0].error == "Boom while making its processors: no grammar"
    assert "processors: expected a list of callables, got 3" in results[3].error
    for i, k in ((0, 1), (1, 0)):
        assert_same(results[2 * i + k], alone(model, rows[i], 1 + k, **options))


def test_samples_of_a_prompt_keep_to_the_ids_that_are_allowed():
    """Transformers 5.24 takes a rule of allowed ids to get all samples of a prompt at once."""
    options = {"do_sample": True, "num_return_sequences": 4, "max_new_tokens": 3, "seed": 1}
    with generator(tiny()) as batched:
        results = batched.generate(
            prompts(9, 5), prefix_allowed_tokens_fn=lambda index, _: [7 + index, 20], **options
        )
    assert [result.error for result in results] == [None] * 8
    assert all({*result.tokens} <= {7 + result.index, 20} for result in results)
