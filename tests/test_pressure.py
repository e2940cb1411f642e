"""What a user may do before pages run out, and what a batch job does when they do."""

import pytest

from pagedkv import OutOfPagesError, PagedKVCache
from pagedkv.batch.preemption import Preemption
from pagedkv.batch.rows import NOT_RUNNING
from pagedkv.cache.pressure import Pressure, PressureHandler, offload_idle
from pagedkv.errors import OffloadedError, OpenStepError, UnknownSequenceError
from tests.generating import assert_like_alone, tokens_alone
from tests.hf.tiny import prompts, tiny
from tests.support import advance, assert_contents, one_group, start
from tests.test_schedule import Job, row

# ------------------------------------------------------------------ the callback


class Asked:
    """A callback that notes why it was asked, and does what it is told."""

    def __init__(self, act=lambda cache, pressure: False) -> None:
        self.act, self.seen = act, list[Pressure]()

    def __call__(self, cache, pressure):
        self.seen.append(pressure)
        return self.act(cache, pressure)


def make(asked, **fields) -> PagedKVCache:
    config = one_group(**{"max_tokens": 24, "host_tokens": 64, **fields})
    return PagedKVCache(config, device="cpu", debug=True, on_pressure=asked)


def test_what_is_no_callback_is_refused_by_name():
    with pytest.raises(TypeError, match="on_pressure: expected a callable, got int"):
        make(3)


def test_a_step_that_the_callback_leaves_open_is_not_lost():
    opened = []

    def act(cache, pressure):
        cache.offload(pressure.idle[0])
        opened.append(cache.prepare([cache.add()], [[1]]))
        return True

    cache = make(act)
    _, b, _ = (start(cache, [i] * 8) for i in range(3))
    with pytest.raises(OpenStepError):
        cache.prepare([b], [[1]])
    assert cache.open_step is opened[0]
    cache.abort(opened[0])
    cache.check()
    assert_contents(cache, b, [1] * 8)


def test_the_user_is_asked_before_a_call_fails_and_told_who_waits():
    asked = Asked()
    cache = make(asked)
    a, b, c = (start(cache, [i] * 8) for i in range(3))
    with pytest.raises(OutOfPagesError):
        cache.prepare([b], [[1]])
    with pytest.raises(OutOfPagesError):
        cache.add(max_tokens=20)
    assert asked.seen == [
        Pressure("prepare", 1, 0, (b,), (a, c)),
        Pressure("add", 5, 0, (), (a, b, c)),
    ]
    cache.check()


def test_cached_prefixes_go_before_anybody_is_asked():
    asked = Asked()
    cache = make(asked)
    cache.free(start(cache, [9] * 16))
    start(cache, [1] * 20)
    assert not asked.seen


def test_the_sequence_that_has_waited_longest_is_offloaded_first_and_the_call_succeeds():
    asked = Asked(offload_idle)
    cache = make(asked)
    a, b = start(cache, [1] * 8), start(cache, [2] * 7)
    advance(cache, {a: [1] * 11})
    c = start(cache, [3] * 4)
    advance(cache, {c: [3] * 5})
    assert [cache.is_offloaded(seq) for seq in (a, b, c)] == [False, True, False]
    advance(cache, {c: [3] * 13})
    assert [cache.is_offloaded(seq) for seq in (a, b, c)] == [True, True, False]
    with pytest.raises(OffloadedError):
        cache.prepare([a], [[1]])
    cache.restore([a, b])  # which makes the third one wait
    assert cache.is_offloaded(c)
    for seq, text in ((a, [1] * 11), (b, [2] * 7)):
        assert_contents(cache, seq, text)
    assert [pressure.call for pressure in asked.seen] == ["prepare", "prepare", "restore"]


def test_who_is_in_an_open_step_does_not_wait():
    asked = Asked(offload_idle)
    cache = make(asked)
    a, b = start(cache, [1] * 8), start(cache, [2] * 8)
    cache.offload(b)
    c = start(cache, [3] * 12)
    with cache.step([c], [[1]], layers=()):
        cache.restore(b)
        assert_contents(cache, b, [2] * 8)
    assert asked.seen == [Pressure("restore", 2, 0, (b,), (a,))]
    cache.check()


