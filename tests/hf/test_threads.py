"""Threads with caches of their own on the pages of one model: every answer is the model's alone."""

import gc
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial

import pytest
import torch
from transformers import TextIteratorStreamer

from pagedkv import BatchGenerator, PagedKVCache
from pagedkv.errors import ForkedError, OpenStepError
from pagedkv.hf import PagedCache
from tests.beside import LIMIT, run_all, wait_until
from tests.effort import each_value, examples, sampled
from tests.hf.forwards import IDS, by_hand, dying, within
from tests.hf.images import seeing, seeing_model
from tests.hf.tiny import FAMILIES, attention_of, named, prompts, tiny
from tests.hf.zoo import built

SIZES = {"page_size": 4, "max_tokens": 2048}
PLAIN = {"max_new_tokens": 10, "do_sample": False}
ROWS = [[3 + 7 * i, 4, 5, 6, 7][: 2 + i % 4] for i in range(8)]


@cache
def case(family: str = "llama"):
    """A model, a prompt for each of four threads, and what the model alone says to them."""
    model = tiny(family) if family in FAMILIES else built(family)
    asked = [torch.stack(prompts(9 + i)) for i in range(4)]
    return model, asked, [model.generate(ids, **PLAIN) for ids in asked]


@cache
def rows_alone():
    model = case()[0]
    return [model.generate(torch.tensor([row]), **PLAIN)[0, len(row) :].tolist() for row in ROWS]


@contextmanager
def shared(model) -> Iterator[PagedKVCache]:
    """The pages of a model, which nobody holds any of afterwards, nor waits for."""
    before = attention_of(model)
    with PagedCache(model, **SIZES) as keeper:
        yield keeper.kv
        gc.collect()
        assert keeper.stats().sequences == 0
        keeper.kv.check()
        assert keeper.kv.lock.forward is None
        assert not keeper.kv.turns._jobs
    assert attention_of(model) == before
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())


def answers(place: int, times: int = 1, family: str = "llama", **options) -> None:
    """Generates with new caches; each answer has to be the model's alone."""
    model, asked, expected = case(family)
    for _ in range(times):
        with PagedCache(model, **SIZES) as own:
            found = model.generate(asked[place], **named(own), **{**PLAIN, **options})
        assert torch.equal(found, expected[place])


@torch.no_grad()
def forward(model, own):
    return model(IDS, **named(own)).logits


@sampled
@pytest.mark.parametrize(
    ("family", "threads"), each_value(["llama", "gemma3", "qwen3_next", "deepseek_v3"], [2, 4])
)
def test_each_thread_gets_what_the_model_alone_says(family, threads):
    times = examples(30, 4)
    with shared(case(family)[0]):
        run_all(*(partial(answers, place, times, family) for place in range(threads)))


@sampled
def test_each_thread_forks_one_prefix_and_goes_on_for_two_turns():
    model, asked, expected = case()
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
        streamers = [TextIteratorStreamer(Letters(), skip_prompt=True, timeout=LIMIT) for _ in "123"]
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
    model, asked, expected = case()
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


def test_two_threads_that_make_the_first_caches_share_their_pages():
    model = tiny()
    for _ in range(5):
        ready, made = threading.Barrier(3), []

        def make():
            ready.wait(LIMIT)
            made.append(PagedCache(model, **SIZES))

        run_all(make, make, make)
        assert len({id(one.kv) for one in made}) == 1
        ready.reset()

        def close():
            one = made.pop()
            ready.wait(LIMIT)
            one.close()

        run_all(close, close, close)
        assert attention_of(model) == "sdpa"
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())


# ------------------------------------------------------------------ errors, interrupts, ends


@sampled
def test_errors_in_the_forwards_of_one_thread_leave_the_others_alone():
    model, done = case()[0], threading.Event()
    mine = threading.local()

    def dies(*_):
        if getattr(mine, "fails", False):
            raise ZeroDivisionError

    def fails():
        mine.fails = True
        while not done.is_set():
            for part in (model.model.layers[1], model.lm_head):
                hook = part.register_forward_pre_hook(dies)
                with PagedCache(model, **SIZES) as own, pytest.raises(ZeroDivisionError):
                    forward(model, own)
                assert (own.seen, own.opened) == (0, None)
                hook.remove()

    def others():
        try:
            run_all(partial(answers, 0, examples(30, 6)), partial(answers, 1, examples(30, 6)))
        finally:
            done.set()

    with shared(model):
        run_all(fails, others)


