"""`Scheduler` without a model: what joins, waits, is put back, and is computed how often."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedkv.batch.rows import NOT_RUNNING, Row
from pagedkv.retention import Fifo
from tests.batch.jobs import Job, expected_tokens, hopeful, row
from tests.cases import one_group, two_groups, window_only
from tests.contents import assert_contents, write_step
from tests.effort import examples, sampled

# ------------------------------------------------------------------ composing a step


def test_decoding_rows_come_first_and_prompts_fill_the_rest_of_a_step():
    a, b = row([0] * 4), row([1] * 7)
    job = Job(one_group(), a, b, step_tokens=6)
    first, second, third = job.step(), job.step(), job.step()
    assert (first.rows, first.counts, first.sampling) == ([a, b], [4, 2], [a])
    assert (second.rows, second.counts, second.sampling) == ([a, b], [1, 5], [a, b])
    assert (third.rows, third.counts, third.sampling) == ([a, b], None, [a, b])
    job.run().verify()


def test_a_prompt_longer_than_a_step_is_computed_in_chunks_and_ready_with_the_last():
    job = Job(one_group(), row([0, 1, 2] * 4), step_tokens=5)
    batches = [job.step() for _ in range(3)]
    assert [batch.counts for batch in batches] == [[5], [5], [2]]
    assert [len(batch.sampling) for batch in batches] == [0, 0, 1]
    job.run().verify()


def test_a_step_takes_no_more_than_the_cache_allows():
    job = Job(one_group(max_step_tokens=3), row([0, 1] * 5), row([1] * 5), step_tokens=64)
    while batch := job.step():
        assert sum(batch.counts or [1] * len(batch.rows)) <= 3
    job.verify()


def test_decoding_rows_all_get_their_token_however_small_the_step():
    job = Job(one_group(), row([0, 1, 2], samples=3), step_tokens=1)
    for _ in range(3):
        job.step()
    assert len(job.step().rows) == 4
    job.run().verify()


def test_more_samples_than_a_step_of_the_cache_can_feed_take_turns():
    job = Job(one_group(max_step_tokens=2), row([0, 1, 2], samples=3))
    job.run().verify()


def test_rows_join_in_the_order_they_came_as_places_become_free():
    rows = [row([i % 3, i // 3, 1], new=1 + i % 3) for i in range(7)]
    job = Job(one_group(max_sequences=2), *rows)
    job.run().verify()
    assert [one for what, one, _ in job.jobs.events if what == "join"] == rows


def test_more_rows_than_are_looked_at_in_a_step_all_get_their_turn():
    job = Job(one_group(), *(row([i % 3] * (1 + i % 5), new=1) for i in range(300)))
    job.run().verify()


# ------------------------------------------------------------------ a prefix is computed once


PREFIX = [0, 1, 2, 2, 1, 0, 0, 2, 1, 1, 2, 0]  # 12 tokens

# prompts, and how many of their tokens go through the model
SHARED = {
    "alone": ([PREFIX], 12),
    "branches": ([[*PREFIX, 0, 0], [*PREFIX, 1], [*PREFIX, 2, 2, 2]], 12 + 2 + 1 + 3),
    "ends inside a page": ([[*PREFIX[:10], 2, 2], [*PREFIX[:10], 1, 1]], 10 + 2 + 2),
    "the same": ([PREFIX] * 4, 12 + 3),  # of each the last token, for its logits
    "ever longer": ([PREFIX[:5], PREFIX[:9], PREFIX], 12),
    "ever shorter": ([PREFIX, PREFIX[:9], PREFIX[:5]], 12 + 1 + 1),
    "a tree": (
        [[*PREFIX, 0], [*PREFIX[:8], 0, 0], [*PREFIX, 1], [*PREFIX[:8], 0, 1], [1] * 5],
        13 + 2 + 1 + 1 + 5,
    ),
}


@pytest.mark.parametrize("step_tokens", [1, 5, 64])
@pytest.mark.parametrize("page_size", [1, 4])
@pytest.mark.parametrize("case", SHARED)
def test_a_prefix_of_rows_that_start_together_is_computed_once(case, page_size, step_tokens):
    prompts, expected = SHARED[case]
    rows = [row(prompt, new=1) for prompt in prompts]
    job = Job(one_group(page_size=page_size), *rows, step_tokens=step_tokens)
    job.run().verify()
    assert job.computed == expected
    assert job.jobs.stats.reused == sum(map(len, prompts)) - expected
    assert sum(one.cached_tokens for one in rows) == job.jobs.stats.reused


def test_a_row_that_waits_for_a_prefix_does_not_hold_up_others():
    first, alike, other = row([*PREFIX, 0]), row([*PREFIX, 1]), row([2] * 3)
    job = Job(one_group(), first, alike, other, step_tokens=14)
    assert job.step().rows == [first, other]
    assert job.step().rows == [first, other, alike]
    job.run().verify()


def test_a_row_whose_prefix_fails_half_way_computes_the_rest_itself():
    first, alike = row([*PREFIX, 0], new=1), row([*PREFIX, 1], new=1)
    job = Job(one_group(), first, alike, step_tokens=5)
    job.step()
    job.jobs.rows.fail(first, "on purpose")
    job.run()
    assert job.failed == [first]
    assert first.error == "on purpose"
    assert alike.tokens == expected_tokens(alike)
    assert (alike.cached_tokens, job.computed) == (5, 5 + 8)


def test_samples_fork_from_a_prompt_that_is_computed_once():
    job = Job(one_group(), row(PREFIX, new=3, samples=3), row([1, 2], new=3))
    job.run().verify()
    assert job.computed == 12 + 4 * 2 + 2 + 2
    assert {one.cached_tokens for one in job.rows[1:4]} == {12}


# ------------------------------------------------------------------ pages run short


@pytest.mark.parametrize("page_size", [1, 4, 8])
@pytest.mark.parametrize("samples", [0, 2])
def test_rows_that_need_more_than_expected_are_put_back_and_all_finish(page_size, samples):
    job = hopeful(samples=samples, page_size=page_size, max_sequences=16)
    job.run().verify()
    assert job.jobs.stats.preemptions == len(job.put_back()) > 0
    assert job.jobs.stats.peak.live > job.jobs.stats.peak.pages // 2


@pytest.mark.parametrize("samples", [0, 2])
def test_no_row_is_put_back_twice_without_a_token_in_between(samples):
    job = hopeful(6, samples, page_size=1, max_sequences=24)
    job.run()
    assert len(job.put_back()) > 2
    assert len(set(job.put_back())) == len(job.put_back())


def test_after_one_was_put_back_nobody_joins_until_somebody_has_left():
    job = hopeful(6, page_size=1)
    job.run()
    happened = [what for what, _, _ in job.jobs.events]
    for i, what in enumerate(happened):
        if what == "back":
            after = [x for x in happened[i + 1 :] if x != "back"]
            assert after[0] == "leave"


def test_the_one_put_back_is_the_youngest_and_joins_first():
    job = hopeful(page_size=4)
    while not job.put_back():
        youngest = job.jobs.rows.running[-1:]
        job.step()
    assert [one for one, _ in job.put_back()] == youngest
    assert job.jobs.rows.waiting[0] is youngest[0]
    found = youngest[0].cached_tokens
    job.run().verify()
    assert youngest[0].cached_tokens == found, "what is found again was not found in the prompt"


def test_rows_that_use_all_they_may_are_never_put_back():
    rows = [row([i % 3, i // 3], new=10) for i in range(9)]
    job = Job(one_group(max_tokens=32), *rows)
    job.run().verify()
    assert job.jobs.stats.preemptions == 0


def test_samples_wait_where_a_page_for_the_fork_is_missing():
    job = Job(one_group(max_tokens=8), row([0, 1, 2], new=5, samples=2))
    job.step()
    assert len(job.jobs.rows.running) == 1
    assert len(job.jobs.rows.waiting) == 2
    job.run().verify()


# ------------------------------------------------------------------ a prompt longer than the pool


def after_a_long_one(*others: Row) -> Job:
    """Just after a prompt that was fed 32 tokens, then 16 a step, as a policy made room for it."""
    sizes = {"max_tokens": 32, "max_sequence_length": 1000, "retention": Fifo(4), "budget": 8}
    job = Job(one_group(**sizes), long := row([0, 1, 2] * 30), *others)
    while not long.tokens:
        job.step()
    return job


def test_a_prompt_that_is_fed_less_at_once_narrows_nobody_elses_steps():
    job = after_a_long_one()
    job.jobs.rows.waiting.append(row([1] * 18))
    assert job.step().counts == [1, 18]
    job.run().verify()


def test_who_waits_for_a_prompt_that_makes_its_own_room_joins_as_soon_as_it_is_computed():
    # Looking for room before that would find none, and shut the door until the prompt's row ends.
    job = after_a_long_one(row([1] * 18))
    assert job.step().counts == [1, 18]
    job.run().verify()


# ------------------------------------------------------------------ what cannot be served


def test_a_prompt_that_can_never_fit_fails_with_its_samples_and_others_go_on():
    too_long, other = row([0] * 65, samples=1), row([1] * 3)
    job = Job(one_group(), too_long, other).run()
    assert [one.error is not None for one in job.rows] == [True, True, False]
    assert "64 tokens" in too_long.error
    assert other.tokens == expected_tokens(other)


def test_a_row_fails_where_somebody_else_holds_the_pages():
    job = Job(one_group(max_tokens=8), row([0, 1, 2]))
    seq = job.cache.add(max_tokens=8)
    job.run()
    assert ["pages" in one.error for one in job.failed] == [True]
    job.cache.free(seq)
    job.jobs.rows.waiting.append(again := row([0, 1, 2]))
    job.run()
    assert again.tokens == expected_tokens(again)


@pytest.mark.parametrize("taken", [0, 1, 2])
def test_close_gives_back_what_runs_and_its_open_step_but_not_a_strangers(taken):
    job = Job(one_group(), row([0, 1, 2], samples=1), row([1] * 5))
    stranger = job.cache.add([2, 2, 2])
    for _ in range(taken):
        job.step()
    assert job.jobs.schedule() is not None
    job.jobs.rows.close()
    assert job.cache.open_step is None
    assert job.cache.stats().sequences == 1
    assert {one.seq for one in job.rows} == {NOT_RUNNING}
    with job.cache.step([stranger]):
        job.jobs.rows.close()
        assert job.cache.open_step is not None
        write_step(job.cache, job.cache.open_step, [[2, 2, 2]])
    assert_contents(job.cache, stranger, [2, 2, 2])


# ------------------------------------------------------------------ anything


@st.composite
def jobs(draw) -> Job:
    prompts = st.lists(st.integers(0, 2), min_size=1, max_size=10)
    count = st.integers(1, 12)
    first = [
        row(prompt, new, ends, samples)
        for prompt, new, ends, samples in draw(
            st.lists(st.tuples(prompts, count, count, st.integers(0, 2)), min_size=1, max_size=7)
        )
    ]
    sizes = {
        "page_size": draw(st.sampled_from([1, 3, 4])),
        "max_tokens": max(one.limit for one in first) + draw(st.integers(0, 16)),
        "max_sequences": max(1 + len(one.samples) for one in first) + draw(st.integers(0, 8)),
    }
    sizes["host_tokens"] = draw(st.sampled_from([0, 5, 40]))
    kind = draw(st.sampled_from([one_group, two_groups, window_only]))
    return Job(kind(**sizes), *first, step_tokens=draw(st.sampled_from([1, 2, 5, 64])))


@sampled
@given(jobs())
@settings(max_examples=examples(60))
def test_any_rows_on_any_pages_get_their_tokens(job):
    job.run().verify()
    assert len(set(job.put_back())) == len(job.put_back())
