"""What recording leaves alone, and the calls that do not end as they should."""

import gc
import signal
import weakref

import pytest

from pagedkv import OutOfPagesError, PagedKVCache, offload_idle
from pagedkv.pages import sequences
from pagedkv.saving import pieces
from pagedkv.step.device_tables import DeviceTables
from pagedkv.trace import replay
from pagedkv.trace.read import read
from tests.cache.stored import PIECE, TEXT, compute, make
from tests.cases import in_few_bits, one_group, two_groups
from tests.contents import advance, start, write_step
from tests.trace.recorded import assert_same_pages


def recorded(tmp_path, config, **options):
    return PagedKVCache(config, device="cpu", debug=True, trace=tmp_path / "a.trace", **options)


def test_a_cache_that_is_not_recorded_runs_no_other_code():
    cache = PagedKVCache(one_group(), device="cpu")
    hooked = [
        name for name, value in vars(cache).items() if callable(value) and name != "_pressure"
    ]
    assert hooked == []
    assert "_resize" not in vars(cache)


def test_a_recorded_cache_goes_as_soon_as_nobody_has_it(tmp_path):
    config = one_group(host_tokens=16, growth_step=8, retention="fifo", budget=16, page_size=1)
    cache = recorded(tmp_path, config)
    seq = start(cache, [1, 2, 3])
    cache.offload(seq)
    gc.disable()
    try:
        gone = weakref.ref(cache)
        del cache
        assert gone() is None
    finally:
        gc.enable()


def test_a_call_that_runs_out_is_told_and_changes_nothing(tmp_path):
    cache = recorded(tmp_path, one_group(max_tokens=16))
    start(cache, list(range(12)))
    with pytest.raises(OutOfPagesError):
        cache.prepare([cache.add()], [[1] * 8])
    failed = read(tmp_path / "a.trace").events[-1]
    assert (failed["op"], failed["call"], failed["error"]) == (
        "failed", "prepare", "OutOfPagesError",
    )  # fmt: skip
    assert_same_pages(replay(tmp_path / "a.trace"), cache)


def test_a_load_that_finds_no_pages_takes_no_id(tmp_path):
    cache = recorded(tmp_path, one_group(max_tokens=32, max_sequences=4))
    cache.save(start(cache, list(range(20))), tmp_path / "text")
    for _ in range(2):
        with pytest.raises(OutOfPagesError):
            cache.load(tmp_path / "text")
    assert cache.add([5]) == 1
    assert_same_pages(replay(tmp_path / "a.trace"), cache)


def test_a_stored_prefix_that_finds_no_pages_takes_no_id(tmp_path, monkeypatch):
    monkeypatch.setattr(pieces, "TOKENS", PIECE)
    compute(make(tmp_path / "store"), TEXT)
    config = one_group(max_tokens=32, fingerprint=b"a model")
    cache = recorded(tmp_path, config, prefix_store=tmp_path / "store")
    cache.add(max_tokens=28)
    assert cache.add(TEXT) == 1
    assert "failed" in [event["op"] for event in read(tmp_path / "a.trace").events]
    assert_same_pages(replay(tmp_path / "a.trace"), cache)


def test_what_a_callback_does_under_pressure_comes_before_the_call_it_helped(tmp_path):
    config = one_group(max_tokens=16, host_tokens=32)
    cache = recorded(tmp_path, config, on_pressure=offload_idle)
    first = start(cache, [1] * 10)
    start(cache, [2] * 10)
    assert cache.is_offloaded(first)
    names = [event["op"] for event in read(tmp_path / "a.trace").events]
    assert names[-4:] == ["failed", "offload", "prepare", "commit"]
    assert_same_pages(replay(tmp_path / "a.trace"), cache)


