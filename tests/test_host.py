"""The host tier: what leaves the device comes back as it was, or stays where it is."""

import gc
import random
import weakref
from dataclasses import replace

import pytest
import torch

from pagedkv import PagedKVCache, write_kv
from pagedkv.errors import (
    BudgetExceeded,
    HostMemoryError,
    OffloadedError,
    OpenStepError,
    OutOfPagesError,
    SequenceTooLongError,
    UnknownSequenceError,
)
from pagedkv.offload.host_pages import HostPages
from pagedkv.offload.host_storage import HostStorage
from pagedkv.offload.rate import Rate
from pagedkv.pages.pool import PagePool
from pagedkv.storage.page_statistics import PageStatistics
from tests.support import (
    CASES,
    Boom,
    Case,
    World,
    advance,
    assert_contents,
    one_group,
    random_op,
    start,
    two_groups,
    write_step,
)

TEXT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]


def make(config=None, **fields) -> PagedKVCache:
    return PagedKVCache(
        config or one_group(**{"host_tokens": 64, **fields}), device="cpu", debug=True
    )


def write_anything(cache: PagedKVCache, step, seed: int) -> None:
    """K and V that are nobody else's."""
    source = torch.Generator().manual_seed(seed)
    shape = (step.num_tokens, cache.config.num_kv_heads, cache.config.head_dim)
    for layer in range(cache.config.num_layers):
        write_kv(*(torch.randn(shape, generator=source) for _ in "kv"), step, layer)


def contents(cache: PagedKVCache, seq: int) -> list[torch.Tensor]:
    return [x for layer in range(cache.config.num_layers) for x in cache.gather(seq, layer)]


def hosted(case: Case) -> Case:
    tokens = case.config.max_tokens // 4
    return replace(case, config=replace(case.config, host_tokens=tokens))


HOSTED = [hosted(case) for case in CASES]


class Copies:
    """Pages copied out and in."""

    def __init__(self, monkeypatch) -> None:
        self.out, self.into = [], []
        for name, counts in (("keep", self.out), ("bring", self.into)):
            inner = getattr(HostStorage, name)

            def call(host, group, kind, here, there, inner=inner, counts=counts):
                counts.append(here.size)
                return inner(host, group, kind, here, there)

            monkeypatch.setattr(HostStorage, name, call)


# ------------------------------------------------------------------ any order of operations


@pytest.mark.parametrize("case", HOSTED, ids=lambda case: case.name)
def test_a_walk_with_offloads_agrees_with_a_model_of_lists(case):
    walk(case, seed=6, operations=150)


@pytest.mark.slow
@pytest.mark.parametrize("case", HOSTED, ids=lambda case: case.name)
def test_a_long_walk_with_offloads_agrees_with_a_model_of_lists(case):
    world = walk(case, seed=7, operations=1500)
    assert world.refusals > 0 or "roomy" in case.name


def walk(case: Case, seed: int, operations: int) -> World:
    source, world = random.Random(f"{seed} {case.name}"), World(case)
    for index in range(operations):
        op = random_op(source, case.config)
        try:
            world.apply(op)
        except BaseException:
            print(f"{case.name}: seed {seed} diverged at operation {index}: {op}")
            raise
    assert world.offloads > 1
    assert world.restores > 1
    world.free(range(64))
    stats = world.cache.stats()
    assert (stats.live, stats.offloaded) == (0, 0)
    world.clear()
    stats = world.cache.stats()
    assert (stats.free, stats.host_cached) == (stats.pages, 0)
    world.verify()
    return world


