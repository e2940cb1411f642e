"""Rows end by tokens, strings, criteria, time and length."""

import numpy as np
import pytest
from transformers import EosTokenCriteria, GenerationConfig, MaxLengthCriteria, StoppingCriteriaList

from tests.batch.generating import assert_like_alone, generator, tokens_alone
from tests.batch.letters import EndsOn, letters, text, tokens
from tests.hf.tiny import NEW, prompts


def test_end_tokens_stop_a_row_and_are_part_of_it(model):
    rows = prompts(5, 13, 2, 9)
    plain = [tokens_alone(model, row) for row in rows]
    for ends in (plain[0][3], [plain[0][6], plain[1][2], plain[3][0]]):
        results, _ = assert_like_alone(model, rows, eos_token_id=ends)
        assert results[0].finish_reason == "stop"
        for result in results:
            assert (result.tokens[-1] in np.atleast_1d(ends)) == (result.finish_reason == "stop")


@pytest.mark.parametrize("new", [1, 4])
def test_samples_that_end_with_their_first_token(model, new):
    options = {"do_sample": True, "num_return_sequences": 4, "max_new_tokens": new, "seed": 1}
    assert_like_alone(model, prompts(5, 9), eos_token_id=list(range(2, 80)), **options)


def test_stop_strings_stop_a_row_across_tokens(model):
    rows, tokenizer = prompts(5, 13, 2), letters()
    plain = [tokens_alone(model, row, max_new_tokens=NEW) for row in rows]
    stops = [text(plain[0][2:4]), text(plain[1][3:5])]
    results, _ = assert_like_alone(model, rows, tokenizer=tokenizer, stop_strings=stops)
    assert [result.finish_reason for result in results[:2]] == ["stop"] * 2
    assert results[0].text.endswith(stops[0])


def test_a_custom_criterion_sees_each_text_alone(model):
    criteria = StoppingCriteriaList([EndsOn()])
    results, _ = assert_like_alone(model, prompts(5, 13, 2, 9), stopping_criteria=criteria)
    assert "stop" in {result.finish_reason for result in results}


def test_max_time_stops_what_runs_with_its_next_token_and_begins_no_more(model):
    rows = prompts(*[5] * 6)
    with generator(model, max_sequences=2) as batched:
        stream = batched.stream(rows, max_new_tokens=10**6, max_time=0.2)
        results = sorted(stream, key=lambda result: result.index)
    ran, left = results[:2], results[2:]
    assert [result.finish_reason for result in ran] == ["stop", "stop"]
    assert all("max_time" in result.error for result in left)


def test_max_length_counts_the_prompt(model, batched):
    rows = prompts(5, 13, 2)
    results = batched.generate(rows, max_length=12)
    assert [len(result.tokens) for result in results] == [7, 0, 10]
    assert "max_length" in results[1].error
    assert tokens(results)[0] == tokens_alone(model, rows[0], max_new_tokens=7)


@pytest.mark.filterwarnings("ignore:Using the model-agnostic default")
def test_the_default_length_is_that_of_generate(model):
    assert_like_alone(model, prompts(5, 13), max_new_tokens=None)


@pytest.mark.filterwarnings("ignore:Using the model-agnostic default")
def test_a_length_criterion_takes_the_place_of_the_built_in_one(model):
    criteria = StoppingCriteriaList([MaxLengthCriteria(40)])
    assert_like_alone(model, prompts(5, 13), max_new_tokens=None, stopping_criteria=criteria)


def test_an_end_token_criterion_takes_the_place_of_the_built_in_one(model):
    rows = prompts(5, 13)
    plain = tokens_alone(model, rows[0])
    criteria = StoppingCriteriaList([EosTokenCriteria(plain[6])])
    assert_like_alone(model, rows, eos_token_id=plain[2], stopping_criteria=criteria)


def test_options_come_from_generation_configs_too(model):
    own = GenerationConfig(max_new_tokens=6, do_sample=True, temperature=0.6, seed=None)
    rows = prompts(5, 13)
    assert_like_alone(model, rows, generation_config=own, seed=3)
    model.generation_config.repetition_penalty = 1.4
    model.generation_config.eos_token_id = tokens_alone(model, rows[0])[5]
    assert_like_alone(model, rows)
