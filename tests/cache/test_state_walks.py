"""Any operations on a cache with recurrent states, beside a dense state for every text."""

import random

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, precondition, rule

from tests.cache.state_world import StateWorld, random_op
from tests.cases import in_few_bits, one_group, two_groups
from tests.effort import examples, sampled
from tests.machines import run_machine
from tests.states import with_states

FEW = {"max_tokens": 256, "max_sequences": 8}
CASES = {  # configuration, slots
    "many": (one_group(max_tokens=4096, max_sequences=12, host_tokens=4096), 200),
    "few": (one_group(**FEW, host_tokens=128), 4),
    "fewer": (one_group(**FEW, page_size=3, host_tokens=64), 2),
    "one": (one_group(max_tokens=64, max_sequences=6, page_size=1), 1),
    "few pages": (one_group(max_tokens=36, max_sequences=6, page_size=3, host_tokens=30), 5),
    "window": (two_groups(6, max_tokens=64, page_size=4, host_tokens=64), 6),
    "int4": (in_few_bits("int4", max_tokens=128, max_sequences=6, host_tokens=64), 5),
    "budget": (one_group(max_tokens=48, page_size=2, retention="fifo", budget=8), 5),
    "growing": (one_group(max_tokens=64, growth_step=8, head_dim=8), 4),
}
NUMBER = st.integers(0, 63)
NUMBERS = st.lists(NUMBER, min_size=1, max_size=4)
ADD = st.tuples(
    st.just("add"),
    st.none() | st.lists(st.integers(0, 1), min_size=1, max_size=12),
    st.sampled_from((0, 0, 0, 1)),
    st.booleans(),
)
FORK = st.tuples(st.just("fork"), NUMBER, st.integers(1, 3))
CHECKPOINT = st.tuples(st.just("checkpoint"), NUMBER)
TRUNCATE = st.tuples(st.just("truncate"), NUMBER, st.integers(0, 7))
FREE = st.tuples(st.just("free"), NUMBER)
ENTRIES = st.lists(
    st.tuples(NUMBER, st.lists(st.integers(0, 1), min_size=1, max_size=5), st.booleans()),
    min_size=1,
    max_size=4,
)
MODE = st.sampled_from(("tokens", "tokens", "count"))
ENDING = st.sampled_from(("commit", "commit", "some", "abort"))
DURING = st.lists(st.one_of(ADD, FORK, CHECKPOINT, TRUNCATE, FREE), max_size=2)


class StateMachine(RuleBasedStateMachine):
    case: str

    def __init__(self) -> None:
        super().__init__()
        config, max_states = CASES[self.case]
        self.world = StateWorld(with_states(config, max_states), roomy=self.case == "many")

    @rule(op=ADD)
    def add(self, op):
        self.world.apply(op)

    @precondition(lambda self: self.world.texts)
    @rule(op=st.one_of(FORK, CHECKPOINT, TRUNCATE, FREE))
    def change(self, op):
        self.world.apply(op)

    @precondition(lambda self: self.world.texts)
    @rule(entries=ENTRIES, mode=MODE, ending=ENDING, during=DURING)
    def step(self, entries, mode, ending, during):
        self.world.apply(("step", entries, mode, ending, during))

    @precondition(lambda self: self.world.texts and self.world.config.host_tokens)
    @rule(kind=st.sampled_from(("offload", "restore")), numbers=NUMBERS)
    def move(self, kind, numbers):
        self.world.apply((kind, numbers))

    @rule()
    def clear_prefixes(self):
        self.world.apply(("clear",))

    def teardown(self) -> None:
        """Nobody is left, nothing is kept: no slot is in use."""
        if not self.world.in_step:
            for _ in range(len(self.world.texts)):
                self.world.free(0)
            self.world.clear()
            assert self.world.cache.stats().states == 0
            self.world.verify()


@sampled
@pytest.mark.parametrize("case", CASES)
def test_any_operations_agree_with_a_dense_state_for_every_text(case):
    run_machine(StateMachine, case, examples(10))


def walk(case: str, seed: int, operations: int) -> StateWorld:
    config, max_states = CASES[case]
    source = random.Random(f"{seed} {case}")
    world = StateWorld(with_states(config, max_states), roomy=case == "many")
    for index in range(operations):
        op = random_op(source, bool(config.host_tokens))
        if op[0] in ("add", "clear") or world.texts:
            try:
                world.apply(op)
            except BaseException:
                print(f"{case}: seed {seed} diverged at operation {index}: {op}")
                raise
    return world


@pytest.mark.parametrize("case", CASES)
def test_a_seeded_walk_agrees_with_a_dense_state_for_every_text(case):
    world = walk(case, seed=20261122, operations=150)
    assert world.hits or world.refused


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_thousands_of_operations_agree_with_a_dense_state_for_every_text(case):
    for seed in range(10):
        walk(case, seed, operations=300)