@pytest.mark.parametrize("case", HOSTED, ids=lambda case: case.name)
def test_prompts_that_come_and_go_find_on_the_host_what_they_have_in_common(case, monkeypatch):
    """Texts come whole and leave soon, so that most of what is found was pushed out before."""
    copies, source = Copies(monkeypatch), random.Random(f"prompts {case.name}")
    tokens = case.config.max_tokens
    world = World(replace(case, config=replace(case.config, host_tokens=2 * tokens)))
    P = case.config.page_size
    world.bases = [[source.randrange(3) for _ in range(tokens * 2 // 3)] for _ in range(5)]
    roomy, hits = "roomy" in case.name, 0  # pools that cannot run out set nothing aside
    for _ in range(60):
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


@pytest.mark.parametrize("name", ["full-P3", "two-P4-rollback", "int4-P16"])
def test_whatever_allocation_or_copy_fails_nothing_is_lost(name, monkeypatch):
    faults, (case,) = Faults(monkeypatch), [case for case in HOSTED if case.name == name]
    source, world, reached = random.Random(f"faults {name}"), World(case), []
    ops = [("add", (base, 99, [base]), 0, None) for base in range(4)]
    ops += [random_op(source, case.config) for _ in range(70)]
    for index, op in enumerate(ops):
        world.apply(op)
        reached += [index] * (faults.count - len(reached))
    failed = set()
    for failing, at in list(enumerate(reached))[:: 1 + len(reached) // 80]:
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


# ------------------------------------------------------------------ sequences


@pytest.mark.parametrize("kv_format", ["dense", "int8", "fp8", "int4", ("dense", "int4")], ids=str)
def test_what_comes_back_has_the_very_bits_that_left(kv_format):
    """Not those of a twin that others computed meanwhile, though it holds the same tokens."""
    config = two_groups(
        20, head_dim=32, page_size=16, max_tokens=256, host_tokens=256, kv_format=kv_format
    )
    cache, text = make(config), [i % 7 for i in range(75)]
    seq = cache.add(text)
    with cache.step([seq]) as step:
        write_anything(cache, step, seed=1)
    expected = contents(cache, seq)
    cache.offload(seq)
    cache.clear_prefixes()
    other = cache.add(text)
    with cache.step([other]) as step:
        write_anything(cache, step, seed=2)
    cache.free(other)
    cache.restore(seq)
    cache.check()
    assert all(map(torch.equal, contents(cache, seq), expected))


def bounds(cache: PagedKVCache, seq: int) -> list[torch.Tensor]:
    """What queries choose the complete pages of a sequence by."""
    pages = cache._tables.tables[0, cache._tables.row_of(seq), : cache.length(seq) // 4]
    return [cache._storage.bounds.of(layer)[pages] for layer in range(2)]


def test_queries_choose_among_pages_that_came_back_as_before(tmp_path):
    cache = make(read_tokens=16, max_tokens=128)
    a = start(cache, list(range(26)))
    cache.save(a, tmp_path / "x")
    expected = bounds(cache, a)
    cache.offload(a)
    cache.clear_prefixes()
    start(cache, [7] * 9)
    cache.restore(a)
    for seq in (a, cache.load(tmp_path / "x")):
        assert all(map(torch.equal, bounds(cache, seq), expected))


def test_pages_that_are_still_there_are_shared_and_not_copied(monkeypatch):
    copies, cache = Copies(monkeypatch), make()
    a = start(cache, TEXT)
    cache.offload(a)
    stats = cache.stats()
    assert (stats.live, stats.cached, stats.offloaded) == (0, 3, 3)
    assert stats.offloaded_bytes == 3 * cache.config.bytes_per_page()
    cache.restore(a)
    assert (copies.out, copies.into) == ([3], [1])  # all but the page that is written next
    assert_contents(cache, a, TEXT)
    advance(cache, {a: [*TEXT, 7]})
    cache.offload(a)
    assert copies.out == [3, 1]  # only what was written since


def test_forks_are_one_copy_on_the_host_and_share_again_when_they_come_back(monkeypatch):
    copies, cache = Copies(monkeypatch), make()
    a = start(cache, TEXT)
    family = [a, *cache.fork(a, 3)]
    advance(cache, {seq: [*TEXT, i] for i, seq in enumerate(family)})
    cache.offload(family)
    assert cache.stats().offloaded == 2 + 4
    cache.clear_prefixes()
    assert cache.stats().free == 16
    cache.restore(family[:3])
    assert sum(copies.into) == cache.stats().live == 2 + 3
    cache.restore(family)
    assert sum(copies.into) == cache.stats().live == 2 + 4
    for i, seq in enumerate(family):
        assert_contents(cache, seq, [*TEXT, i])
    advance(cache, {seq: [*TEXT, i, i] for i, seq in enumerate(family)})
    cache.check()


def test_a_restore_without_room_changes_nothing():
    cache = make(max_tokens=24)
    a, b = start(cache, TEXT), start(cache, TEXT[::-1])
    cache.offload([a, b])
    c = start(cache, [7] * 15)
    before = cache.stats()
    with pytest.raises(OutOfPagesError, match="restore needs 6 more pages, 2 can be had"):
        cache.restore([a, b])
    assert cache.stats() == before
    cache.check()
    assert cache.is_offloaded(a)
    cache.free(c)
    cache.restore([a, b])
    assert_contents(cache, a, TEXT)
    assert_contents(cache, b, TEXT[::-1])


def test_a_reservation_is_given_up_and_made_again():
    cache = make(max_tokens=32)
    a = start(cache, TEXT, max_tokens=24)
    assert cache.stats().promised == 3
    cache.offload(a)
    assert cache.stats().promised == 0
    b = cache.add(max_tokens=12)
    with pytest.raises(OutOfPagesError, match="restore needs 6 more pages, 5 can be had"):
        cache.restore(a)
    cache.free(b)
    cache.restore(a)
    assert cache.stats().promised == 3
    start(cache, [7] * 8)
    advance(cache, {a: [*TEXT, *range(14)]})
    cache.check()


def test_a_restore_sets_pages_aside_for_the_rest_of_a_prompt_as_well():
    fields = {"max_tokens": 64, "retention": "fifo", "budget": 8, "max_sequence_length": 64}
    cache = make(**fields)
    seq = cache.add(TEXT[:10] * 3, max_tokens=40)
    with cache.step([seq], num_new=4) as step:
        write_step(cache, step, [TEXT[:4]])
    promised = cache.stats().promised
    cache.offload(seq)
    with pytest.raises(ValueError, match="max_tokens: expected at least the text's 30, got 20"):
        cache.restore(seq, max_tokens=20)
    cache.restore(seq, max_tokens=40)
    assert cache.stats().promised == promised > 0
    cache.check()


def test_a_restore_may_set_other_pages_aside_than_before():
    cache = make(max_tokens=32)
    a = start(cache, TEXT, max_tokens=24)
    cache.offload(a)
    for wrong, error in ((9, ValueError), (33, SequenceTooLongError), ("12", TypeError)):
        with pytest.raises(error, match="max_tokens"):
            cache.restore(a, max_tokens=wrong)
    cache.restore(a, max_tokens=32)
    assert cache.stats().promised == 5
    cache.offload(a)
    cache.restore(a, max_tokens=12)
    assert cache.stats().promised == 0
    cache.check()


def test_host_memory_that_is_too_small_is_refused_by_name_and_nothing_is_changed():
    cache = make(host_tokens=16)
    a, b = start(cache, TEXT), start(cache, TEXT[::-1])
    before = cache.stats()
    match = "offload needs 6 pages of host memory, 4 of 4 can be had.*host_tokens larger by 8"
    with pytest.raises(HostMemoryError, match=match):
        cache.offload([a, b])
    assert cache.stats() == before
    cache.offload(b)
    with pytest.raises(HostMemoryError, match="1 of 4 can be had"):
        cache.offload(a)
    assert_contents(cache, a, TEXT)
    cache.check()
    cache.free(b)
    cache.offload(a)


def test_without_a_host_tier_or_the_memory_for_it_the_setting_is_named():
    cache = make(host_tokens=0)
    with pytest.raises(HostMemoryError, match="set CacheConfig"):
        cache.offload(start(cache, TEXT))
    with pytest.raises(BudgetExceeded, match="host_tokens: 1099511627776 tokens need"):
        make(host_tokens=1 << 40)
    with pytest.raises(ValueError, match="host_tokens: expected at least 0"):
        make(host_tokens=-1)


def test_an_offloaded_sequence_knows_its_length_and_can_be_freed_and_nothing_else(tmp_path):
    cache = make()
    seq, other = cache.add(TEXT), start(cache, [7, 7])
    with cache.step([seq], num_new=6, layers=()):
        pass
    cache.offload(seq)
    assert (cache.length(seq), cache.uncached(seq).tolist()) == (6, TEXT[6:])
    before = cache.stats()
    for call in (
        lambda: cache.prepare([other, seq], [[1], [1]]),
        lambda: cache.fork(seq),
        lambda: cache.truncate(seq, 3),
        lambda: cache.gather(seq, 0),
        lambda: cache.save(seq, tmp_path / "x"),
        lambda: cache.offload([other, seq]),
    ):
        with pytest.raises(OffloadedError, match=f"{seq} is offloaded, `restore` it first"):
            call()
        assert cache.stats() == before
    cache.restore(other)  # is here
    cache.release_later([seq])
    assert cache.stats().offloaded == 0
    for call in (cache.offload, cache.restore, cache.is_offloaded):
        with pytest.raises(UnknownSequenceError):
            call(seq)
    cache.check()


def test_a_sequence_in_an_open_step_stays():
    cache = make()
    a, b = start(cache, TEXT), start(cache, TEXT[::-1])
    with cache.step([a], [[1]]) as step:
        with pytest.raises(OpenStepError):
            cache.offload([b, a])
        cache.offload(b)
        cache.restore(b)
        write_anything(cache, step, 0)
    assert_contents(cache, b, TEXT[::-1])
    cache.check()


def test_clear_prefixes_forgets_what_is_on_the_host_and_keeps_offloaded_sequences():
    cache = make(max_tokens=16)
    cache.free(start(cache, TEXT))
    a = start(cache, [7] * 12)
    assert cache.stats().host_cached > 0
    cache.offload(a)
    cache.clear_prefixes()
    assert cache.stats().host_cached == 0
    cache.restore(a)
    assert_contents(cache, a, [7] * 12)
    assert cache.length(cache.add([7] * 12)) == 0
    cache.free(a)
    assert cache.stats().host_cached == cache.stats().cached == 0


def test_a_file_is_loaded_where_prefixes_have_to_leave_for_it(tmp_path):
    cache = make(max_tokens=16)
    cache.save(start(cache, TEXT), tmp_path / "x")
    cache.free(0)
    cache.free(start(cache, [7] * 16))
    seq = cache.load(tmp_path / "x")
    assert_contents(cache, seq, TEXT)
    cache.free(seq)
    assert cache.length(cache.add([7] * 16)) == 15
    cache.check()


# ------------------------------------------------------------------ prefixes


def push_out(cache: PagedKVCache, token: int = 99) -> None:
    """Something else takes all pages and leaves nothing that can be found."""
    seq = cache.add()
    with cache.step([seq], num_new=cache.config.max_tokens) as step:
        write_anything(cache, step, token)
    cache.free(seq)


@pytest.mark.parametrize("config", [one_group, two_groups])
def test_a_prefix_that_had_to_leave_is_found_on_the_host(config):
    cache = make(config(host_tokens=64, max_tokens=32))
    text = (TEXT * 3)[:30]
    cache.free(start(cache, text))
    push_out(cache)
    computed = cache.stats().tokens_computed
    seq = cache.add([*text, 1, 2])
    assert cache.length(seq) >= (30 if config is one_group else 24)
    assert_contents(cache, seq, text[: cache.length(seq)])
    assert cache.stats().tokens_computed == computed
    assert cache.stats().tokens_reused == cache.length(seq)
    advance(cache, {seq: [*text, 1, 2]})
    assert_contents(cache, seq, [*text, 1, 2])
    cache.check()


def test_part_of_a_prefix_may_be_here_and_the_rest_on_the_host():
    cache = make(max_tokens=32)
    text = list(range(24))
    cache.free(start(cache, text))
    start(cache, [50] * 16)  # takes the end of the text and leaves its beginning
    seq = cache.add([*text, 1])
    assert cache.stats().live == 4 + 4  # no room for all of it
    assert cache.length(seq) == 16
    assert_contents(cache, seq, text[:16])
    cache.check()


def test_prefixes_on_the_host_never_cross_salts():
    cache = make(max_tokens=16)
    cache.free(start(cache, TEXT, salt=b"a"))
    push_out(cache)
    assert cache.length(cache.add(TEXT, salt=b"b")) == 0
    assert cache.length(cache.add(TEXT, salt=b"a")) == 9


def test_the_prefix_used_least_recently_leaves_the_host_first():
    cache = make(max_tokens=16, host_tokens=24)
    for token in (1, 2, 1, 3):  # 1 is asked for again before 3 comes
        seq = cache.add([token] * 8 + [9])
        if cache.length(seq) < 8:
            advance(cache, {seq: [token] * 8 + [9]})
        cache.free(seq)
        push_out(cache)
    found = []
    for token in (1, 2, 3):
        seq = cache.add([token] * 9)
        found.append(cache.length(seq))
        cache.free(seq)
    assert found[0] == found[2] == 8
    assert found[1] < 8


def test_offloaded_sequences_push_prefixes_out_of_the_host_and_not_the_other_way():
    cache = make(max_tokens=16, host_tokens=16)
    a = start(cache, TEXT)
    cache.offload(a)
    for token in range(20, 24):
        cache.free(start(cache, [token] * 16))
    stats = cache.stats()
    assert (stats.offloaded, stats.host_cached) == (3, 1)
    cache.restore(a)
    assert_contents(cache, a, TEXT)


def test_a_hit_on_the_host_counts_towards_a_reservation():
    cache = make(max_tokens=32)
    text = list(range(16))
    cache.free(start(cache, text))
    push_out(cache)
    other = start(cache, [50] * 8)
    seq = cache.add([*text, 0], max_tokens=24)
    assert cache.length(seq) == 16
    assert cache.stats().promised == 2
    with pytest.raises(OutOfPagesError):
        advance(cache, {other: [50] * 9})
    advance(cache, {seq: [*text, *range(8)]})
    assert_contents(cache, seq, [*text, *range(8)])
    cache.check()


def test_what_the_host_cannot_hold_is_lost_and_nothing_else_happens(monkeypatch):
    cache = make(max_tokens=16)

    def fail(*args):
        raise MemoryError

    monkeypatch.setattr(HostStorage, "keep", fail)
    cache.free(start(cache, TEXT))
    push_out(cache)
    assert cache.stats().host_cached == 0
    assert cache.length(cache.add(TEXT)) == 0
    cache.check()


def test_stats_say_what_is_on_the_host():
    cache = make()
    assert "host" not in str(cache.stats())
    cache.offload(start(cache, TEXT))
    assert "on the host 3 pages offloaded (0.0 MiB), 0 cached" in str(cache.stats())


@pytest.mark.parametrize(
    "fields", [{}, {"host_tokens": 0}, {"read_tokens": 16}, {"growth_step": 8}]
)
def test_a_cache_that_is_dropped_gives_its_memory_back_without_a_garbage_collection(fields):
    cache = make(**fields)
    seq = start(cache, TEXT)
    if cache.config.host_tokens:
        cache.offload(seq)
        push_out(cache)
    held = [weakref.ref(x) for x in (cache._storage, cache._tables, cache._tier) if x is not None]
    gc.collect()
    gc.disable()
    try:
        del cache
        assert [ref() for ref in held] == [None] * len(held)
    finally:
        gc.enable()


# ------------------------------------------------------------------ what it costs


def test_copies_are_timed_and_tell_what_the_next_one_takes():
    cache = make()
    a, b = start(cache, TEXT), start(cache, TEXT[:4])
    assert cache.copy_seconds(a) is None
    without = make(host_tokens=0)
    assert without.copy_seconds(start(without, TEXT)) is None
    cache.offload(b)
    one_way = cache.copy_seconds(a)
    cache.clear_prefixes()
    cache.restore(b)
    assert 0 < cache.copy_seconds(b) < cache.copy_seconds(a)
    assert one_way > 0


def test_a_pace_follows_what_was_measured_last():
    pace = Rate()
    assert pace.seconds(1) is None
    pace.add(100, 1)
    assert pace.seconds(50) == pytest.approx(0.5)
    for _ in range(30):
        pace.add(100, 4)
    assert pace.seconds(50) == pytest.approx(2, rel=0.01)
    for _ in range(30):
        with pace(1e9):
            pass
    assert pace.seconds(1e9) < 1
