"""`BatchGenerator` in several threads on the same pages: every row ends, whoever holds pages."""

from __future__ import annotations

import queue
import signal
import threading
import time
from functools import cache
from itertools import groupby
from threading import Thread

import pytest

from pagedkv import BatchGenerator
from pagedkv.batch.runner import StepRunner
from tests.batch.generating import alone, assert_nothing_held, assert_same, generator
from tests.beside import LIMIT, run_all, wait_until
from tests.effort import each_value, slow
from tests.hf.tiny import tiny

ROWS = [[3 + 7 * i, 4, 5, 6, 7][: 2 + i % 4] for i in range(8)]
PLAIN = {"max_new_tokens": 12, "do_sample": False}
SAMPLED = {"max_new_tokens": 7, "do_sample": True, "seed": 3, "num_return_sequences": 2}


@cache
def model_of(family: str):
    return tiny(family)


@cache
def expected(family: str, sampled: bool):
    """Computes each row, and each sample of it, by itself."""
    if not sampled:
        return [[alone(model_of(family), row, **PLAIN)] for row in ROWS]
    own = {name: SAMPLED[name] for name in ("max_new_tokens", "do_sample")}
    return [[alone(model_of(family), row, seed=3 + k, **own) for k in range(2)] for row in ROWS]


def assert_all_as_alone(results, singles) -> None:
    samples = len(singles[0])
    assert [(r.index, r.sample) for r in results] == [
        (i, k) for i in range(len(ROWS)) for k in range(samples)
    ]
    for result in results:
        assert_same(result, singles[result.index][result.sample])


SIZES = {
    "few places": {"max_sequences": 5},
    "few pages": {"max_tokens": 64},
    "one row at a time": {"max_tokens": 24},
}