def test_a_file_is_loaded_and_a_fork_made_where_the_user_makes_room(tmp_path):
    asked = Asked(offload_idle)
    cache = make(asked)
    a = start(cache, [1] * 9)
    cache.save(a, tmp_path / "x")
    b = start(cache, [2] * 10, max_tokens=12)
    c = cache.load(tmp_path / "x")
    assert (cache.is_offloaded(a), cache.is_offloaded(c)) == (True, False)
    cache.fork(b)
    assert [pressure.call for pressure in asked.seen] == ["load", "fork"]
    cache.check()


def test_the_user_may_free_or_truncate_instead():
    cache = make(Asked(lambda cache, pressure: cache.free(pressure.idle[0]) or True))
    a, b = start(cache, [1] * 12), start(cache, [2] * 12)
    advance(cache, {b: [2] * 13})
    assert cache.stats().sequences == 1
    cache = make(Asked(lambda cache, pressure: cache.truncate(pressure.idle[0], 4) or True))
    a, b = start(cache, [1] * 12), start(cache, [2] * 12)
    advance(cache, {b: [2] * 13})
    assert (cache.length(a), cache.length(b)) == (4, 13)


def test_a_user_who_changes_nothing_is_asked_once():
    asked = Asked(lambda cache, pressure: True)
    cache = make(asked)
    a = start(cache, [1] * 24)
    before = cache.stats()
    with pytest.raises(OutOfPagesError):
        cache.add(max_tokens=4)
    assert len(asked.seen) == 1
    assert cache.stats() == before
    assert_contents(cache, a, [1] * 24)


def test_what_the_callback_raises_comes_out_and_its_own_calls_ask_nobody():
    def act(cache, pressure):
        with pytest.raises(OutOfPagesError):
            cache.add(max_tokens=4)
        raise ZeroDivisionError

    asked = Asked(act)
    cache = make(asked)
    a = start(cache, [1] * 24)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            cache.add(max_tokens=4)
    assert len(asked.seen) == 2
    cache.check()
    assert_contents(cache, a, [1] * 24)


def test_a_sequence_that_took_the_row_of_another_did_not_step_when_that_did():
    asked = Asked()
    cache = make(asked, max_sequences=3)
    a = start(cache, [1] * 4)
    b = start(cache, [2] * 8)
    advance(cache, {a: [1] * 8})
    cache.free(a)
    new = cache.fork(b)[0]  # on the row of `a`, which was the last to step
    with pytest.raises(OutOfPagesError):
        cache.prepare([cache.add()], [[5] * 24])
    assert asked.seen[-1].idle == (new, b)


def test_the_user_may_free_what_is_to_be_restored():
    def act(cache, pressure):
        cache.free(pressure.seqs[0])
        return True

    cache = make(act)
    a, b, c = (start(cache, [i] * 8) for i in range(3))
    cache.offload([a, b])
    d = start(cache, [5] * 12)
    with pytest.raises(UnknownSequenceError, match=f"{a} is not a live sequence"):
        cache.restore([a, b])
    cache.check()
    for seq, tokens in ((c, [2] * 8), (d, [5] * 12)):
        assert_contents(cache, seq, tokens)


def test_where_the_host_is_full_as_well_the_call_fails():
    cache = make(Asked(offload_idle), host_tokens=4)
    start(cache, [1] * 12), start(cache, [2] * 12)
    with pytest.raises(OutOfPagesError):
        cache.add(max_tokens=4)
    cache.check()


# ------------------------------------------------------------------ rows of a job


@pytest.fixture
def copying_pays(monkeypatch):
    monkeypatch.setattr(Preemption, "_pays", lambda aside, row: True)


def hopeful(samples: int = 0, **fields) -> Job:
    """Rows that end early lead the scheduler to expect little of the long ones behind them."""
    short = [row([0, i % 3], new=20, ends=1) for i in range(8)]
    others = [row([1, i % 3], new=20, samples=samples) for i in range(4)]
    return Job(one_group(**{"max_tokens": 32, "host_tokens": 64, **fields}), *short, *others)


