"""Offloads and restores in any order, also where memory or a copy fails."""

import random
from dataclasses import replace

import pytest

from pagedkv.errors import HostMemoryError
from pagedkv.offload.host_pages import HostPages
from pagedkv.offload.host_storage import HostStorage
from pagedkv.pages.pool import PagePool
from pagedkv.storage.page_statistics import PageStatistics
from tests.cases import CASES, random_op, varied
from tests.contents import Boom, assert_contents, start
from tests.effort import examples, sampled, slow
from tests.offload.hosted import TEXT, Copies, make
from tests.walk import hosted
from tests.world import World

HOSTED = [hosted(case) for case in CASES]


@sampled
@pytest.mark.parametrize("case", varied(HOSTED), ids=lambda case: case.name)
def test_prompts_that_come_and_go_find_on_the_host_what_they_have_in_common(case, monkeypatch):
    """Texts come whole and leave soon, so that most of what is found was pushed out before."""
    copies, source = Copies(monkeypatch), random.Random(f"prompts {case.name}")
    tokens = case.config.max_tokens
    world = World(replace(case, config=replace(case.config, host_tokens=2 * tokens)))
    P = case.config.page_size
    world.bases = [[source.randrange(3) for _ in range(tokens * 2 // 3)] for _ in range(5)]
    roomy, hits = "roomy" in case.name, 0  # pools that cannot run out set nothing aside
    for _ in range(examples(60, 32)):
        before = sum(copies.into)
        prompt = (source.randrange(5), source.randrange(tokens), [source.randrange(3)])
        world.apply(("add", prompt, 0, None if roomy else source.choice((None, None, P))))
        hits += sum(copies.into) > before
        world.apply(("step", [(n, [0], 0) for n in range(8)], "uncached", 0, "with"))
        if source.random() < 0.8:
            world.apply(("free", [source.randrange(64), source.randrange(64)]))
        if source.random() < 0.1:
            world.apply(("offload", [source.randrange(64)]))
            world.apply(("restore", list(range(8))))
    assert hits > 0 or roomy


# ------------------------------------------------------------------ faults


class Injected(MemoryError):
    pass


FAILING = (
    (PagePool, "take"),
    (HostStorage, "keep"),
    (HostStorage, "bring"),
    (HostPages, "fill"),
    (PageStatistics, "export"),
    (PageStatistics, "import_"),
)


class Faults:
    """Counts allocations and copies, and makes the one of a given number fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count, self.failing, self.failed = 0, -1, ""
        for kind, name in FAILING:
            monkeypatch.setattr(kind, name, self.wrap(name, getattr(kind, name)))

    def wrap(self, name, inner):
        def call(*args):
            number, self.count = self.count, self.count + 1
            if number == self.failing:
                self.failed = name
                raise Injected
            return inner(*args)

        return call


@pytest.mark.parametrize("name", ["full-P3", *slow("two-P4-rollback", "int4-P16")])
def test_whatever_allocation_or_copy_fails_nothing_is_lost(name, monkeypatch):
    faults, (case,) = Faults(monkeypatch), [case for case in HOSTED if case.name == name]
    source, world, reached = random.Random(f"faults 7 {name}"), World(case), []
    ops = [("add", (base, 99, [base]), 0, None) for base in range(4)]
    ops += [random_op(source, case.config) for _ in range(60)]
    for index, op in enumerate(ops):
        world.apply(op)
        reached += [index] * (faults.count - len(reached))
    failed = set()
    for failing, at in list(enumerate(reached))[:: 1 + len(reached) // 40]:
        faults.count, faults.failing, faults.failed = 0, failing, ""
        world = World(case)
        for index, op in enumerate(ops[: at + 10]):
            world.quiet = index < at  # checked before
            world.injected = index == at
            try:
                world.apply(op)
            except (Injected, HostMemoryError):  # which it becomes on the way
                assert index == at
                if world.cache.open_step is not None:  # it failed within a step
                    world.cache.abort(world.cache.open_step)
                world.in_step = set()
                world.verify(all_of_them=True)
        failed.add(faults.failed)
        world.free(range(64))
        assert world.cache.stats().live == world.cache.stats().offloaded == 0
        world.verify()
    assert failed == {name for _, name in FAILING}


def test_an_error_that_is_no_want_of_memory_comes_out_of_an_offload_as_it_is(monkeypatch):
    cache = make()
    seq = start(cache, TEXT)
    before = cache.stats()

    def fail(*args):
        raise Boom

    with monkeypatch.context() as patch:
        patch.setattr(type(cache._storage), "take_out", fail)
        with pytest.raises(Boom):
            cache.offload(seq)
    assert cache.stats() == before
    assert_contents(cache, seq, TEXT)
    cache.offload(seq)
    offloaded = cache.stats()
    with monkeypatch.context() as patch:
        patch.setattr(type(cache._storage), "put_in", fail)
        cache.clear_prefixes()
        with pytest.raises(Boom):
            cache.restore(seq)
    assert cache.stats().offloaded == offloaded.offloaded
    cache.check()
    cache.restore(seq)
    assert_contents(cache, seq, TEXT)
