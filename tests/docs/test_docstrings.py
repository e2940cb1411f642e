"""The examples of docstrings run and print what they say, a method's behind its class's."""

import doctest
import inspect
from importlib import import_module

import pytest

import pagedkv
from tests.docs.test_site import INSIDE

pytest.importorskip("torch")
PLACES = "api", "own_pages", "own_plan"
PLACES = *(f"attention.{x}" for x in PLACES), "cache.cache", "cache.pressure"


def run(example, names):
    example.globs = names
    printed = []
    doctest.DocTestRunner().run(example, out=printed.append, clear_globs=False)
    assert not printed, "".join(printed)
    return names


@pytest.mark.parametrize("place", PLACES)
def test_examples_run(place, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = doctest.DocTestFinder().find(import_module(f"pagedkv.{place}"))
    known = {one.name: one for one in found if one.examples}
    assert known
    for name, example in known.items():
        before = known.get(name.rpartition(".")[0])
        run(example, run(before, {}) if before else {})


def test_what_users_call_has_an_example():
    calls = [getattr(pagedkv, name) for name, unit in pagedkv._HOME.items() if unit == "attention"]
    cache = pagedkv.PagedKVCache
    members = {n: x for n, x in vars(cache).items() if inspect.isfunction(x) and n[0] != "_"}
    calls += [
        cache,
        *(x for name, x in members.items() if name not in INSIDE["PagedKVCache"].split()),
    ]
    assert len(calls) > 30
    assert not [x.__qualname__ for x in calls if ">>>" not in inspect.getdoc(x)]