@pytest.mark.parametrize(
    ("how", "family", "threads", "short"),
    each_value(["greedy", "samples"], ["llama", "gemma3"], [2, 4], SIZES),
)
def test_every_row_of_every_thread_finishes_as_if_alone(short, threads, family, how):
    sizes, sampled = SIZES[short], how == "samples"
    singles = expected(family, sampled)
    found = [None] * threads
    with generator(model_of(family), **sizes) as first:
        generators = [first, BatchGenerator(first.model, cache=first.cache)] * (threads // 2)

        def job(place):
            found[place] = generators[place].generate(ROWS, **(SAMPLED if sampled else PLAIN))

        run_all(*[lambda place=place: job(place) for place in range(threads)])
        for results in found:
            assert_all_as_alone(results, singles)
        assert_nothing_held(first)


@pytest.mark.parametrize(
    "sizes", [*slow({"max_sequences": 16}, {"max_tokens": 320}), {"max_tokens": 48}]
)
def test_more_rows_than_fit_in_each_of_two_threads_on_pages_of_default_size(sizes):
    rows = [[3 + i % 90, 4, 5, 6, 7] for i in range(12 if "max_tokens" in sizes else 40)]
    found = {}
    with BatchGenerator(model_of("llama"), **{"max_tokens": 4000, **sizes}) as batched:

        def job(place):
            found[place] = batched.generate(rows, max_new_tokens=20, do_sample=False)

        run_all(lambda: job(0), lambda: job(1))
        assert_nothing_held(batched)
    assert {result.error for results in found.values() for result in results} == {None}
    assert [r.tokens for r in found[0]] == [r.tokens for r in found[1]]


def test_threads_take_turns_of_one_step_each(monkeypatch):
    order, run = [], StepRunner.run

    def noted(runner, *batch):
        order.append(threading.get_ident())
        return run(runner, *batch)

    monkeypatch.setattr(StepRunner, "run", noted)
    with generator(model_of("llama"), max_tokens=2048) as batched:
        ready = threading.Barrier(2)

        def job():
            stream = batched.stream(ROWS, max_new_tokens=[1] + [40] * 7)
            next(stream)
            ready.wait(LIMIT)
            list(stream)

        run_all(job, job)
    both = order[order.index(order[-1]) :]
    both = both[len(both) // 4 : -len(both) // 4]  # while both run
    assert max(len(list(run)) for _, run in groupby(both)) <= 2


# ------------------------------------------------------------------ streams that are paused

HELD = {"max_tokens": 24}  # six pages, of which `hold` takes five


def hold(batched: BatchGenerator):
    """A stream that is paused while its second row holds pages."""
    stream = batched.stream([ROWS[0], ROWS[1]], max_new_tokens=[1, 17], do_sample=False)
    assert next(stream).index == 0
    return stream


@pytest.mark.parametrize("how", ["closed", "collected"])
def test_a_row_that_waits_goes_on_when_the_stream_that_holds_its_pages_goes(how):
    results, held = [], threading.Event()
    with generator(model_of("llama"), **HELD) as batched:

        def holds():
            stream = hold(batched)
            held.set()
            wait_until(lambda: batched.cache.turns._line)
            if how == "closed":
                stream.close()
            del stream
            wait_until(lambda: results)  # while this thread lives on

        def waits():
            held.wait(LIMIT)
            results.extend(batched.generate(ROWS, **PLAIN))

        run_all(holds, waits)
        assert_nothing_held(batched)
    assert_all_as_alone(results, expected("llama", False))


def test_a_row_does_not_wait_for_a_stream_whose_thread_has_ended():
    streams, results = [], []
    with generator(model_of("llama"), **HELD) as batched:
        run_all(lambda: streams.append(hold(batched)))
        run_all(lambda: results.extend(batched.generate(ROWS[3:4], **PLAIN)))
        assert "a stream that is paused" in results[0].error
        assert [len(rest.tokens) for rest in streams[0]] == [17], "another thread may go on with it"
        assert_nothing_held(batched)


def test_a_row_that_waits_ends_where_its_time_is_over():
    held, done, results = threading.Event(), threading.Event(), []
    with generator(model_of("llama"), **HELD) as batched:

        def holds():
            stream = hold(batched)
            held.set()
            assert done.wait(LIMIT)
            stream.close()

        def waits():
            held.wait(LIMIT)
            results.extend(batched.generate(ROWS[3:4], max_time=0.3, **PLAIN))
            done.set()

        run_all(holds, waits)
    assert "max_time" in results[0].error


def test_ctrl_c_ends_a_call_whose_rows_wait():
    held, over = threading.Event(), threading.Event()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with generator(model_of("llama"), **HELD) as batched:

            def holds():
                stream = hold(batched)
                held.set()
                assert over.wait(LIMIT)
                stream.close()

            def presses():
                held.wait(LIMIT)
                wait_until(lambda: batched.cache.turns._line)
                signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)

            threads = [Thread(target=job, daemon=True) for job in (holds, presses)]
            for thread in threads:
                thread.start()
            held.wait(LIMIT)
            results = batched.generate([[], *ROWS], **PLAIN)
            over.set()
            for thread in threads:
                thread.join(LIMIT)
            assert [result.index for result in results] == [0]
            assert not batched.cache.turns._line
            assert_free(batched.cache.lock.raw)
            assert_nothing_held(batched)
            assert len(batched.generate(ROWS, **PLAIN)) == len(ROWS)
    finally:
        signal.signal(signal.SIGINT, before)


def assert_free(lock) -> None:
    found = []

    def try_it():
        found.append(lock.acquire(blocking=False))
        if found[0]:
            lock.release()

    thread = Thread(target=try_it)
    thread.start()
    thread.join()
    assert found == [True]


def test_ctrl_c_twice_while_another_thread_computes_holds_nothing():
    computes, over = threading.Event(), threading.Event()
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with generator(model_of("llama")) as batched:
            stream = batched.stream(ROWS, max_new_tokens=[1] + [9] * 7, do_sample=False)
            next(stream)

            def steps():
                with batched.cache.lock:
                    computes.set()
                    assert over.wait(LIMIT)

            def presses():
                for _ in range(2):
                    time.sleep(0.3)
                    signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
                over.set()

            threads = [Thread(target=job, daemon=True) for job in (steps, presses)]
            threads[0].start()
            computes.wait(LIMIT)
            threads[1].start()
            with pytest.raises(KeyboardInterrupt):
                next(stream)
            for thread in threads:
                thread.join(LIMIT)
            assert not batched.cache.turns._jobs
            assert_nothing_held(batched)
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_step_that_is_interrupted_is_taken_back_before_other_threads_have_their_turn():
    repeats, stepped = [[5, 6, 7, 8] * 4], []

    def interrupts(ids, scores):
        if ids.shape[1] > 18:
            raise KeyboardInterrupt
        return scores

    with generator(model_of("llama"), verify_width=4) as batched:

        def ends():
            options = {"logits_processor": [interrupts], **PLAIN}
            assert batched.generate(repeats, **options) == []

        def goes_on():
            stepped.extend(batched.generate(ROWS, **PLAIN))

        for _ in range(4):
            run_all(goes_on, ends, ends, ends, goes_on)
        assert_nothing_held(batched)
    assert len(stepped) == 8 * len(ROWS)
    assert not any(result.error for result in stepped)


@pytest.mark.parametrize(("tokens", "ahead"), [(64, False), (160, True)])
def test_prompts_that_come_of_what_another_thread_finds_do_not_hold_its_pages(tokens, ahead):
    """Each would wait for the other: the reader for a row, that row for the reader's pages."""
    model, asked = model_of("llama"), [[3 + 7 * i, *range(4, 28)] for i in range(6)]
    singles = [alone(model, row, **PLAIN) for row in asked]
    told, found = queue.Queue(), []
    with generator(model, page_size=8, max_tokens=tokens) as batched:
        batched._ahead = ahead  # as on a card, where tokens are in flight while a prompt is read

        def reads():
            given = (told.get(timeout=LIMIT) for _ in asked)
            found.extend(batched.generate(given, **PLAIN))

        def tells():
            told.put(asked[0])
            for row, known in zip(asked[1:], singles[1:], strict=True):
                (result,) = batched.generate([row], **PLAIN)
                assert_same(result, known)
                told.put(row)

        run_all(reads, tells)
        assert_nothing_held(batched)
    assert len(found) == len(asked)
    for result, known in zip(found, singles, strict=True):
        assert_same(result, known)


def test_an_iterator_that_runs_rows_itself_gets_the_pages_of_its_own_job():
    model = model_of("llama")
    asked = [[3 + 7 * i, *range(4, 12)] for i in range(4)]
    singles = [alone(model, row, **PLAIN) for row in asked]
    with generator(model, page_size=8, max_tokens=24) as batched:

        def given():
            for row, known in zip(asked, singles, strict=True):
                (result,) = batched.generate([row], **PLAIN)
                assert_same(result, known)
                yield row

        for result, known in zip(batched.generate(given(), **PLAIN), singles, strict=True):
            assert_same(result, known)
        assert_nothing_held(batched)