@pytest.mark.parametrize("page_size", [1, 4, 8])
@pytest.mark.parametrize("samples", [0, 2])
def test_rows_that_are_put_back_go_on_where_they_were(page_size, samples, copying_pays):
    job = hopeful(samples, page_size=page_size, max_sequences=16)
    job.run().verify()
    assert job.jobs.stats.offloaded == job.jobs.stats.preemptions > 0
    assert job.cache.stats().offloaded == 0
    texts = sum(len(one.prompt) + len(one.tokens) - 1 for one in job.rows)
    assert job.computed <= texts, "something was computed twice"


def test_a_host_that_is_full_leaves_rows_to_be_computed_again(copying_pays):
    job = hopeful(page_size=1, host_tokens=1)
    job.run().verify()
    assert job.jobs.stats.offloaded == 0 < job.jobs.stats.preemptions


def test_what_takes_less_time_is_chosen():
    job = hopeful(page_size=4)
    preemption, cache = job.jobs.preemption, job.cache
    one = row([1, 2, 3])
    one.seq = start(cache, [1, 2, 3])
    cache._tier.storage.out.add(1e9, 1.0)
    preemption.computing.add(1e9, 1.0)
    assert not preemption.offload_if_cheaper(one), "bytes are copied as fast as tokens are computed"
    for _ in range(20):
        preemption.computing.add(1.0, 1.0)
    assert preemption.offload_if_cheaper(one)
    assert one.seq == NOT_RUNNING
    preemption.free([one])
    assert cache.stats().sequences == 0


@pytest.mark.parametrize("end", ["close", "abandon", "dismiss", "fail"])
def test_rows_that_wait_on_the_host_leave_nothing_behind(end, copying_pays):
    job = hopeful(page_size=4)
    while not job.jobs.stats.preemptions:
        job.step()
    assert job.cache.stats().offloaded > 0
    if end == "fail":
        job.jobs.fail(job.jobs.waiting.popleft(), "on purpose")
        assert job.cache.stats().offloaded == 0
    if end == "dismiss":
        job.jobs.fail_waiting("over")
        assert job.cache.stats().offloaded == 0
    (job.jobs.close_later if end == "abandon" else job.jobs.close)()
    assert job.cache.stats().sequences == job.cache.stats().offloaded == 0
    job.cache.check()


def test_rows_of_a_job_are_not_idle_between_its_steps():
    rows = [row([i, 1, 2], new=new) for i, new in enumerate((20, 4, 20))]
    job = Job(one_group(max_tokens=44, host_tokens=64), *rows)
    job.cache._relief = PressureHandler(job.cache._tables, offload_idle)
    chat = start(job.cache, [7] * 12)
    job.run()
    assert job.cache.is_offloaded(chat)
    assert not job.cache.running
    job.cache.restore(chat)
    assert_contents(job.cache, chat, [7] * 12)
    job.cache.free(chat)
    job.verify()


def test_a_row_that_is_alone_comes_back_with_less_set_aside_if_need_be():
    one = row([0, 1, 2], new=24)
    job = Job(one_group(max_tokens=32, host_tokens=64), one)
    for _ in range(6):
        job.step()
    assert job.jobs.preemption.offload_if_cheaper(one)
    job.jobs._leave([one])
    job.jobs.waiting.append(one)
    stranger = job.cache.add(max_tokens=12)  # the row was promised 28 of 32
    job.step()
    assert job.jobs.running == [one]
    assert job.cache.stats().offloaded == 0
    job.cache.free(stranger)
    job.run().verify()


def test_a_generator_offloads_what_it_puts_back_and_results_are_the_same(copying_pays):
    model = tiny("llama")
    short, long = prompts(5)[0], prompts(*[4] * 5)
    ends = tokens_alone(model, short, seed=3, do_sample=True, max_new_tokens=2)[1]
    options = {"do_sample": True, "max_new_tokens": 24, "eos_token_id": ends, "seed": 3}
    sizes = {"max_tokens": 48, "host_tokens": 256}
    _, batched = assert_like_alone(model, [short] * 9 + long, sizes, **options)
    stats = batched.stats
    assert stats.offloaded == stats.preemptions > 0
    assert stats.computed <= stats.prompt_tokens + stats.new_tokens
