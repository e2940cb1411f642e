"""Walks over one folder, one cache after another: what is found is what was computed, always."""

import random
import warnings

import pytest

from tests.cache.stored import files
from tests.cache.stored_world import clean, damage, stored_walks
from tests.cases import CASES, random_op
from tests.effort import examples, slow
from tests.states import CASES as STATEFUL

FAST = "full-P3", "two-P4-rollback", "int4-P16", "few", "window"
EVERY = [*CASES, *(case for case in STATEFUL if case.config.policy is None)]


@pytest.mark.sampled
@pytest.mark.parametrize("case", [c if c.name in FAST else slow(c)[0] for c in EVERY])
def test_what_comes_from_a_store_is_what_was_computed(case, folder, monkeypatch):
    make, found = stored_walks(monkeypatch, case, folder), 0
    for seed in range(examples(12, taste=2)):
        world, source = make(), random.Random(seed)
        for _ in range(100):
            world.apply(random_op(source, world.config))
        found += world.cache.stats().tokens_from_store
    assert files(folder)
    assert found


@pytest.mark.sampled
@pytest.mark.parametrize("case", [c if c.name in FAST else slow(c)[0] for c in EVERY])
def test_a_damaged_store_gives_nothing_that_was_not_computed(case, folder, monkeypatch):
    make, done = stored_walks(monkeypatch, case, folder), set()
    for seed in range(examples(12, taste=2)):
        world, source = make(), random.Random(f"damage {seed}")
        for _ in range(100):
            if source.random() < 0.3:
                done.add(damage(folder, source))
            op = random_op(source, world.config)
            if op[0] == "offload" or source.random() < 0.1:
                op = "store", source.randrange(64)
            with warnings.catch_warnings():  # each damaged file is told
                warnings.simplefilter("ignore", UserWarning)
                world.apply(op)
        clean(folder)
    assert done > {"swap"}
