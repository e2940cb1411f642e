"""`BatchGenerator`: every row as if alone, every prefix once, short pages.

Its pages are in debug mode: what was never written is NaN, and would show in the tokens.
"""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaForCausalLM

from pagedkv import BatchGenerator
from pagedkv.batch.row_queues import RowQueues
from pagedkv.errors import UnsupportedModelError
from pagedkv.hf import PagedCache
from tests.batch.generating import (
    alone,
    assert_like_alone,
    assert_nothing_held,
    assert_same,
    branches,
    generator,
    ragged,
    tokens_alone,
)
from tests.effort import each_value, examples, few, sampled
from tests.hf.tiny import FAMILIES, VARIED, attention_of, generate, padded, prompts, tiny

# ------------------------------------------------------------------ every row as if alone


@pytest.mark.parametrize("family", few(FAMILIES, *VARIED[1::2]))  # `score` has the others
def test_every_family_gets_the_tokens_of_generate_alone(family):
    assert_like_alone(tiny(family), ragged(), {"step_tokens": 7})


@pytest.mark.parametrize(
    ("family", "page_size", "step_tokens"), each_value(["llama", "gemma3"], [1, 4, 16], [1, 3, 64])
)
def test_any_page_size_and_any_step_size(family, page_size, step_tokens):
    sizes = {"page_size": page_size, "step_tokens": step_tokens}
    assert_like_alone(tiny(family), ragged(), sizes, max_new_tokens=[4, 12, 1, 9, 6, 3])


def test_half_precision_pages_hold_rows_of_a_half_precision_model(model):
    rows = ragged()
    with generator(model.to(torch.bfloat16)) as batched:
        first, second = (batched.generate(rows, max_new_tokens=5, logprobs=True) for _ in "ab")
    assert [len(result.tokens) for result in first] == [5] * 6
    assert all(x < 0 for result in second for x in result.logprobs)


def test_angles_that_depend_on_the_longest_row_are_refused_or_right():
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "factor": 2.0}
    rope |= {"short_factor": [1.0] * 4, "long_factor": [3.0] * 4}
    rope["original_max_position_embeddings"] = 32
    model = tiny(rope_parameters=rope, max_position_embeddings=64)
    try:
        assert_like_alone(model, prompts(5, 40))
    except UnsupportedModelError as error:
        assert "longrope" in str(error)  # noqa: PT017


def test_a_model_without_position_ids_is_refused_by_name_and_left_as_it_was(model):
    class WithoutPositions(LlamaForCausalLM):
        def forward(self, input_ids=None, attention_mask=None, past_key_values=None):
            raise NotImplementedError

    other = WithoutPositions(model.config)
    before = attention_of(other)
    with pytest.raises(UnsupportedModelError, match=r"WithoutPositions.*position_ids"):
        BatchGenerator(other, max_tokens=64)
    assert attention_of(other) == before


def test_the_model_is_switched_back_by_close_however_often(model):
    before = attention_of(model)
    batched = generator(model)
    assert attention_of(model) != before
    for _ in range(2):
        batched.close()
        assert attention_of(model) == before


# ------------------------------------------------------------------ what a result says


def test_results_come_in_the_order_of_the_prompts_with_reason_and_length(model):
    results, batched = assert_like_alone(model, ragged(), max_new_tokens=[7, 1, 5, 2, 4, 3])
    assert [len(result.tokens) for result in results] == [7, 1, 5, 2, 4, 3]
    assert {result.finish_reason for result in results} == {"length"}
    assert {(result.text, result.logprobs) for result in results} == {(None, None)}
    stats = batched.stats
    assert (stats.prompt_tokens, stats.new_tokens, stats.preemptions) == (66, 22, 0)
    assert stats.computed == 66 - stats.reused + 22 - 6
    assert stats.seconds > 0


def test_logprobs_are_those_of_the_models_own_distribution(model):
    rows = ragged()
    options = {"do_sample": True, "temperature": 2.0, "top_k": 5, "max_new_tokens": 6}
    expected = [alone(model, row, seed=9, **options) for row in rows]
    with generator(model) as batched:
        results = batched.generate(rows, seed=9, logprobs=True, **options)
    for result, single in zip(results, expected):
        assert_same(result, single)
        own = torch.cat(single.logits).log_softmax(-1)[range(6), result.tokens]
        assert torch.allclose(torch.tensor(result.logprobs), own, atol=1e-4)


def test_a_stream_gives_results_as_they_finish(model):
    rows = prompts(5, 7, 9)
    with generator(model) as batched:
        stream = batched.stream(rows, max_new_tokens=[9, 2, 5])
        first = next(stream)
        assert (first.index, len(first.tokens)) == (1, 2)
        assert batched.cache.stats().sequences == 2
        assert [result.index for result in stream] == [2, 0]
        assert_nothing_held(batched)


def test_no_prompts_give_no_results_and_no_step(model):
    with generator(model) as batched:
        assert batched.generate([], max_new_tokens=3, do_sample=True, seed=[]) == []
        assert batched.stats.steps == 0


# ------------------------------------------------------------------ every prefix once


def test_a_prefix_of_prompts_that_start_together_is_computed_once(model):
    _, batched = assert_like_alone(model, branches(3, 5, 2, 7), max_new_tokens=1)
    assert (batched.stats.computed, batched.stats.reused) == (32 + 17, 3 * 32)


