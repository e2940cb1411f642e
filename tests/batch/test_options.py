"""Options and arguments that are refused before any work."""

import warnings
from array import array

import numpy as np
import pytest
import torch
from transformers import GenerationConfig

from tests.batch.generating import alone, assert_nothing_held, assert_same, failing, generator
from tests.batch.letters import EndsOn, Scalar, letters, tokens
from tests.contents import Boom
from tests.hf.tiny import VOCAB, prompts, tiny


@pytest.fixture(scope="module")
def model():
    """One for all, since nothing is computed with it, or nothing changed in it."""
    return tiny()


@pytest.fixture(scope="module")
def lettered(model):
    """One with a tokenizer, for all that is refused: it holds nothing afterwards."""
    with generator(model, letters()) as lettered:
        yield lettered
        assert_nothing_held(lettered)


@pytest.mark.parametrize(
    ("options", "error", "why"),
    [
        ({"no_such_option": 1}, ValueError, "no_such_option"),
        ({"tokenizer": object()}, TypeError, "tokenizer: give it to BatchGenerator, not to a call"),
        ({"max_tokens": 5}, ValueError, "max_tokens: generate .*; did you mean max_new_tokens"),
        ({"n": 5}, ValueError, "n: generate has no such option; did you mean num_return_sequences"),
        ({"stop": "x"}, ValueError, "did you mean stop_strings"),
        ({"top-k": 5}, ValueError, "did you mean top_k"),
        ({"temprature": 1.0}, ValueError, "did you mean temperature"),
        ({"num_beams": 2}, ValueError, "beam"),
        ({"prompt_lookup_num_tokens": 3}, ValueError, "assisted"),
        ({"assistant_model": object()}, ValueError, "assistant_model"),
        ({"guidance_scale": 1.5}, ValueError, "guidance_scale"),
        ({"output_scores": True}, ValueError, "output_scores"),
        ({"output_logits": True}, ValueError, "output_logits"),
        ({"output_attentions": True}, ValueError, "output_attentions"),
        ({"return_dict_in_generate": True}, ValueError, "return_dict_in_generate"),
        ({"use_cache": False}, ValueError, "use_cache"),
        ({"cache_implementation": "static"}, ValueError, "cache_implementation"),
        ({"attention_mask": torch.ones(2, 5)}, ValueError, "attention_mask"),
        ({"num_return_sequences": 2}, ValueError, "num_return_sequences"),
        ({"stop_strings": ["a"]}, ValueError, "tokenizer"),
        ({"do_sample": True, "temperature": [1.0, -1.0]}, ValueError, "temperature"),
        ({"max_new_tokens": [1, 2, 3]}, ValueError, "max_new_tokens.*2 prompts, got 3"),
        ({"max_new_tokens": [3, 0]}, ValueError, "max_new_tokens"),
        ({"temperature": [1.0]}, ValueError, "temperature.*2 prompts, got 1"),
        ({"seed": np.arange(5)}, ValueError, "seed.*2 prompts, got 5"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else None,
)
def test_options_that_are_not_served_raise_before_any_work(model, batched, options, error, why):
    before = batched.cache.stats()
    with failing(model, 0, Boom()), pytest.raises(error, match=why):
        batched.stream(prompts(5, 5), **options)  # no result is asked for
    assert batched.cache.stats() == before


# Fields of a generation configuration that greedy search and sampling never look at.
UNUSED = {
    *("cache_config", "max_cache_len", "length_penalty", "num_assistant_tokens"),
    *("num_assistant_tokens_schedule", "assistant_confidence_threshold", "max_matching_ngram_size"),
    *("assistant_lookbehind", "target_lookbehind", "speculation_type", "disable_compile"),
    *("continuous_batching_config", "low_memory", "diversity_penalty"),
    *("num_beam_groups", "prefill_chunk_size", "transformers_version"),
}
FIELDS = sorted(name for name in vars(GenerationConfig()) if name[0] != "_")


@pytest.mark.parametrize(
    "wrong", ["abc", {"a": 1}, object(), float("nan")], ids=lambda x: str(type(x))
)
@pytest.mark.parametrize("field", FIELDS)
def test_a_field_of_a_wrong_kind_raises_before_any_work_and_is_named(model, lettered, field, wrong):
    if field == "stop_strings" and wrong == "abc":
        wrong = ["abc", ""]
    options = {"do_sample": True, "seed": 3, "max_new_tokens": 2, field: wrong}
    if field in UNUSED:
        found = tokens(lettered.generate([[5, 6]], **options))
        del options[field]
        assert found == tokens(lettered.generate([[5, 6]], **options))
        return
    # What leads to another way of generating is told by that way's name.
    named = rf"{field}|got (beam|assisted|dola|constrained)|WatermarkingConfig"
    with failing(model, 0, Boom()), pytest.raises((TypeError, ValueError), match=named):
        lettered.stream([[5, 6]], **options)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("temperature", x) for x in (float("nan"), float("inf"), -1.0, [1.0, float("inf")])),
        *(("temperature", [1.0, x]) for x in (float("nan"), -1, "hot", True)),
        *(("max_new_tokens", x) for x in (-1, 0, 1.5, True, [3, -1], [3, 2.0])),
        *((name, -1) for name in ("max_length", "min_length", "min_new_tokens", "top_k")),
        *((name, 1.5) for name in ("max_length", "min_new_tokens", "top_k", "top_p", "min_p")),
        *((name, -0.1) for name in ("top_p", "typical_p", "epsilon_cutoff", "max_time")),
        *(("num_return_sequences", x) for x in (0, -1, True, 2.0)),
        *(("repetition_penalty", x) for x in (0.0, -1.0, 2, float("inf"))),
        *(("eos_token_id", x) for x in ("a", 1.5, [1, "a"], True)),
        *(("suppress_tokens", x) for x in (1, ["a"], [1.5], "ab")),
        *(("forced_eos_token_id", x) for x in (VOCAB, -1, [3, VOCAB])),
        ("forced_bos_token_id", VOCAB),
        *((name, 10**20) for name in ("eos_token_id", "pad_token_id", "bos_token_id")),
        *((name, {3}) for name in ("eos_token_id", "forced_eos_token_id")),
        ("forced_eos_token_id", []),
        *(("encoder_no_repeat_ngram_size", x) for x in (10**20, 2**16 + 1, np.int64(2))),
        *(("no_repeat_ngram_size", x) for x in (10**20, np.int64(2))),
        *(("bad_words_ids", x) for x in ([[]], [3], [["a"]], 3)),
        *(("sequence_bias", x) for x in ([[]], [[[1]]], 3)),
        *((name, torch.ones(2)) for name in ("top_p", "use_cache", "max_time", "guidance_scale")),
        *((name, np.ones(2)) for name in ("top_k", "length_penalty", "num_return_sequences")),
        *(("do_sample", x) for x in ("yes", 1, [True])),
        *(("stop_strings", x) for x in ("", ["a", ""], [], 3)),
        *(("exponential_decay_length_penalty", x) for x in (3, (1,), ("a", 1.0))),
        *(("logits_processor", x) for x in (3, [3], EndsOn)),
        *(("stopping_criteria", x) for x in (3, ["a"])),
        *((name, 3) for name in ("prefix_allowed_tokens_fn", "processors")),
        *(("generation_config", x) for x in ({}, {"top_k": 5}, "greedy")),
    ],
    ids=str,
)
@pytest.mark.parametrize("how", ["option", "configuration"])
def test_a_value_that_makes_no_sense_raises_before_any_work_and_is_named(
    model, lettered, name, value, how
):
    options = {"do_sample": True, "max_new_tokens": 2, name: value}
    if how == "configuration":
        if isinstance(value, list) and name in ("temperature", "max_new_tokens"):
            return  # lists with one value for each prompt are options alone
        config = GenerationConfig()
        if not hasattr(config, name):
            return
        for each, given in options.items():
            setattr(config, each, given)
        options = {"generation_config": config}
    refused = pytest.raises((TypeError, ValueError), match=name)
    with failing(model, 0, Boom()), refused:
        lettered.stream([[5, 6], [7, 8]], **options)


