"""A trace says all that happened to the pages: replayed, it ends where the recorded cache ended."""

import random
import re
from pathlib import Path

import pytest

from pagedkv.trace import replay
from tests.cases import CASES, long_step, random_op, varied
from tests.effort import examples, few, sampled
from tests.retention.cases import CASES as EVICTING
from tests.states import CASES as STATES
from tests.trace.recorded import assert_same_pages, recorded_world, walk

DOCS = Path(__file__).resolve().parents[2] / "docs" / "trace.md"


@sampled
@pytest.mark.parametrize("case", varied(CASES), ids=lambda case: case.name)
def test_a_walk_replays_to_the_same_pages(case, tmp_path, monkeypatch):
    world = recorded_world(monkeypatch, tmp_path / "walk.trace", case)
    walk(world, examples(300, 25))
    assert_same_pages(replay(tmp_path / "walk.trace"), world.cache)


@sampled
@pytest.mark.parametrize("case", few(EVICTING, *EVICTING[::3]), ids=lambda case: case.name)
def test_a_walk_replays_without_the_policy_that_evicted(case, tmp_path, monkeypatch):
    world = recorded_world(monkeypatch, tmp_path / "walk.trace", case)
    source = random.Random(case.name)
    for _ in range(examples(200, 60)):
        op = random_op(source, case.config)
        if op[0] == "free" or source.random() < 0.3:
            op = long_step(source, case.config)
        world.apply(op)
    assert world.cache.stats().evicted > 0
    assert_same_pages(replay(tmp_path / "walk.trace"), world.cache)


@sampled
@pytest.mark.parametrize("case", STATES, ids=lambda case: case.name)
def test_a_walk_replays_with_the_slots_of_states(case, tmp_path, monkeypatch):
    world = recorded_world(monkeypatch, tmp_path / "a.trace", case)
    walk(world, examples(300, 80))
    assert_same_pages(replay(tmp_path / "a.trace"), world.cache)


def test_the_page_of_the_documentation_does_what_it_says(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    namespace: dict = {}
    for block in re.findall(r"^```python\n(.*?)^```", DOCS.read_text("utf-8"), re.M | re.S):
        exec(compile(block, DOCS.name, "exec"), namespace)
    assert "again" in namespace
