"""`PagedKVCache` against a model of lists: any order of operations, checked after each one.

The operations and what must hold after them are in `tests.world.World`. Hypothesis finds and
shrinks short sequences; the slow walk goes far with one seed.
"""

import random

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from tests.cases import CASES, ENDINGS, MODES, Case, random_op, varied
from tests.effort import examples, sampled
from tests.machines import run_machine
from tests.world import World

NUMBER = st.integers(0, 63)
TOKENS = st.lists(st.integers(0, 2), min_size=1, max_size=6)
PROMPT = st.tuples(st.integers(0, 3), st.integers(0, 80), st.lists(st.integers(0, 2), max_size=3))
SALT = st.sampled_from((0, 0, 0, 1))
ENTRIES = st.lists(st.tuples(NUMBER, TOKENS, NUMBER), min_size=1, max_size=5)
BACK = st.sampled_from((-1, 0, 1, 1, 2, 3, 4, 5, 9, 17))
ADD = st.tuples(st.just("add"), st.none() | PROMPT, SALT, st.none() | st.integers(0, 20))
FORK = st.tuples(st.just("fork"), NUMBER, st.integers(1, 3))
TRUNCATE = st.tuples(st.just("truncate"), NUMBER, BACK)
FREE = st.tuples(st.just("free"), st.lists(NUMBER, min_size=1, max_size=4))
CLEAR = st.just(("clear",))
SHRINK = st.just(("shrink",))
STEP_INSIDE = st.tuples(
    st.just("step"), ENTRIES, st.sampled_from(MODES), NUMBER, st.sampled_from(ENDINGS)
)
DURING = st.one_of(ADD, FORK, TRUNCATE, FREE, CLEAR, SHRINK, STEP_INSIDE)


class CacheMachine(RuleBasedStateMachine):
    case: Case

    def __init__(self) -> None:
        super().__init__()
        self.world = World(self.case)

    @rule(prompt=PROMPT, salt=SALT)
    def add(self, prompt, salt):
        self.world.apply(("add", prompt, salt, None))

    @rule()
    def add_empty(self):
        self.world.apply(("add", None, 0, None))

    @rule(prompt=PROMPT, salt=SALT, more=st.integers(0, 24))
    def add_with_reservation(self, prompt, salt, more):
        self.world.apply(("add", prompt, salt, more))

    @precondition(lambda self: self.world.texts)
    @rule(op=FORK)
    def fork(self, op):
        self.world.apply(op)

    @precondition(lambda self: self.world.texts)
    @rule(
        entries=ENTRIES, mode=st.sampled_from(MODES), form=NUMBER, ending=st.sampled_from(ENDINGS)
    )
    def step(self, entries, mode, form, ending):
        self.world.apply(("step", entries, mode, form, ending))

    @precondition(lambda self: self.world.texts)
    @rule(entries=ENTRIES)
    def prefill_everything(self, entries):
        self.world.apply(("step", entries, "uncached", 0, "with"))

    @precondition(lambda self: self.world.texts)
    @rule(
        entries=ENTRIES, mode=st.sampled_from(MODES), ending=st.sampled_from(ENDINGS), during=DURING
    )
    def step_with_another_call_inside(self, entries, mode, ending, during):
        self.world.apply(("step", entries, mode, 1, ending, during))

    @precondition(lambda self: self.world.texts)
    @rule(op=TRUNCATE)
    def truncate(self, op):
        self.world.apply(op)

    @precondition(lambda self: self.world.texts)
    @rule(op=FREE)
    def free(self, op):
        self.world.apply(op)

    @precondition(lambda self: self.case.config.host_tokens and self.world.texts)
    @rule(numbers=st.lists(NUMBER, min_size=1, max_size=3))
    def offload(self, numbers):
        self.world.apply(("offload", numbers))

    @precondition(lambda self: self.world.away)
    @rule(numbers=st.lists(NUMBER, min_size=1, max_size=3))
    def restore(self, numbers):
        self.world.apply(("restore", numbers))

    @rule()
    def clear_prefixes(self):
        self.world.apply(("clear",))

    @rule()
    def shrink(self):
        self.world.apply(("shrink",))

    def teardown(self) -> None:
        """Free + cached = total once nobody is left, free = total once nothing is cached."""
        world = self.world
        if world.in_step:  # a check inside a step has failed: that is the failure to report
            return
        world.free(range(64))
        stats = world.cache.stats()
        assert (stats.live, stats.free + stats.cached) == (0, stats.pages)
        world.clear()
        assert world.cache.stats().free == stats.pages
        world.verify()


@sampled
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_any_operations_agree_with_a_model_of_lists(case):
    run_machine(CacheMachine, case, examples(10, 1))


@sampled
@pytest.mark.parametrize("case", varied(CASES), ids=lambda case: case.name)
def test_a_seeded_walk_agrees_with_a_model_of_lists(case):
    walk(case, seed=20261121, operations=examples(100, 50), everything=1)


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_hundred_thousand_operations_agree_with_a_model_of_lists(case):
    walk(case, seed=1, operations=-(-100_000 // len(CASES)), everything=500)


def walk(case: Case, seed: int, operations: int, everything: int) -> None:
    """Random operations; every `everything`-th is followed by a look at all contents."""
    source, world = random.Random(f"{seed} {case.name}"), World(case, everything=everything == 1)
    op = None
    try:
        for index in range(operations):
            op = random_op(source, case.config)
            world.apply(op)
            if everything > 1 and index % everything == 0:
                world.verify(all_of_them=True)
    except BaseException:
        print(f"{case.name}: seed {seed} diverged at operation {index}: {op}")
        raise
    assert world.computed > 0
    assert world.reused > 0