@pytest.mark.parametrize("family", ["llama", "gemma2", "mistral"])
def test_what_an_earlier_call_computed_is_found(family):
    model = tiny(family)
    rows = branches(3, 5)
    expected = [alone(model, row) for row in rows]
    with generator(model) as batched:
        batched.generate(rows[:1], max_new_tokens=1)
        results = batched.generate(rows, max_new_tokens=10)
    for result, single in zip(results, expected):
        assert_same(result, single)
    assert [result.cached_tokens for result in results] == [34, 32]
    assert batched.stats.computed == 1 + 5 + 2 * 9


def test_pages_are_by_default_those_of_the_models_paged_caches(model):
    row, sizes = prompts(21)[0], {"max_tokens": 128, "page_size": 4}
    expected = alone(model, row)
    with PagedCache(model, **sizes) as cache, BatchGenerator(model, **sizes) as batched:
        assert batched.cache is cache.kv
        generate(model, padded([row]), cache, max_new_tokens=4)
        (result,) = batched.generate([row], max_new_tokens=10)
        assert_same(result, expected)
        assert batched.cache.stats().sequences == 1
        more = generate(model, padded([expected.sequences[0, :25]]), cache, max_new_tokens=6)
        assert more.sequences.tolist() == expected.sequences.tolist()


def test_pages_of_another_model_or_sizes_beside_given_pages_are_refused(model):
    before = attention_of(model)
    with generator(tiny("qwen3")) as other, pytest.raises(ValueError, match="K and V of 2 x 8"):
        BatchGenerator(model, cache=other.cache)
    with generator(model) as batched, pytest.raises(ValueError, match="no other sizes"):
        BatchGenerator(model, cache=batched.cache, page_size=8)
    assert attention_of(model) == before


def test_samples_share_their_prompt(model):
    options = {"do_sample": True, "num_return_sequences": 3, "seed": 4, "max_new_tokens": 6}
    results, batched = assert_like_alone(model, prompts(13, 6), **options)
    assert batched.stats.computed == 13 + 6 + 6 * 5
    assert [result.cached_tokens for result in results] == [0, 13, 13, 0, 6, 6]


# ------------------------------------------------------------------ pages or places run short


class Watch:
    """Every put-back row with the tokens it had then."""

    def __init__(self, monkeypatch) -> None:
        self.seen: list[tuple[int, int, int]] = []
        preempt = RowQueues.preempt

        def noted(running, error):
            before = list(running.running)
            preempt(running, error)
            self.seen += [
                (row.index, row.sample, len(row.tokens))
                for row in before
                if row not in running.running and not row.error
            ]

        monkeypatch.setattr(RowQueues, "preempt", noted)


def test_rows_of_which_too_little_was_expected_finish_all_the_same(monkeypatch):
    # Many that stop with their second token, then some that use all they may.
    model = tiny()
    short, long = prompts(5)[0], prompts(*[4] * 4)
    ends = tokens_alone(model, short, seed=3, do_sample=True, max_new_tokens=2)[1]
    watch = Watch(monkeypatch)
    options = {"do_sample": True, "max_new_tokens": 20}
    _, batched = assert_like_alone(
        model, [short] * 9 + long, {"max_tokens": 48}, eos_token_id=ends, seed=3, **options
    )
    assert batched.stats.preemptions == len(watch.seen) > 0
    assert len(set(watch.seen)) == len(watch.seen), "put back twice without a token in between"
    assert batched.stats.peak.live <= batched.stats.peak.pages
    assert batched.stats.steps < 13 * 26


# ------------------------------------------------------------------ anything


LETTERS = st.lists(st.integers(2, 4), min_size=1, max_size=12)
MODELS = {family: tiny(family) for family in ("llama", "gemma3")}


@sampled
@given(st.data())
@settings(max_examples=examples(25))
def test_any_prompts_on_any_pages_get_the_tokens_of_generate_alone(data):
    model = MODELS[data.draw(st.sampled_from(sorted(MODELS)))]
    rows = data.draw(st.lists(LETTERS, min_size=1, max_size=6))
    new = data.draw(st.lists(st.integers(1, 9), min_size=len(rows), max_size=len(rows)))
    sizes = {
        "max_tokens": max(map(len, rows)) + 9 + data.draw(st.integers(0, 24)),
        "page_size": data.draw(st.sampled_from([1, 4, 16])),
        "step_tokens": data.draw(st.sampled_from([1, 3, 64])),
        "max_sequences": data.draw(st.integers(1, 8)),
    }
    ends = data.draw(st.none() | st.just(list(range(2, 40))))
    assert_like_alone(model, rows, sizes, max_new_tokens=new, eos_token_id=ends)


@pytest.mark.parametrize("sizes", [{}, {"verify_width": 4}])
def test_the_device_that_torch_makes_tensors_on_by_default_is_nobodys_concern(model, sizes):
    rows, rules = ragged(), {"max_new_tokens": 6, "do_sample": False}
    with generator(model, **sizes) as batched:
        expected = batched.generate(rows, **rules)
    rows = [row.tolist() for row in rows]
    with torch.device("meta"), generator(model, **sizes) as batched:
        assert batched.generate(rows, **rules) == expected
        drawn = batched.generate(rows, max_new_tokens=3, do_sample=True)
        scores = batched.score(rows[:1], [[4, 5]])[0][0].logprobs
    assert not any(result.error for result in drawn)
    assert len(scores) == 2
