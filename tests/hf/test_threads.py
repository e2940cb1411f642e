"""Threads with caches of their own on the pages of one model: every answer is the model's alone."""

import copy
import pickle
import threading
from functools import partial

import pytest
import torch
from transformers import TextIteratorStreamer

from pagedkv import BatchGenerator
from pagedkv.hf import PagedCache
from tests.beside import LIMIT, run_all
from tests.effort import each_value, examples, sampled
from tests.hf.images import seeing, seeing_model
from tests.hf.threads import PLAIN, ROWS, SIZES, answers, case, rows_alone, shared
from tests.hf.tiny import assert_close, attention_of, named, prompts, tiny


@sampled
@pytest.mark.parametrize(
    ("family", "threads"), each_value(["llama", "gemma3", "qwen3_next", "deepseek_v3"], [2, 4])
)
def test_each_thread_gets_what_the_model_alone_says(family, threads):
    times = examples(30, 2)
    with shared(case(family)[0]):
        run_all(*(partial(answers, place, times, family) for place in range(threads)))


@sampled
def test_each_thread_forks_one_prefix_and_goes_on_for_two_turns():
    model, asked, _ = case()
    prefix, times = asked[0][0, :7], examples(20, 3)
    with shared(model) as kv, PagedCache.prefill(model, prefix, cache=kv) as start:

        def job(place):
            whole = torch.cat([prefix[None], asked[place]], dim=1)
            first = model.generate(whole, **PLAIN)
            second = model.generate(torch.cat([first, asked[place]], dim=1), **PLAIN)
            for _ in range(times):
                with start.fork() as own:
                    found = model.generate(whole, **named(own), **PLAIN)
                    assert torch.equal(found, first)
                    more = torch.cat([found, asked[place]], dim=1)
                    assert torch.equal(model.generate(more, **named(own), **PLAIN), second)

        run_all(*(partial(job, place) for place in range(3)))


@sampled
def test_caches_and_batch_generators_share_pages_among_threads():
    model, times = case()[0], examples(20, 3)
    expected = rows_alone()
    with shared(model) as kv, BatchGenerator(model, cache=kv) as batched:

        def batch():
            for _ in range(times):
                found = batched.generate(ROWS, **PLAIN)
                assert [result.tokens for result in found] == expected

        def both():
            for _ in range(times):
                answers(2)
                batch()

        run_all(partial(answers, 0, 4 * times), partial(answers, 1, 4 * times), batch, both)


@sampled
@pytest.mark.parametrize("kind", ["qwen2_vl", "qwen3_5"])
def test_each_thread_has_the_positions_of_its_own_images(kind):
    model, asked = seeing_model(kind), prompts(5, 5, 5)
    batches = [seeing(model, text, patches=4 + 4 * (i % 2)) for i, text in enumerate(asked)]
    ask = partial(model.generate, **PLAIN, suppress_tokens=[model.config.image_token_id])

    def longer(first):
        ids = torch.cat([first, torch.full((1, 3), 9)], dim=1)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    expected = []
    for batch in batches:
        first = ask(**batch)
        kinds = (longer(first)["input_ids"] == model.config.image_token_id).int()
        again = {**batch, **longer(first), "mm_token_type_ids": kinds}
        expected.append((first, ask(**again)))
    with shared(model):

        def job(place):
            first, second = expected[place]
            for _ in range(examples(10, 2)):
                with PagedCache(model, **SIZES) as own:
                    assert torch.equal(ask(**batches[place], **named(own)), first)
                    assert torch.equal(ask(**longer(first), **named(own)), second)

        run_all(*(partial(job, place) for place in range(3)))


# ------------------------------------------------------------------ who waits for whom


class Letters:
    """As much of a tokenizer as a streamer asks for."""

    def decode(self, ids, **_):
        return "".join(f"{int(i)} " for i in ids)


def test_streamers_hand_out_the_tokens_of_their_thread():
    model, asked, expected = case()
    with shared(model):
        streamers = [
            TextIteratorStreamer(Letters(), skip_prompt=True, timeout=LIMIT) for _ in "123"
        ]
        said = {}

        def listen(place):
            said[place] = "".join(streamers[place]).split()

        run_all(
            *(partial(answers, place, streamer=streamers[place]) for place in range(3)),
            *(partial(listen, place) for place in range(3)),
        )
    for place in range(3):
        assert said[place] == [str(i) for i in expected[place][0, asked[place].shape[1] :].tolist()]


