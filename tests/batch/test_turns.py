"""Jobs of several threads on the same pages, without a model and without threads.

Each job is told that a thread of its own runs it; the test plays these threads, one turn at a time.
What a job does in its turn is what `BatchGenerator` does.
"""

from __future__ import annotations

import threading
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedkv import PagedKVCache
from pagedkv.batch.rows import Row
from pagedkv.cache.fair_turns import Turn, Turns
from pagedkv.cache.lock import PagesLock
from tests.batch.jobs import Job, Watched, expected_tokens, row
from tests.cases import one_group, two_groups, window_only
from tests.effort import examples, sampled


class Lives:
    """A thread, as far as it is looked at."""

    def __init__(self) -> None:
        self.alive = True

    def is_alive(self) -> bool:
        return self.alive


class Played(Job):
    """A job on pages that others use as well, run by a thread that is played."""

    def __init__(self, cache: PagedKVCache, *rows: Row, step_tokens: int = 64) -> None:
        self.cache, self.computed = cache, 0
        self.jobs = Watched(cache, step_tokens)
        self.jobs.rows.turn.thread = Lives()
        self.jobs.rows.waiting.extend(rows)
        self.rows = [one for first in rows for one in (first, *first.samples)]
        cache.turns._jobs.append(self.jobs.rows)
        self.paused = False

    @property
    def over(self) -> bool:
        return not (self.jobs.rows.running or self.jobs.rows.waiting)

    def turn(self) -> bool:
        """A step, if the job need not wait for others; whether it had one."""
        turns = self.cache.turns
        if self.over or self.paused:
            return False
        if self.jobs.rows in turns._line and not turns._may_try(self.jobs.rows):
            return False
        self.jobs.rows.turn.tried = turns.departures
        ended = len(self.jobs.rows.ended)
        self.step()
        ended -= len(self.jobs.rows.ended)
        with self.cache.lock:
            turns.end(self.jobs.rows, waits=not (ended or self.jobs.rows.running))
            if self.over:
                turns.leave(self.jobs.rows)
        return True


def play(*jobs: Played, order=None, most: int = 5000) -> None:
    """Turns in a given order of jobs, then in rotation, until no job can have one."""
    for place in order or ():
        jobs[place % len(jobs)].turn()
    for _ in range(most):
        if not sum(job.turn() for job in jobs):  # each of them
            return
    raise AssertionError("rows are put back for one another without an end")


def cache_of(kind=one_group, **sizes) -> PagedKVCache:
    return PagedKVCache(kind(**sizes), device="cpu", debug=True)


def errors(job: Played) -> list[str | None]:
    return [one.error for one in job.rows]


# ------------------------------------------------------------------ rows wait for other threads'


@pytest.mark.parametrize(
    "sizes", [{"max_sequences": 2}, {"max_tokens": 16}, {"max_tokens": 8}], ids=str
)
@pytest.mark.parametrize("count", [2, 3, 4])
def test_rows_wait_while_those_of_other_threads_can_leave(count, sizes):
    cache = cache_of(**sizes)
    jobs = [Played(cache, *(row([i, k % 3, 1]) for k in range(5))) for i in range(count)]
    play(*jobs)
    for job in jobs:
        job.verify()


def test_a_row_that_is_alone_in_its_job_is_put_back_where_others_can_leave():
    cache = cache_of(max_tokens=16)
    one, two = (Played(cache, row([i, 0, 1], new=11)) for i in range(2))
    for job in (one, two):  # as if little were expected of them
        job.jobs.rows._share_used, job.jobs.rows._finished = 0.0, 1
    play(one, two)
    one.verify()
    two.verify()
    assert one.jobs.stats.preemptions + two.jobs.stats.preemptions > 0


def test_while_a_job_stands_in_line_nobody_elses_rows_join():
    cache = cache_of(max_tokens=16)
    long = Played(cache, row([0, 0, 0], new=9), *(row([0, 1, k], new=1) for k in range(3)))
    large = Played(cache, row([1] * 9, new=3))
    long.turn()
    large.turn()
    assert large.jobs.rows in cache.turns._line
    joined = [what for what, _, _ in long.jobs.events].count("join")
    while large.jobs.rows in cache.turns._line:
        long.turn()
        large.turn()
    assert [what for what, _, _ in long.jobs.events].count("join") == joined
    play(long, large)
    long.verify()
    large.verify()


def test_who_has_waited_longest_joins_first():
    cache = cache_of(max_sequences=1)
    jobs = [Played(cache, row([i], new=2), row([i, i], new=2)) for i in range(3)]
    order = []
    for job in jobs:
        note = job.jobs._note
        job.jobs._note = lambda what, rows, note=note, job=job: (
            order.append(jobs.index(job)) if what == "join" else None,
            note(what, rows),
        )
    play(*jobs)
    assert order == [0, 1, 2, 0, 1, 2]