def test_a_greedy_row_of_which_several_samples_are_asked_for_is_its_own_error(model, batched):
    rows = prompts(5, 9)
    options = {"do_sample": True, "max_new_tokens": 4, "seed": 2}
    results = batched.generate(rows, temperature=[0.9, 0], num_return_sequences=2, **options)
    assert ["temperature: 0 is greedy" in str(r.error) for r in results] == [
        False,
        False,
        True,
        True,
    ]
    for k in range(2):
        assert_same(
            results[k],
            alone(model, rows[0], 2 + k, do_sample=True, temperature=0.9, max_new_tokens=4),
        )


@pytest.mark.parametrize("seed", ["one", [1, "one"], 1.5, 2**70])
def test_a_seed_that_is_no_seed_raises_before_any_work(batched, seed):
    with pytest.raises((TypeError, ValueError), match="seed"):
        batched.stream(prompts(5, 5), do_sample=True, seed=seed)


@pytest.mark.parametrize(
    ("bad", "got"),
    [
        ("one text", "one str"),
        (b"bytes", "one bytes"),
        (Scalar(b"dbe"), "one Scalar"),
        ({"prompt": ["dbe"]}, "one dict"),
        ([3, 4, 5], "at 0 int"),
        ([[1.0, 2.0]], r"at 0 list of shape \[2\], dtype float64"),
        ([[True]], "dtype bool"),
        ([[[1, 2]]], r"shape \[1, 2\]"),
        ([[[1], [1, 2]]], "at 0 list"),
        ([None], "at 0 NoneType"),
        ([torch.ones(2, 2)], r"at 0 Tensor of shape \[2, 2\]"),
        ([torch.ones(2, dtype=torch.bfloat16, requires_grad=True)], "dtype float32"),
        ([None, b"dbe"], "at 0 NoneType"),
        ([bytearray(b"dbe")], "at 0 bytearray"),
        ([memoryview(b"dbe")], "at 0 memoryview"),
        ([array("B", b"dbe")], "at 0 array"),
        ([np.array(["a", "b"], dtype=object)], "at 0 ndarray.* dtype object"),
        ([[b"a", b"b"]], "dtype |S1"),
        ([{"prompt": "dbe"}], "at 0 dict"),
        ([{"role": "user", "content": "dbe"}], "at 0 one chat message; a chat is a list"),
        ([float("nan")], "at 0 float"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_prompts_of_a_wrong_kind_raise_before_any_work(batched, bad, got):
    before = batched.cache.stats()
    with pytest.raises(TypeError, match=f"prompts: expected.*{got}"):
        batched.stream(bad, max_new_tokens=3)
    assert batched.cache.stats() == before


@pytest.mark.parametrize("step_tokens", [0, -1, True, 1.0])
def test_a_step_without_tokens_is_refused(model, step_tokens):
    with pytest.raises(ValueError, match="step_tokens"):
        generator(model, step_tokens=step_tokens)


def test_guesses_are_refused_where_queries_choose_their_pages(model):
    from pagedkv import BatchGenerator

    with pytest.raises(ValueError, match="verify_width: expected 1 with read_tokens, got 4"):
        BatchGenerator(model, max_tokens=512, read_tokens=128, verify_width=4)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("use_cache", False),
        ("cache_implementation", "static"),
        *((name, True) for name in ("return_dict_in_generate", "output_attentions")),
        *((name, True) for name in ("output_hidden_states", "output_scores", "output_logits")),
    ],
)
def test_what_a_checkpoint_says_of_returning_and_caching_is_left_to_generate(model, name, value):
    rows, own = prompts(5, 9), {"max_new_tokens": 4, "do_sample": False}
    expected = [alone(model, row, **own).sequences[0, len(row) :].tolist() for row in rows]
    setattr(model.generation_config, name, value)
    try:
        with generator(model) as batched:
            assert tokens(batched.generate(rows, **own)) == expected
            config = GenerationConfig(max_new_tokens=4, do_sample=False)
            assert tokens(batched.generate(rows, generation_config=config)) == expected
            setattr(config, name, value)
            for asked in ({**own, name: value}, {"generation_config": config}):
                with pytest.raises(ValueError, match=name) as refused:
                    batched.stream(rows, **asked)
                assert "of the model's generation_config" not in str(refused.value)
    finally:
        setattr(model.generation_config, name, None)


@pytest.mark.parametrize(
    ("name", "value", "instead"),
    [
        ("num_beams", 4, 1),
        ("penalty_alpha", 0.6, None),
        ("prompt_lookup_num_tokens", 3, None),
        ("guidance_scale", 2.0, 1.0),
    ],
)
def test_what_a_checkpoint_says_that_changes_tokens_is_refused_and_may_be_overridden(
    model, batched, name, value, instead
):
    own = {"max_new_tokens": 2, "do_sample": False, "top_k": 5}
    expected = tokens(batched.generate([[5, 6]], **own))
    setattr(model.generation_config, name, value)
    try:
        why = rf"\({name} is of the model's generation_config; {name}={instead} overrides it\)"
        with pytest.raises(ValueError, match=why):
            batched.stream([[5, 6]], **own)
        with pytest.raises(ValueError, match=r"packed rows|greedy search") as refused:
            batched.stream([[5, 6]], **own, **{name: value})
        assert "of the model's generation_config" not in str(refused.value)
        assert tokens(batched.generate([[5, 6]], **own, **{name: instead})) == expected
    finally:
        setattr(model.generation_config, name, None)


def test_a_prompt_that_all_pages_have_no_room_for_is_warned_of_once(model):
    with generator(model, max_tokens=8) as small:
        with pytest.warns(UserWarning, match="room for 8 tokens, .* has 9; max_new_tok"):
            first = small.generate([[1] * 9, [1, 2]], max_new_tokens=2)
        with warnings.catch_warnings(action="error"):
            again = small.generate([[1] * 9, [1, 2]], max_new_tokens=2)
            scored = small.score([[1] * 9], [[1]])
    assert [bool(result.error) for result in first + again] == [True, False] * 2
    assert scored[0][0].error
