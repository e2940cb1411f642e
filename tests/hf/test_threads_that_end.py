"""Threads that fail, are interrupted, end or fork within a forward, or go without the hooks."""

import os
import signal
import threading
from contextlib import contextmanager
from functools import partial

import pytest
import torch

from pagedkv import BatchGenerator
from pagedkv.errors import ForkedError, OpenStepError
from pagedkv.hf import PagedCache
from tests.beside import LIMIT, run_all, wait_until
from tests.effort import examples, sampled
from tests.hf.forwards import IDS, by_hand, dying, within
from tests.hf.threads import PLAIN, ROWS, SIZES, answers, case, forward, rows_alone, shared
from tests.hf.tiny import named

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
        before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may ignore it
        try:
            with pytest.raises(KeyboardInterrupt):
                forward(model, own)
        finally:
            signal.signal(signal.SIGINT, before)
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
                done.wait(0.001)  # else this thread keeps the others from running
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
    """Computes logits as a user's own loop would: `[T, vocab]`."""
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
    with (
        shared(model) as kv,
        PagedCache(model, **SIZES) as own,
        PagedCache(model, **SIZES) as other,
    ):

        @torch.no_grad()
        def hands():
            for call in (
                lambda: by_hand(model, IDS, other),
                lambda: model.model.forward(IDS, **named(other)),
                lambda: kv.prepare([], num_new=[]),
            ):
                with pytest.raises(OpenStepError, match="lock:` around each step"):
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
            with pytest.raises(OpenStepError, match="lock:` around each step"):
                forward(model, own)

        run_all(refused)
        assert (step.state, own.seen) == ("open", 0)
        kv.abort(step)
        kv.free(seq)
        answers(0)


# ------------------------------------------------------------------ os.fork


def in_child(action) -> str:
    """Runs an action in a forked child, which ends there; returns what it raised or returned."""
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

        def without():
            with pytest.raises(ForkedError):
                calls[0]()
            return torch.equal(model.generate(asked[0], **PLAIN), expected[0])

        assert [*map(in_child, (anew, without, own.close))] == ["True", "True", "None"]
        go_on.set()
        thread.join(LIMIT)
        own.close()
        answers(0)