def test_prompts_may_wait_for_the_answer_of_another_thread():
    model, _, expected = case()
    answered = threading.Event()
    with shared(model) as kv, BatchGenerator(model, cache=kv) as batched:

        def prompts_of_another():
            yield ROWS[0]
            assert answered.wait(LIMIT)
            yield expected[0][0].tolist()

        def asks():
            longer = model.generate(expected[0], **PLAIN)[0, expected[0].shape[1] :].tolist()
            found = batched.stream(prompts_of_another(), **PLAIN)
            assert sorted(result.tokens for result in found) == sorted([rows_alone()[0], longer])

        def replies():
            answers(0)
            answered.set()

        run_all(asks, replies)


def test_a_processor_of_generate_may_wait_for_the_answer_of_another_thread():
    answered = threading.Event()

    def waits(ids, scores):
        assert answered.wait(LIMIT)
        return scores

    def replies():
        answers(1)
        answered.set()

    with shared(case()[0]):
        run_all(partial(answers, 0, logits_processor=[waits]), replies)


def test_a_generate_ends_long_before_a_batch_that_had_begun():
    model, order = case()[0], []
    with shared(model) as kv, BatchGenerator(model, cache=kv) as batched:
        stream = batched.stream([[5, 6, 7], [8, 9]], max_new_tokens=[1, 240], do_sample=False)
        next(stream)

        def runs_on():
            assert [len(rest.tokens) for rest in stream] == [240]
            order.append("batch")

        def replies():
            answers(0)
            order.append("generate")

        run_all(runs_on, replies)
    assert order == ["generate", "batch"]


@pytest.mark.parametrize("threads", [2, 3])
def test_threads_that_make_the_first_caches_share_pages_and_the_last_to_close_detaches(threads):
    model, made = tiny(), []
    ready = threading.Barrier(threads)

    def make():
        ready.wait(LIMIT)
        made.append(PagedCache(model, **SIZES))

    def close():
        one = made.pop()
        ready.wait(LIMIT)
        one.close()

    for _ in range(5):
        run_all(*[make] * threads)
        assert len({id(one.kv) for one in made}) == 1
        run_all(*[close] * threads)
        assert attention_of(model) == "sdpa"
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())


def test_a_copy_of_a_model_that_sees_images_is_of_the_class_of_the_model():
    model = seeing_model("qwen2_vl")
    own = type(model.model)
    with PagedCache(model, **SIZES):
        model.model.rope_deltas = torch.tensor([[-7]])
        copies = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
        assert isinstance(model.model, own)
        for one in copies:
            assert type(one.model) is own
            assert one.model.rope_deltas.tolist() == [[-7]]
        run_all(lambda: setattr(model.model, "rope_deltas", None))
    assert type(model.model) is own
    assert model.model.rope_deltas.tolist() == [[-7]]


def test_a_model_that_is_attached_again_keeps_the_positions_that_it_has():
    """Positions of a thread from an earlier attachment once hid those that it saw since."""
    model = seeing_model("qwen2_vl")
    with PagedCache(model, **SIZES):
        model.model.rope_deltas = torch.tensor([[-7]])
    model.model.rope_deltas = torch.tensor([[-5]])
    with PagedCache(model, **SIZES):
        assert model.model.rope_deltas.tolist() == [[-5]]


@pytest.mark.parametrize("last", [0, 1])
def test_a_model_and_the_one_within_it_are_attached_side_by_side(last):
    """A class made of itself, and a model that stayed half attached."""
    model = seeing_model("qwen2_vl")
    own, batch = type(model.model), seeing(model, *prompts(5))
    with torch.no_grad():
        expected = model.model(**batch).last_hidden_state
    both = [PagedCache(model, **SIZES), PagedCache(model.model, **SIZES)]
    both[1 - last].close()
    run_all(lambda: setattr(model.model, "rope_deltas", torch.tensor([[-7]])))
    assert model.model.rope_deltas.tolist() != [[-7]]
    called = [model, model.model][last]
    with torch.no_grad():
        said = called(**batch, **named(both[last]), output_hidden_states=True).hidden_states[-1]
    assert_close(said, expected)
    both[last].close()
    assert type(model.model) is own
    assert attention_of(model) == "sdpa"