@pytest.mark.parametrize("config", [two_groups(5), in_few_bits("int4", max_tokens=128)])
def test_a_loaded_sequence_replays_without_its_file(config, tmp_path):
    text = [i % 3 for i in range(40)]
    source = PagedKVCache(config, device="cpu")
    seq = start(source, text)
    source.save(seq, tmp_path / "seq")
    cache = recorded(tmp_path, config)
    loaded = cache.load(tmp_path / "seq")
    (tmp_path / "seq").unlink()
    advance(cache, {loaded: [*text, 1]})
    fork = cache.fork(loaded)[0]
    advance(cache, {fork: [*text, 1, 2]})
    assert_same_pages(replay(tmp_path / "a.trace"), cache)


def test_memory_that_was_refused_is_refused_again(tmp_path, monkeypatch):
    cache = recorded(tmp_path, one_group(max_tokens=16, host_tokens=64))
    cache.free(start(cache, [1] * 12))
    with monkeypatch.context() as patch:

        def none(*_):
            raise MemoryError("none")

        patch.setattr(type(cache._tier.storage), "keep", none)
        cache.free(start(cache, [2] * 16))  # the prefix before goes, and no copy of it is kept
    assert cache.stats().host_cached == 0
    cache.free(start(cache, [3] * 16))  # now it is
    assert cache.stats().host_cached == 4
    assert [e.get("memory") for e in read(tmp_path / "a.trace").events].count([0]) == 1
    replayed = replay(tmp_path / "a.trace")
    assert_same_pages(replayed, cache)
    assert replayed.stats().host_cached == 4


def test_a_step_undone_for_want_of_memory_replays(tmp_path, monkeypatch):
    cache = recorded(tmp_path, one_group())
    seq = start(cache, [1, 2, 3])
    with monkeypatch.context() as patch:

        def none(*_):
            raise MemoryError("none")

        patch.setattr(DeviceTables, "send", none)
        with pytest.raises(MemoryError):
            cache.prepare([seq], [[4] * 6])
    advance(cache, {seq: [1, 2, 3, 4]})
    assert_same_pages(replay(tmp_path / "a.trace"), cache)


def test_steps_of_some_layers_and_of_counts_replay(tmp_path):
    cache = recorded(tmp_path, one_group())
    seq = cache.add()
    step = cache.prepare([seq], num_new=6)
    write_step(cache, step, [[1] * 6])
    cache.commit(step, tokens=[[1] * 6])
    step = cache.prepare([seq], [[2, 3]])
    write_step(cache, step, [[1] * 6 + [2, 3]], layers=[0])
    cache.commit(step, [1], layers=iter([0]))
    other = cache.add([1] * 6 + [2, 2])
    assert cache.length(other) == 6
    assert_same_pages(replay(tmp_path / "a.trace"), cache)


def test_sequences_that_a_finalizer_released_are_freed_in_the_replay(tmp_path):
    cache = recorded(tmp_path, one_group())
    seq = start(cache, [1, 2, 3])
    cache.prepare([seq], [[4]])
    cache.release_later([seq])
    cache.add()
    names = [event["op"] for event in read(tmp_path / "a.trace").events]
    assert names[-3:] == ["abort", "free", "add"]
    assert_same_pages(replay(tmp_path / "a.trace"), cache)


def test_what_an_interrupt_takes_back_is_taken_back_in_the_replay(tmp_path, monkeypatch):
    cache = recorded(tmp_path, one_group())
    seq, fork = start(cache, [1, 2, 3, 4, 5]), sequences.fork

    def pressed(*args):
        forks = fork(*args)
        signal.raise_signal(signal.SIGINT)
        return forks

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(sequences, "fork", pressed)
            with pytest.raises(KeyboardInterrupt):
                cache.fork(seq, 2)
    finally:
        signal.signal(signal.SIGINT, before)
    cache.fork(seq)
    names = [event["op"] for event in read(tmp_path / "a.trace").events]
    assert names[-3:] == ["fork", "free", "fork"]
    assert_same_pages(replay(tmp_path / "a.trace"), cache)
