"""Where a scheduler keeps recurrent states: exactly where prompts part, and where texts end."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from pagedkv.config import StateLayer
from tests.batch.jobs import Job, row
from tests.cases import one_group

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


@settings(deadline=None)
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
