"""`BatchGenerator`: every row as if alone, every prefix once, short pages, interruptions.

Its pages are in debug mode: what was never written is NaN, and would show in the tokens.
"""

import gc
import sys
from threading import Thread

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("transformers")

from transformers import LlamaForCausalLM, LogitsProcessor, StoppingCriteria

from pagedkv import BatchGenerator
from pagedkv.batch.scheduler import Scheduler
from pagedkv.errors import UnsupportedModelError
from pagedkv.hf import PagedCache
from tests.generating import (
    alone,
    assert_like_alone,
    assert_nothing_held,
    assert_same,
    failing,
    generator,
    tokens_alone,
)
from tests.hf.tiny import FAMILIES, attention_of, generate, padded, prompts, tiny
from tests.support import Boom


@pytest.fixture
def model():
    return tiny()


def ragged() -> list[torch.Tensor]:
    """Lengths from one token to beyond every window, two of them with a prefix in common."""
    rows = prompts(5, 23, 1, 12, 2)
    return [*rows, torch.cat([rows[1][:18], rows[0]])]


def branches(*tails: int, prefix: int = 32) -> list[torch.Tensor]:
    """Prompts with this many tokens of their own behind a prefix."""
    shared = prompts(prefix)[0]
    own = [torch.cat([torch.tensor([2 + i]), prompts(n)[0][1:]]) for i, n in enumerate(tails)]
    return [torch.cat([shared, tail]) for tail in own]


# ------------------------------------------------------------------ every row as if alone


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_gets_the_tokens_of_generate_alone(family):
    assert_like_alone(tiny(family), ragged(), {"step_tokens": 7})


@pytest.mark.parametrize("step_tokens", [1, 3, 64])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
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
        def forward(self, input_ids=None, attention_mask=None, past_key_values=None, **kwargs):
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


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_a_prefix_of_prompts_that_start_together_is_computed_once(model, page_size):
    rows = branches(3, 5, 2, 7)
    _, batched = assert_like_alone(model, rows, {"page_size": page_size}, max_new_tokens=1)
    assert (batched.stats.computed, batched.stats.reused) == (32 + 17, 3 * 32)


def test_the_same_prompt_many_times_is_computed_once_but_for_its_last_token(model):
    results, batched = assert_like_alone(model, prompts(21) * 5, max_new_tokens=1)
    assert batched.stats.computed == 21 + 4
    assert [result.cached_tokens for result in results] == [0, 20, 20, 20, 20]


def test_prompts_that_are_prefixes_of_others_are_computed_once(model):
    longest = prompts(30)[0]
    rows = [longest[:9], longest, longest[:20], longest[:9]]
    _, batched = assert_like_alone(model, rows, max_new_tokens=1)
    assert batched.stats.computed == 30 + 2


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
    with generator(tiny("qwen3")) as other, pytest.raises(ValueError, match="head_dim"):
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
        preempt = Scheduler._preempt

        def noted(jobs, error):
            before = list(jobs.running)
            preempt(jobs, error)
            self.seen += [
                (row.index, row.sample, len(row.tokens))
                for row in before
                if row not in jobs.running and not row.error
            ]

        monkeypatch.setattr(Scheduler, "_preempt", noted)


@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_rows_of_which_too_little_was_expected_finish_all_the_same(family, samples, monkeypatch):
    # Many that stop with their second token, then some that use all they may.
    model = tiny(family)
    short, long = prompts(5)[0], prompts(*[4] * 5)
    ends = tokens_alone(model, short, seed=3, do_sample=True, max_new_tokens=2)[1]
    watch = Watch(monkeypatch)
    options = {"do_sample": True, "num_return_sequences": samples, "max_new_tokens": 24}
    _, batched = assert_like_alone(
        model, [short] * 9 + long, {"max_tokens": 48}, eos_token_id=ends, seed=3, **options
    )
    assert batched.stats.preemptions == len(watch.seen) > 0
    assert len(set(watch.seen)) == len(watch.seen), "put back twice without a token in between"
    assert batched.stats.peak.live <= batched.stats.peak.pages
    assert batched.stats.steps < 14 * samples * 30


def test_a_pool_that_holds_just_one_row_takes_them_in_turn(model):
    _, batched = assert_like_alone(model, prompts(6, 6, 6, 6), {"max_tokens": 16})
    assert batched.stats.peak.pages == batched.stats.peak.live == 4


def test_fewer_places_than_prompts(model):
    _, batched = assert_like_alone(model, ragged(), {"max_sequences": 2})
    assert batched.stats.peak.sequences <= 2