@st.composite
def shared(draw):
    prompts = st.lists(st.integers(0, 2), min_size=1, max_size=10)
    count = st.integers(1, 12)
    rows = st.lists(st.tuples(prompts, count, count, st.integers(0, 2)), min_size=1, max_size=4)
    made = [[row(*each) for each in draw(rows)] for _ in range(draw(st.integers(2, 4)))]
    every = [one for rows in made for one in rows]
    sizes = {
        "page_size": draw(st.sampled_from([1, 3, 4])),
        "max_tokens": max(one.limit for one in every) + draw(st.integers(0, 16)),
        "max_sequences": draw(st.integers(1, 8)),
        "host_tokens": draw(st.sampled_from([0, 5, 40])),
    }
    cache = cache_of(draw(st.sampled_from([one_group, two_groups, window_only])), **sizes)
    step_tokens = draw(st.sampled_from([1, 2, 5, 64]))
    jobs = [Played(cache, *rows, step_tokens=step_tokens) for rows in made]
    for job in jobs:  # little is expected of some, so that pages run short
        job.jobs.rows._share_used = draw(st.sampled_from([0.0, 1.0]))
    return jobs, draw(st.lists(st.integers(0, 3), max_size=60))


@sampled
@given(shared())
@settings(max_examples=examples(60))
def test_any_jobs_in_any_order_of_turns_all_get_their_tokens(case):
    jobs, order = case
    happened = []
    for job in jobs:
        job.jobs.events = happened
    play(*jobs, order=order)
    for job in jobs:
        assert errors(job) == [None] * len(job.rows)
        job.verify()
    what = [each for each, _, _ in happened]
    for i, each in enumerate(what):
        if each == "back":  # nobody joins, in any job, until somebody has left
            assert next(after for after in what[i + 1 :] if after != "back") == "leave"


# ------------------------------------------------------------------ rows that can never leave


def holding(cache: PagedKVCache, row: Row) -> Played:
    """A stream that is paused while its row runs."""
    job = Played(cache, row)
    job.turn()
    job.paused = True
    assert job.jobs.rows.running
    return job


def test_rows_do_not_wait_for_a_stream_that_their_own_thread_has_paused():
    cache = cache_of(max_tokens=8)
    paused = holding(cache, row([0, 1]))
    paused.jobs.rows.turn.thread = threading.current_thread()
    job = Played(cache, row([1, 1, 1]))
    job.jobs.rows.turn.thread = threading.current_thread()
    assert not cache.turns.others_may_leave(job.jobs.rows), "nor before they stand in line"
    play(job)
    assert "pages" in errors(job)[0]


def test_rows_wait_for_a_stream_that_another_thread_has_paused_until_that_thread_ends():
    cache = cache_of(max_tokens=8)
    paused = holding(cache, row([0, 1]))
    job = Played(cache, row([1, 1, 1]), row([1, 1]))
    play(job)
    assert errors(job) == [None, None]
    assert not job.over
    paused.jobs.rows.turn.thread.alive = False
    play(job)
    assert ["pages" in str(error) for error in errors(job)] == [True, True]


def test_rows_that_wait_join_when_the_stream_that_holds_the_pages_is_dropped():
    cache = cache_of(max_tokens=12)
    paused = holding(cache, row([0, 1]))
    job = Played(cache, row([1, 1, 1]))
    other = holding(cache, row([2], new=3))  # which might leave as well
    play(job)
    assert not job.over
    paused.jobs.rows.close_later()  # as its finalizer does, without the lock
    play(job)
    assert job.over
    assert job.rows[0].tokens == expected_tokens(job.rows[0])
    assert other.jobs.rows.running


def test_threads_that_have_paused_what_the_others_wait_for_do_not_wait_for_ever():
    cache = cache_of(max_tokens=16)
    paused = [holding(cache, row([i, 1], new=6)) for i in range(2)]
    jobs = [Played(cache, row([i, 2, 2])) for i in range(2)]
    for stream, job in zip(paused, jobs):
        job.jobs.rows.turn.thread = stream.jobs.rows.turn.thread
    play(*jobs)
    assert "pages" in errors(jobs[0])[0]
    assert errors(jobs[1]) == [None], "the first thread may go on now"
    assert not jobs[1].over
    paused[0].paused = False
    play(paused[0], jobs[1])
    assert jobs[1].over
    assert errors(jobs[1]) == [None]


def test_rows_do_not_wait_for_sequences_that_no_job_runs():
    cache = cache_of(max_tokens=16)
    cache.add(max_tokens=8)
    jobs = [Played(cache, row([i] * 3, new=9)) for i in range(2)]
    play(*jobs)
    assert ["pages" in str(error) for job in jobs for error in errors(job)] == [True, True]


# ------------------------------------------------------------------ whose turn it is


def test_the_job_whose_last_turn_is_longest_ago_goes_first():
    turns = Turns(PagesLock())
    jobs = [
        SimpleNamespace(
            running=[], turn=SimpleNamespace(wanted=True, latest=latest, thread=Lives())
        )
        for latest in (5, 3, 4)
    ]
    turns._jobs += jobs
    assert [turns._is_next(job) for job in jobs] == [False, True, False]
    jobs[1].turn.wanted = False
    assert [turns._is_next(job) for job in jobs] == [False, True, True]
    jobs[2].turn.thread.alive = False
    assert turns._is_next(jobs[0])


def test_a_job_in_line_lets_others_go_first_while_it_reads_prompts():
    """They may be what its prompts come from: each would wait for the other for ever."""
    turns = Turns(lock := PagesLock())
    reader, other = (SimpleNamespace(turn=Turn(), running=[]) for _ in range(2))
    with lock:
        turns.end(reader, waits=True)
        assert not turns.may_join(other)
        with reader.turn.reading(lambda: None):
            assert turns.may_join(other)
        assert not turns.may_join(other)
        assert turns.may_join(reader)
