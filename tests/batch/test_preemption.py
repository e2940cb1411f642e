"""Rows of a job that are put back wait on the host where that takes less time."""

import pytest

from pagedkv.batch.preemption import Preemption
from pagedkv.batch.rows import NOT_RUNNING
from pagedkv.cache.pressure import PressureHandler, offload_idle
from tests.batch.generating import assert_like_alone, tokens_alone
from tests.batch.jobs import Job, hopeful, row
from tests.cases import one_group
from tests.contents import assert_contents, start
from tests.effort import each_value
from tests.hf.tiny import prompts, tiny


@pytest.fixture
def copying_pays(monkeypatch):
    monkeypatch.setattr(Preemption, "_pays", lambda aside, row: True)


@pytest.mark.parametrize(("page_size", "samples"), each_value([1, 4, 8], [0, 2]))
def test_rows_that_are_put_back_go_on_where_they_were(page_size, samples, copying_pays):
    job = hopeful(samples=samples, host_tokens=64, page_size=page_size, max_sequences=16)
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
    job = hopeful(page_size=4, host_tokens=64)
    preemption, cache = job.jobs.rows.preemption, job.cache
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
    job = hopeful(page_size=4, host_tokens=64)
    while not job.jobs.stats.preemptions:
        job.step()
    assert job.cache.stats().offloaded > 0
    if end == "fail":
        job.jobs.rows.fail(job.jobs.rows.waiting.popleft(), "on purpose")
        assert job.cache.stats().offloaded == 0
    if end == "dismiss":
        job.jobs.rows.fail_waiting("over")
        assert job.cache.stats().offloaded == 0
    (job.jobs.rows.close_later if end == "abandon" else job.jobs.rows.close)()
    assert job.cache.stats().sequences == job.cache.stats().offloaded == 0
    job.cache.check()


def test_rows_of_a_job_are_not_idle_between_its_steps():
    rows = [row([i, 1, 2], new=new) for i, new in enumerate((20, 4, 20))]
    job = Job(one_group(max_tokens=44, host_tokens=64), *rows)
    job.cache._pressure = PressureHandler(job.cache._tables, offload_idle)
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
    assert job.jobs.rows.preemption.offload_if_cheaper(one)
    job.jobs.rows._leave([one])
    job.jobs.rows.waiting.append(one)
    stranger = job.cache.add(max_tokens=12)  # the row was promised 28 of 32
    job.step()
    assert job.jobs.rows.running == [one]
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