def test_fewer_places_than_samples(model):
    options = {"do_sample": True, "num_return_sequences": 3, "seed": 1}
    assert_like_alone(model, prompts(6, 4), {"max_sequences": 2}, **options)


def test_more_samples_than_a_step_of_the_cache_can_feed(model):
    options = {"do_sample": True, "num_return_sequences": 4, "seed": 1}
    assert_like_alone(model, prompts(6, 4), {"max_step_tokens": 2}, **options)


# ------------------------------------------------------------------ interrupted, abandoned


@pytest.mark.parametrize("step", [0, 1, 4, 8])
@pytest.mark.parametrize("inside", ["model", "second layer"])
def test_ctrl_c_returns_what_is_finished_and_holds_nothing(model, step, inside):
    rows = prompts(5, 7, 9)
    lengths = [3, 6, 9]
    expected = [alone(model, row, max_new_tokens=9) for row in rows]
    with generator(model) as batched:
        module = model if inside == "model" else model.model.layers[1]
        with failing(module, step, KeyboardInterrupt()):
            results = batched.generate(rows, max_new_tokens=lengths)
        assert [result.index for result in results] == [i for i in range(3) if lengths[i] <= step]
        assert_nothing_held(batched)
        again = batched.generate(rows, max_new_tokens=9)
    for result, single in zip(again, expected):
        assert_same(result, single)


def test_ctrl_c_in_the_first_step_still_tells_which_prompts_were_bad(model):
    with generator(model) as batched, failing(model, 0, KeyboardInterrupt()):
        results = batched.generate([[], [5, 6]], max_new_tokens=3)
    assert [result.index for result in results] == [0]


@pytest.mark.parametrize("step", [0, 3])
@pytest.mark.parametrize("inside", ["model", "second layer"])
def test_another_error_comes_out_and_nothing_is_held(model, step, inside):
    rows = ragged()
    with generator(model, step_tokens=9) as batched:
        module = model if inside == "model" else model.model.layers[1]
        with failing(module, step, Boom()), pytest.raises(Boom):
            batched.generate(rows, max_new_tokens=5)
        assert_nothing_held(batched)
        assert len(batched.generate(rows, max_new_tokens=5)) == 6


def test_an_error_that_ends_a_call_has_the_results_that_were_finished(model):
    rows = prompts(5, 7, 9)
    options = {"max_new_tokens": [9, 2, 4]}
    with generator(model) as batched:
        with failing(model, 5, Boom()), pytest.raises(Boom) as raised:
            batched.generate(rows, **options)
        found = batched.generate(rows, **options)
    assert [r.tokens for r in raised.value.results] == [found[i].tokens for i in (1, 2)]
    assert [r.index for r in raised.value.results] == [1, 2]
    assert raised.value.__notes__ == ["2 rows were finished: `results` of this error has them"]


def test_an_error_in_a_logits_processor_is_that_rows_own(model):
    class Picky(LogitsProcessor):
        def __call__(self, input_ids, scores):
            if input_ids.shape[1] == 7:
                raise Boom("seven")
            return scores

    rows = prompts(5, 8)
    with generator(model) as batched:
        results = batched.generate(rows, logits_processor=[Picky()], max_new_tokens=4)
        assert results[0].error.startswith("Boom")
        assert len(results[0].tokens) == 2
        assert results[1].tokens == tokens_alone(model, rows[1], max_new_tokens=4)
        assert_nothing_held(batched)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda scores: None,
        lambda scores: torch.cat([scores, scores + 99], 1),
        lambda scores: scores[:, :-1],
        lambda scores: scores.repeat(2, 1),
        lambda scores: scores.long(),
    ],
    ids=["None", "wider", "narrower", "two rows", "integers"],
)
@pytest.mark.parametrize("sampled", [False, True])
def test_a_row_whose_processor_returns_no_scores_ends_alone(model, spoil, sampled):
    class Picky(LogitsProcessor):
        def __call__(self, input_ids, scores):
            return spoil(scores) if input_ids.shape[1] == 7 else scores

    rows, options = prompts(5, 8), {"max_new_tokens": 4, "do_sample": sampled}
    with generator(model) as batched:
        results = batched.generate(rows, logits_processor=[Picky()], seed=2, **options)
        assert "logits_processor: expected Picky to return float scores" in results[0].error
        assert len(results[0].tokens) == 2
        assert results[1].tokens == tokens_alone(model, rows[1], seed=2, **options)
        assert_nothing_held(batched)


