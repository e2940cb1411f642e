"""Where a scheduler keeps recurrent states: exactly where prompts part, and where texts end."""

from __future__ import annotations

from hypothesis import example, given, settings
from hypothesis import strategies as st

from pagedkv.config import StateLayer
from tests.batch.jobs import Job, row
from tests.cases import one_group
from tests.effort import examples, sampled

STATES = (StateLayer((((1,), "float32"),)),) * 2
P = 4


def stateful(**fields):
    return one_group(**{"states": STATES, "max_tokens": 256, "max_sequences": 16, **fields})


def common(a, b) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))


def branches_of(prompts) -> tuple[set[tuple[int, ...]], int]:
    """The prefixes at which prompts part from earlier ones, and the tokens that are computed."""
    found, computed = set(), 0
    for i, prompt in enumerate(prompts):
        shared = max(
            (min(common(prompt, other), len(prompt) - 1) for other in prompts[:i]), default=0
        )
        shared = shared if shared >= P else 0
        computed += len(prompt) - shared
        if shared:
            found.add(tuple(prompt[:shared]))
    return found, computed


def ends_of(job) -> set[tuple[int, ...]]:
    """Texts whose state may be kept for who goes on with them: answers, and prompts alone."""
    answered = {(*one.prompt.tolist(), *one.tokens[:-1]) for one in job.rows}
    return answered | {tuple(one.prompt.tolist()) for one in job.rows}


# Prompts never have the ids that are generated, 0 to 2.
@st.composite
def trees(draw):
    prompts = [draw(st.lists(st.integers(3, 4), min_size=1, max_size=14))]
    for _ in range(draw(st.integers(0, 7))):
        start = draw(st.sampled_from(prompts))
        cut = draw(st.integers(0, len(start)))
        prompts.append(start[:cut] + draw(st.lists(st.integers(3, 5), min_size=1, max_size=9)))
    return prompts


@sampled
@settings(max_examples=examples(80, 15))
@given(trees(), st.integers(20, 40))  # so many that nobody leaves before those who wait for it join
def test_of_any_tree_of_prompts_every_token_is_computed_once_and_states_kept_where_they_part(
    prompts, step_tokens
):
    branches, computed = branches_of(prompts)
    rows = [row(prompt, new=6) for prompt in prompts]
    job = Job(stateful(), *rows, step_tokens=step_tokens)
    job.run().verify()
    assert job.computed == computed + 5 * len(prompts)  # of new tokens all but the last are fed
    assert branches <= set(job.jobs.kept) <= branches | ends_of(job)


@sampled
@settings(max_examples=examples(80, 15))
@given(
    prompts=trees(),
    step_tokens=st.integers(1, 20),
    max_states=st.integers(1, 6),
    max_tokens=st.sampled_from([40, 64, 128]),
    samples=st.integers(0, 2),
    host_tokens=st.sampled_from([0, 16, 64]),
)
@example(  # a cut that a row asks for when the step that passes it is composed
    prompts=[[3], [3], [3] * 9, [3], [3] * 10 + [4, 4] + [3] * 6, [3] * 10 + [4] + [3] * 4],
    step_tokens=6,
    max_states=2,
    max_tokens=64,
    samples=2,
    host_tokens=0,
)
def test_on_any_pages_and_slots_every_row_goes_on_from_the_state_of_its_own_text(
    prompts, step_tokens, max_states, max_tokens, samples, host_tokens
):
    rows = [row(prompt, new=5, ends=3, samples=samples) for prompt in prompts]
    sizes = {"max_states": max_states, "max_tokens": max_tokens, "host_tokens": host_tokens}
    config = stateful(**sizes, max_sequences=6)
    Job(config, *rows, step_tokens=step_tokens).run().verify()


def test_sixteen_prompts_with_a_long_beginning_in_common_compute_it_once():
    shared = [3 + i % 7 for i in range(1500)]
    prompts = [[*shared, 20 + i, *[40 + (i * j) % 50 for j in range(699)]] for i in range(16)]
    config = stateful(max_tokens=40_000, page_size=16)
    job = Job(config, *(row(prompt, new=1) for prompt in prompts), step_tokens=1024).run()
    job.verify()
    assert job.computed == 1500 + 16 * 700
    assert [one.cached_tokens for one in job.rows] == [0] + [1500] * 15
    assert set(job.jobs.kept) - ends_of(job) == {tuple(shared)}


def test_prompts_of_different_salts_share_no_state():
    one, other = row([3] * 9, new=2), row([3] * 9, new=2)
    other.salt = b"other"
    job = Job(stateful(), one, other).run()
    assert job.computed == 2 * (9 + 1)
    assert set(job.jobs.kept) <= ends_of(job)


def test_a_prompt_that_parts_within_the_first_page_is_worth_no_slot():
    job = Job(stateful(), row([3, 3, 3, 4, 4], new=2), row([3, 3, 3, 5, 5], new=2)).run()
    assert set(job.jobs.kept) <= ends_of(job)


def test_a_prompt_that_finds_more_by_itself_waits_for_nobody():
    long = [3] * 12
    job = Job(stateful(), row([*long, 4], new=1), row([*long, 5], new=1)).run()
    assert job.jobs.kept[0] == tuple(long)
    before = len(job.jobs.kept)
    later = [row([*long, 6, 6], new=1), row([*long, 7, 7], new=1)]
    job.jobs.rows.waiting.extend(later)
    job.rows += later
    batch = job.step()
    assert (batch.rows, batch.counts) == (later, [2, 2])
    assert set(job.jobs.kept[before:]) <= ends_of(job)


def test_a_prompt_that_comes_while_another_is_computed_still_cuts_its_steps():
    job = Job(stateful(), row([3] * 20, new=2), step_tokens=5)
    job.step()
    late = row([3] * 12 + [4], new=2)
    job.jobs.submit([late])
    job.rows.append(late)
    job.run().verify()
    assert late.cached_tokens == 12
    assert job.computed == 20 + 1 + 2 * 1


def test_a_row_that_is_put_back_finds_the_state_it_had_where_its_pages_are_left():
    job = Job(stateful(max_tokens=64), row([3] * 6, new=6), row([4] * 6, new=6))
    for _ in range(3):
        job.step()
    victim = job.jobs.rows.running[-1]
    done = victim.done
    job.jobs.rows.preempt(None)
    while victim in job.jobs.rows.waiting:
        job.step()
    assert victim.done > done
    assert job.run().computed == 2 * (6 + 5)
    job.verify()