@contextmanager
def left(model, own, error, after: str):
    """Within it a forward of this thread has ended by an error that no hook was told of."""
    part = {"embedding": model.model.embed_tokens, "layer": model.model.layers[1]}.get(after, model)
    with dying(part, error, True), pytest.raises(error):
        forward(model, own)
    yield


@pytest.mark.parametrize("after", ["embedding", "layer", "model"])
@pytest.mark.parametrize("filled", [False, True])
def test_threads_go_on_after_an_interrupt_whose_thread_only_waits_for_them(after, filled):
    model = case()[0]
    with shared(model) as kv, BatchGenerator(model, cache=kv) as batched:
        own = PagedCache(model, **SIZES)
        if filled:
            forward(model, own)
        expected = forward(model, own.fork())
        length = own.seen
        with left(model, own, KeyboardInterrupt, after):
            assert kv.lock.forward is not None
            found = []
            run_all(  # this thread calls nothing but a join
                partial(answers, 0, 2),
                partial(answers, 1, 2),
                lambda: found.extend(batched.generate(ROWS, **PLAIN)),
            )
            assert [result.tokens for result in found] == rows_alone()
            assert own.seen == length
        assert torch.equal(forward(model, own), expected)
        own.close()


@pytest.mark.parametrize("after", ["embedding", "layer", "model"])
def test_threads_go_on_after_one_that_ended_within_a_forward(after):
    model, kept = case()[0], []
    with shared(model) as kv:

        def ends():
            kept.append(PagedCache(model, **SIZES))
            with left(model, kept[0], SystemExit, after):
                pass

        run_all(ends)
        assert kv.lock.forward is not None
        run_all(partial(answers, 0), partial(answers, 1))
        assert kept[0].seen == 0
        forward(model, kept[0])
        assert kept.pop().seen == 3


def test_an_interrupt_while_a_thread_waits_for_its_turn_holds_nothing():
    model, under_way, go_on = case()[0], threading.Event(), threading.Event()
    main = threading.main_thread().ident

    def stands():
        under_way.set()
        assert go_on.wait(LIMIT)

    def holds():
        with within(model.model.layers[1], stands):
            PagedCache.prefill(model, IDS, **SIZES).close()

    def presses():
        wait_until(lambda: kv.turns._asleep)
        signal.pthread_kill(main, signal.SIGINT)

    with shared(model) as kv, PagedCache(model, **SIZES) as own:
        threads = [threading.Thread(target=job, daemon=True) for job in (holds, presses)]
        threads[0].start()
        assert under_way.wait(LIMIT)
        threads[1].start()
        with pytest.raises(KeyboardInterrupt):
            forward(model, own)
        go_on.set()
        for thread in threads:
            thread.join(LIMIT)
        run_all(partial(answers, 0), partial(answers, 1))


@sampled
@pytest.mark.parametrize("how", ["closed", "collected"])
def test_caches_may_be_closed_or_collected_by_another_thread(how):
    model, asked, expected = case()
    used, done = [], threading.Event()
    with shared(model):

        def fills():
            try:
                for _ in range(examples(30, 6)):
                    used.append(PagedCache(model, **SIZES))
                    found = model.generate(asked[0], **named(used[-1]), **PLAIN)
                    assert torch.equal(found, expected[0])
            finally:
                done.set()

        def empties():
            while len(used) > 1 or not done.is_set():
                if len(used) > 1:
                    one = used.pop(0)
                    if how == "closed":
                        one.close()
                    del one

        run_all(fills, empties, partial(answers, 1, examples(30, 6)))
        used.clear()


def test_a_cache_that_another_thread_closes_within_its_forward_is_closed_behind_it():
    model, begun = case()[0], threading.Event()
    with shared(model):
        own = PagedCache(model, **SIZES)

        def computes():
            with within(model.model.layers[1], lambda: (begun.set(), closer.join(0.3))):
                forward(model, own)
            assert own.seen == 3

        def closes():
            assert begun.wait(LIMIT)
            own.close()

        closer = threading.Thread(target=closes, daemon=True)
        closer.start()
        run_all(computes)
        closer.join(LIMIT)
        with pytest.raises(ValueError, match="was closed"):
            forward(model, own)


