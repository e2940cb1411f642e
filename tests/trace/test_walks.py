"""A trace says all that happened to the pages: followed, it ends where the recorded cache ended."""

import random

import pytest

from pagedkv.trace import replay
from pagedkv.trace.history import CACHED, LIVE, history_of
from pagedkv.trace.read import Trace
from tests.cases import CASES, long_step, random_op, varied
from tests.effort import examples, few, sampled
from tests.retention.cases import CASES as EVICTING
from tests.states import CASES as STATES
from tests.trace.recorded import assert_same_pages, recorded_world, walk


@sampled
@pytest.mark.parametrize("case", varied(CASES), ids=lambda case: case.name)
def test_a_walk_is_told(case, tmp_path, monkeypatch):
    walked = recorded_world(monkeypatch, tmp_path / "a.trace", case)
    walk(walked, examples(300, 25))
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
    walked = recorded_world(monkeypatch, tmp_path / "a.trace", case)
    source = random.Random(case.name)
    for _ in range(examples(200, 60)):
        op = random_op(source, case.config)
        if op[0] == "free" or source.random() < 0.3:
            op = long_step(source, case.config)
        walked.apply(op)
    assert walked.cache.stats().evicted > 0
    assert_same_pages(replay(tmp_path / "a.trace"), walked.cache)


@sampled
@pytest.mark.parametrize("case", STATES, ids=lambda case: case.name)
def test_a_walk_with_states_is_told(case, tmp_path, monkeypatch):
    walked = recorded_world(monkeypatch, tmp_path / "a.trace", case)
    walk(walked, examples(300, 40))
    assert_same_pages(replay(tmp_path / "a.trace"), walked.cache)
