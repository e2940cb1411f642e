"""A trace says all that happened to the pages: followed, it ends where the recorded cache ended."""

import random

import pytest

from pagedkv.trace import replay
from pagedkv.trace.history import CACHED, LIVE, history_of
from pagedkv.trace.read import Trace
from tests import world
from tests.cache import state_world
from tests.cache.state_world import random_op as random_op_with_states
from tests.cache.test_state_walks import CASES as STATES
from tests.cases import CASES, random_op, varied
from tests.effort import examples, few, sampled
from tests.retention.test_machine import CASES as EVICTING
from tests.retention.test_machine import long_step
from tests.states import with_states
from tests.trace.recorded import assert_same_pages, recorded


@sampled
@pytest.mark.parametrize("case", varied(CASES), ids=lambda case: case.name)
def test_a_walk_is_told(case, tmp_path, monkeypatch):
    walked = recorded(monkeypatch, tmp_path / "a.trace", world).World(case, everything=False)
    source = random.Random(repr(case.config))
    for _ in range(examples(300, 25)):
        walked.apply(random_op(source, case.config))
    assert_same_pages(replay(tmp_path / "a.trace"), walked.cache)
    history = history_of(Trace(tmp_path / "a.trace"))
    begin, length, kind, refs = history.runs.T[[1, 2, 3, 5]]
    for number, step in enumerate(history.steps):
        here = (begin <= number) & (number < begin + length)
        assert (here & (kind == LIVE)).sum() == step.live
        assert (here & (refs > 1)).sum() == step.shared
        assert (here & (kind == CACHED)).sum() <= step.cached


@sampled
@pytest.mark.parametrize("case", few(EVICTING, *EVICTING[::3]), ids=lambda case: case.name)
def test_a_walk_under_a_policy_is_told(case, tmp_path, monkeypatch):
    walked = recorded(monkeypatch, tmp_path / "a.trace", world).World(case, everything=False)
    source = random.Random(case.name)
    for _ in range(examples(200, 60)):
        op = random_op(source, case.config)
        if op[0] == "free" or source.random() < 0.3:
            op = long_step(source, case.config)
        walked.apply(op)
    assert walked.cache.stats().evicted > 0
    assert_same_pages(replay(tmp_path / "a.trace"), walked.cache)


@sampled
@pytest.mark.parametrize("case", STATES)
def test_a_walk_with_states_is_told(case, tmp_path, monkeypatch):
    config, slots = STATES[case]
    state_worlds = recorded(monkeypatch, tmp_path / "a.trace", state_world)
    walked = state_worlds.StateWorld(with_states(config, slots))
    source = random.Random(case)
    for _ in range(examples(300, 80)):
        op = random_op_with_states(source, bool(config.host_tokens))
        if op[0] in ("add", "clear") or walked.texts:
            walked.apply(op)
    assert_same_pages(replay(tmp_path / "a.trace"), walked.cache)