# ------------------------------------------------------------------ without hooks


def own_loop(model, kv, ids):
    """What a loop of a user's computes: `[T, vocab]`."""
    with BatchGenerator(model, cache=kv) as batched:
        packed = batched._packed
        seq = kv.add()
        try:
            with kv.step([seq], [ids]) as step:
                rows = torch.arange(len(ids))
                return packed.logits(step, rows).clone()
        finally:
            kv.free(seq)


@sampled
def test_steps_of_ones_own_and_layers_by_hand_hold_the_lock():
    model = case()[0]
    with torch.no_grad():
        expected = model(IDS, use_cache=False).logits
    with shared(model) as kv:

        @torch.no_grad()
        def steps():
            for _ in range(examples(20, 5)):
                with kv.lock:
                    found = own_loop(model, kv, IDS[0].tolist())
                torch.testing.assert_close(found, expected[0])

        @torch.no_grad()
        def hands():
            for _ in range(examples(20, 5)):
                with PagedCache(model, **SIZES) as own, kv.lock:
                    found = model.lm_head(by_hand(model, IDS, own))
                torch.testing.assert_close(found, expected)

        run_all(steps, hands, partial(answers, 0, examples(20, 5)))


@torch.no_grad()
def test_layers_by_hand_without_the_lock_are_refused_while_a_forward_is_under_way():
    model, refused = case()[0], []
    with shared(model) as kv, PagedCache(model, **SIZES) as own, PagedCache(model, **SIZES) as other:

        @torch.no_grad()
        def hands():
            for call in (
                lambda: by_hand(model, IDS, other),
                lambda: model.model.forward(IDS, **named(other)),
                lambda: kv.prepare([], num_new=[]),
            ):
                with pytest.raises(OpenStepError, match="with cache.lock"):
                    call()
                refused.append(call)

        with within(model.model.layers[1], lambda: run_all(hands)):
            forward(model, own)
        assert (len(refused), own.seen, other.seen) == (3, 3, 0)


@torch.no_grad()
def test_a_forward_is_refused_while_another_thread_has_a_step_open_without_the_lock():
    model = case()[0]
    with shared(model) as kv, PagedCache(model, **SIZES) as own:
        seq = kv.add()
        step = kv.prepare([seq], [[5, 6]])

        def refused():
            with pytest.raises(OpenStepError, match="with cache.lock"):
                forward(model, own)

        run_all(refused)
        assert (step.state, own.seen) == ("open", 0)
        kv.abort(step)
        kv.free(seq)
        answers(0)


# ------------------------------------------------------------------ os.fork


def in_child(action) -> str:
    """What an action raises in a forked child, or returns, which ends there."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            said = repr(action())
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(write, said.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    return said


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no os.fork here")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("held", [False, True])
def test_a_forked_child_is_refused_the_pages_and_may_make_its_own(held):
    model, asked, expected = case()
    with shared(model) as kv, BatchGenerator(model, cache=kv) as batched:
        own = PagedCache.prefill(model, asked[0], cache=kv)
        calls = [
            lambda: model.generate(asked[0], **named(own), **PLAIN),
            own.fork,
            own.stats,
            lambda: batched.generate(ROWS, **PLAIN),
            kv.add,
            lambda: kv.lock,
        ]
        begun, go_on = threading.Event(), threading.Event()

        def computes():
            if held:  # by a thread that the child does not have
                with within(model.model.layers[1], lambda: (begun.set(), go_on.wait(LIMIT))):
                    answers(1)
            begun.set()

        thread = threading.Thread(target=computes, daemon=True)
        thread.start()
        assert begun.wait(LIMIT)
        for call in calls:
            assert in_child(call).startswith(ForkedError.__name__)

        def anew():
            with PagedCache(model, **SIZES) as one:
                return torch.equal(model.generate(asked[0], **named(one), **PLAIN), expected[0])

        assert (in_child(anew), in_child(own.close)) == ("True", "None")
        go_on.set()
        thread.join(LIMIT)
        own.close()
        answers(0)
