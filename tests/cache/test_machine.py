"""`PagedKVCache` against a model of lists: any order of operations, checked after each one.

The operations and what must hold after them are in `tests.world.World`. It alone finds what only
some order of calls shows; that it does find it is what `tests/planted.py` holds it to.
"""

import pytest

from tests.cases import CASES
from tests.effort import ALL, sampled
from tests.retention.cases import CASES as EVICTING
from tests.states import CASES as STATEFUL
from tests.walk import end, hosted, walk

EVERY = [*CASES, *STATEFUL, *EVICTING]
OPERATIONS = 300_000


@sampled
@pytest.mark.parametrize("case", EVERY, ids=lambda case: case.name)
def test_a_walk_agrees_with_a_model_of_lists(case):
    world = walk(case, seed=20261126, count=300 if ALL else 50)
    assert world.computed > 0
    end(world)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(2))
@pytest.mark.parametrize("case", EVERY, ids=lambda case: case.name)
def test_three_hundred_thousand_operations_agree_with_a_model_of_lists(case, part):
    """Half of them with a host tier, whatever the case has."""
    count = -(-OPERATIONS // (2 * len(EVERY)))
    world = walk(hosted(case) if part else case, seed=part, count=count, everything=100)
    assert world.reused > 0 or case.config.policy is not None  # which may keep no prefix whole
    if part and "roomy" not in case.name:
        assert world.offloads > 1
        assert world.restores > 1
    if case.config.policy is not None:
        assert world.cache.stats().evicted > 0
    if world.states is not None and case.config.max_states > 1 and case.config.policy is None:
        assert world.states.hits > 0
    end(world)
