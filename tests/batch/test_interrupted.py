"""Calls and streams that are interrupted, abandoned or fail hold nothing afterwards."""

import gc
from threading import Thread

import pytest
import torch
from transformers import LogitsProcessor, StoppingCriteria

from pagedkv import BatchGenerator
from tests.batch.generating import (
    alone,
    assert_nothing_held,
    assert_same,
    branches,
    failing,
    generator,
    ragged,
    tokens_alone,
)
from tests.contents import Boom
from tests.hf.tiny import prompts, tiny


@pytest.mark.parametrize(
    ("inside", "step"), [("model", 0), ("second layer", 1), ("model", 4), ("second layer", 8)]
)
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


def test_a_limit_far_beyond_the_pages_does_not_make_rows_wait_for_one_another(model):
    options = {"do_sample": True, "seed": 1, "eos_token_id": list(range(40, 60))}
    steps = []
    for limit in (64, 10**6):
        with generator(tiny("llama", max_position_embeddings=1 << 20)) as batched:
            batched.generate(prompts(*[6] * 40), max_new_tokens=limit, **options)
            steps.append(batched.stats.steps)
    assert steps[1] < 4 * steps[0]


def test_a_closed_generator_says_so(model):
    batched = generator(model)
    stream = batched.stream(prompts(5), max_new_tokens=3)
    batched.close()
    for use in (lambda: next(stream), lambda: batched.generate(prompts(5))):
        with pytest.raises(ValueError, match="closed"):
            use()


@pytest.mark.parametrize("call", ["generate", "score"])
def test_a_generator_that_is_closed_within_a_step_says_so(model, call):
    with generator(model) as batched:
        model.model.layers[0].register_forward_pre_hook(lambda *_: batched.close())
        with pytest.raises(ValueError, match="this BatchGenerator was closed"):
            getattr(batched, call)(prompts(5), *([[[3]]] if call == "score" else []))
        assert_nothing_held(batched)


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
        assert (
            "OpenStepError while choosing a token: generate: called inside an open step"
            in refused.error
        )
        others[0].close()
        assert_nothing_held(batched)
        assert batched.generate(rows, **options)[1].tokens == tokens_alone(
            model, rows[1], **options
        )


def ended_in_time(job):
    """Returns the result of a function that might wait for ever."""
    found = []
    thread = Thread(target=lambda: found.append(job()), daemon=True)
    thread.start()
    thread.join(600)
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