def test_an_error_in_a_stopping_criterion_is_that_rows_own(model):
    class Picky(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            if input_ids.shape[1] == 7:
                raise Boom("seven")
            return torch.tensor([False])

    rows = prompts(5, 8)
    with generator(model) as batched:
        results = batched.generate(rows, stopping_criteria=[Picky()], max_new_tokens=4)
        assert results[0].error == "Boom while looking whether the text ends: seven"
        assert len(results[0].tokens) == 2
        assert results[1].tokens == tokens_alone(model, rows[1], max_new_tokens=4)
        assert_nothing_held(batched)


@pytest.mark.parametrize("ids", [[5, 101], [-1], torch.tensor([7, 200])], ids=str)
def test_allowed_tokens_beyond_the_vocabulary_are_that_rows_error(model, ids):
    with generator(model) as batched:
        results = batched.generate(
            [[5, 6], [7, 8]],
            prefix_allowed_tokens_fn=lambda index, text: [3] if index else ids,
            max_new_tokens=2,
        )
        assert_nothing_held(batched)
    assert "prefix_allowed_tokens_fn: expected ids 0..100, got" in results[0].error
    assert results[1].tokens == [3, 3]


def test_a_row_that_may_say_nothing_is_its_own_error(model):
    with generator(model) as batched:
        results = batched.generate(
            [[5, 6], [7, 8]],
            do_sample=True,
            prefix_allowed_tokens_fn=lambda index, ids: [3] if index else [],
            max_new_tokens=2,
        )
    assert results[0].error
    assert results[1].tokens == [3, 3]


def test_changed_weights_make_no_use_of_what_was_cached_before(model):
    model = tiny("llama")  # of its own, to be changed
    rows = prompts(9, 13)
    with generator(model) as batched:
        batched.generate(rows, max_new_tokens=3)
        kept = batched.generate(rows, max_new_tokens=3)
        with torch.no_grad():
            for weight in model.parameters():
                weight.mul_(torch.linspace(0.5, 1.5, weight.shape[-1]))
        changed = batched.generate(rows, max_new_tokens=3)
        assert [result.cached_tokens for result in kept] == [8, 12]
        assert [result.cached_tokens for result in changed] == [0, 0]
        for result, row in zip(changed, rows, strict=True):
            assert result.tokens == tokens_alone(model, row, max_new_tokens=3)


def test_a_limit_far_beyond_the_pages_does_not_make_rows_wait_for_one_another(model):
    options = {"do_sample": True, "seed": 1, "eos_token_id": list(range(40, 60))}
    steps = []
    for limit in (64, 10**6):
        with generator(tiny("llama", max_position_embeddings=1 << 20)) as batched:
            batched.generate(prompts(*[6] * 40), max_new_tokens=limit, **options)
            steps.append(batched.stats.steps)
    assert steps[1] < 4 * steps[0]


def test_generators_in_several_threads_take_turns_on_the_same_pages(model):
    rows = [[3 + i, 4, 5] * 4 for i in range(12)]
    expected = [tokens_alone(model, row, max_new_tokens=6) for row in rows]
    with generator(model, max_tokens=2048) as first:
        others = [BatchGenerator(model, cache=first.cache) for _ in range(2)]
        found = [None] * 3

        def run(place: int, one: BatchGenerator) -> None:
            results = one.generate(rows, max_new_tokens=6, do_sample=False)
            found[place] = [result.tokens for result in results]

        threads = [Thread(target=run, args=pair) for pair in enumerate([first, *others])]
        interval = sys.getswitchinterval()
        sys.setswitchinterval(1e-5)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        sys.setswitchinterval(interval)
        assert found == [expected] * 3
        assert_nothing_held(first)


def test_a_closed_generator_says_so(model):
    batched = generator(model)
    stream = batched.stream(prompts(5), max_new_tokens=3)
    batched.close()
    for use in (lambda: next(stream), lambda: batched.generate(prompts(5))):
        with pytest.raises(ValueError, match="closed"):
            use()


@pytest.mark.parametrize("started", [False, True])
@pytest.mark.parametrize("how", ["close", "del"])
def test_a_stream_left_unfinished_holds_nothing(model, how, started):
    with generator(model) as batched:
        stream = batched.stream(prompts(5, 7), max_new_tokens=[2, 9])
        if started:
            next(stream)
            assert batched.cache.stats().sequences == 1
        if how == "close":
            stream.close()
        del stream
        gc.collect()
        assert_nothing_held(batched)


def test_two_streams_in_turn_are_both_right(model):
    one, two = branches(3, 5, 2), branches(4, 1, 6)
    expected = [[alone(model, row) for row in rows] for rows in (one, two)]
    lengths = {"max_new_tokens": [4, 7, 10]}
    with generator(model) as batched:
        streams = [batched.stream(rows, **lengths) for rows in (one, two)]
        for _ in range(3):
            for stream, singles in zip(streams, expected):
                result = next(stream)
                same = singles[result.index].sequences[0].tolist()
                assert result.tokens == same[-10:][: len(result.tokens)]
        assert [next(stream, None) for stream in streams] == [None, None]
        assert_nothing_held(batched)


@pytest.mark.parametrize("fields", [{}, {"host_tokens": 256}, {"max_tokens": 24}], ids=str)
def test_streams_of_two_models_on_the_same_pages_find_nothing_of_each_other(model, fields):
    rows, options = prompts(9, 9, 9), {"max_new_tokens": 6, "do_sample": False}
    other = tiny()
    with (
        generator(model, max_sequences=1, **fields) as ours,
        BatchGenerator(other, cache=ours.cache) as theirs,
    ):
        stream = ours.stream(rows, **options)
        results = [("ours", next(stream))]
        results += [("theirs", result) for result in theirs.generate(rows[1:2], **options)]
        results += [("ours", next(stream))]
        results += [("theirs", result) for result in theirs.generate(rows[:2], **options)]
        results += [("ours", result) for result in stream]
        results += [("theirs", result) for result in theirs.generate(rows, **options)]
        assert_nothing_held(ours)
    for whose, result in results:
        assert not result.error
        place = result.index + (whose == "theirs" and result is results[1][1])
        alone = tokens_alone(model if whose == "ours" else other, rows[place], **options)
        assert result.tokens == alone


def test_a_stream_that_goes_on_after_another_models_rows_leaves_nothing_for_changed_weights(model):
    rows, options = prompts(9, 9), {"max_new_tokens": 6, "do_sample": False}
    with (
        generator(model, max_sequences=1) as ours,
        BatchGenerator(tiny(), cache=ours.cache) as theirs,
    ):
        stream = ours.stream(rows, **options)
        next(stream)
        theirs.generate(rows, **options)
        next(stream)
        with torch.no_grad():
            model.model.layers[0].self_attn.k_proj.weight.mul_(2.0)
        changed = ours.generate(rows, **options)
    assert [result.cached_tokens for result in changed] == [0, 0]
    assert changed[1].tokens == tokens_alone(model, rows[1], **options)


def test_what_was_computed_by_hand_before_the_first_call_is_not_found_after_a_change(model):
    (row,) = prompts(9)
    with generator(model) as batched:
        cache = batched.cache
        seq = cache.add(row)
        step = cache.prepare([seq])
        with torch.inference_mode():
            batched._packed.logits(step)
        cache.commit(step)
        cache.free(seq)
        with torch.no_grad():
            model.model.layers[0].self_attn.k_proj.weight.mul_(2.0)
        (result,) = batched.generate([row], max_new_tokens=4, do_sample=False)
    assert result.cached_tokens == 0


@pytest.mark.parametrize("sizes", [{}, {"verify_width": 4}], ids=str)
@pytest.mark.parametrize("how", ["generate", "next"])
def test_rows_that_are_run_from_within_a_step_are_refused_and_hold_nothing(model, how, sizes):
    rows, options = prompts(5, 5), {"max_new_tokens": 4, "do_sample": False}
    others = []

    def calls(ids, scores):
        if how == "generate":
            batched.generate(rows, **options)
        else:
            next(others[0])
        return scores

    with generator(model, **sizes) as batched:
        others.append(batched.stream(rows, max_new_tokens=[1, 4], do_sample=False))
        next(others[0])
        (refused,) = ended_in_time(
            lambda: batched.generate(rows[:1], logits_processor=[calls], **options)
        )
        assert "OpenStepError while choosing a token: generate: rows cannot be" in refused.error
        others[0].close()
        assert_nothing_held(batched)
        assert batched.generate(rows, **options)[1].tokens == tokens_alone(
            model, rows[1], **options
        )


def ended_in_time(job):
    """What a function returns that might wait for ever."""
    found = []
    thread = Thread(target=lambda: found.append(job()), daemon=True)
    thread.start()
    thread.join(30)
    assert found, "it waits for ever, or raised"
    return found[0]


def test_stats_of_a_call_count_that_call_alone(model):
    with generator(model) as batched:
        older = batched.stream(prompts(5, 6), max_new_tokens=[1, 5])
        next(older)
        batched.generate(prompts(8), max_new_tokens=3)
        steps = batched.stats.steps
        assert len(list(older)) == 1
        assert (batched.stats.steps, batched.stats.new_tokens) == (steps, 3)


# ------------------------------------------------------------------ anything

LETTERS = st.lists(st.integers(2, 4), min_size=1, max_size=12)
MODELS = {family: tiny(family) for family in ("llama", "gemma3")}


@given(st.data())
@settings(deadline=None, max_examples=25)
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
