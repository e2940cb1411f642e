"""Prompts in every form, and those that are their own error."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.batch.generating import assert_nothing_held, generator, tokens_alone
from tests.batch.letters import Scalar, letters, text, tokens
from tests.hf.tiny import VOCAB, prompts, tiny


def test_text_chats_ids_arrays_and_tensors_are_one(model):
    ids = [3, 1, 4, 1, 25]
    forms = [text(ids), ids, tuple(ids), np.array(ids, np.uint8), torch.tensor(ids)]
    forms.append([{"role": "user", "content": text(ids[:-1])}])
    with generator(model, letters()) as batched:
        results = batched.generate(forms, max_new_tokens=5)
    expected = tokens_alone(model, ids, max_new_tokens=5)
    assert [(result.tokens, result.text) for result in results] == [(expected, text(expected))] * 6


@pytest.mark.parametrize("number", [np.array(3), torch.tensor(3)], ids=["numpy", "torch"])
def test_an_array_of_one_number_is_no_list_of_prompts(model, number):
    with generator(model) as batched, pytest.raises(TypeError, match="expected a list or an iter"):
        batched.stream(number, max_new_tokens=3)


def test_scalars_of_a_column_are_their_text_and_not_its_bytes(model):
    with generator(model, letters()) as batched:
        found = batched.generate([Scalar(b"dbe"), Scalar(b"ef")], max_new_tokens=3)
        expected = batched.generate(["dbe", "ef"], max_new_tokens=3)
    assert tokens(found) == tokens(expected)


def columns_of(kind: str, rows: list):
    library = pytest.importorskip(kind.split()[0])
    if kind == "pyarrow chunked":
        return library.chunked_array([rows[:1], rows[1:]])
    if kind == "pyarrow table":
        return library.table({"prompt": rows})["prompt"]
    if kind == "numpy objects":
        return library.array(rows, dtype=object)
    if kind == "datasets":
        return library.Dataset.from_dict({"prompt": rows})["prompt"]
    return (library.Series if hasattr(library, "Series") else library.array)(rows)


KINDS = ["numpy", "numpy objects", "pandas", "polars", "datasets"]


@pytest.mark.parametrize("kind", [*KINDS, "pyarrow", "pyarrow chunked", "pyarrow table"])
def test_a_column_of_texts_is_a_list_of_prompts(model, kind):
    column = columns_of(kind, ["dbe", "ef"])
    with generator(model, letters()) as batched:
        found = batched.generate(column, max_new_tokens=3)
        assert tokens(found) == tokens(batched.generate(["dbe", "ef"], max_new_tokens=3))


def test_a_pyarrow_column_of_ids_or_of_messages_is_a_list_of_prompts(model):
    import pyarrow

    chats = [[{"role": "user", "content": "dbe"}], [{"role": "user", "content": "ef"}]]
    with generator(model, letters()) as batched:
        for rows in ([[3, 1, 4], [4, 5]], chats):
            found = batched.generate(pyarrow.array(rows), max_new_tokens=3)
            assert tokens(found) == tokens(batched.generate(rows, max_new_tokens=3))


@pytest.mark.parametrize("library", ["pandas", "polars", "pyarrow"])
def test_a_table_is_no_list_of_prompts(batched, library):
    library = pytest.importorskip(library)
    table = getattr(library, "DataFrame", None) or library.table
    with pytest.raises(TypeError, match="give one of its columns"):
        batched.generate(table({"prompt": ["dbe"]}), max_new_tokens=3)


def test_the_tokenizer_is_by_default_the_one_beside_the_checkpoint(model, tmp_path):
    model.save_pretrained(tmp_path)
    letters().save_pretrained(tmp_path)
    with generator(AutoModelForCausalLM.from_pretrained(tmp_path)) as batched:
        (result,) = batched.generate(["dbe"], max_new_tokens=5)
    assert result.text == text(tokens_alone(model, [3, 1, 4], max_new_tokens=5))


@pytest.mark.parametrize(
    ("bad", "why"),
    [
        ([], "at least one token"),
        ([5, VOCAB], f"0..{VOCAB - 1}"),
        ([5, -1], f"0..{VOCAB - 1}"),
        ([5] * 257, "256"),  # the model's positions
        ([2**32 + 5], f"0..{VOCAB - 1}"),
    ],
    ids=["empty", "too high", "negative", "too long", "beyond 32 bits"],
)
def test_a_bad_prompt_is_its_own_error_and_others_go_on(model, batched, bad, why):
    rows = prompts(5, 7)
    results = batched.generate([rows[0], bad, rows[1]], max_new_tokens=4)
    assert [result.finish_reason for result in results] == ["length", "error", "length"]
    assert why in results[1].error
    assert (results[1].tokens, results[0].error, results[2].error) == ([], None, None)
    assert [results[0].tokens, results[2].tokens] == [
        tokens_alone(model, row, max_new_tokens=4) for row in rows
    ]


def test_a_prompt_longer_than_the_pool_is_its_own_error_for_each_sample(model):
    options = {"do_sample": True, "num_return_sequences": 2, "seed": 1, "max_new_tokens": 4}
    with generator(model, max_tokens=16) as batched:
        results = batched.generate(prompts(17, 5), **options)
        assert_nothing_held(batched)
    assert ["16 tokens" in str(result.error) for result in results] == [True, True, False, False]


def test_a_text_that_outgrows_the_pool_keeps_what_it_got(model):
    with generator(model, max_tokens=16) as batched:
        row = prompts(9)[0]
        (result,) = batched.generate([row], max_new_tokens=20)
        assert_nothing_held(batched)
    assert "16 tokens" in result.error
    assert result.tokens == tokens_alone(model, row, max_new_tokens=8)


@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_a_prompt_longer_than_the_model_is_refused_whatever_the_cache_allows(family):
    with generator(tiny(family), max_sequence_length=512) as batched:
        results = batched.generate(prompts(257, 5), max_new_tokens=2)
    assert [result.error is None for result in results] == [False, True]


def test_a_text_ends_where_the_models_positions_end(model):
    with generator(model, max_sequence_length=512) as batched:
        results = batched.generate(prompts(250, 5), max_new_tokens=10)
    assert [len(result.tokens) for result in results] == [6, 10]
    assert {result.finish_reason for result in results} == {"length"}


def test_a_last_message_of_the_assistant_is_gone_on_with(model):
    """The template ends an answer's turn by nothing, and begins one by the last letter."""
    user, said = {"role": "user", "content": "dbe"}, {"role": "assistant", "content": "ef"}
    with generator(model, letters()) as batched:
        goes_on, begins = batched.generate([[user, said], [user]], max_new_tokens=5)
    ids = letters()("dbeef")["input_ids"]
    assert goes_on.tokens == tokens_alone(model, ids, max_new_tokens=5)
    assert begins.tokens != goes_on.tokens
