"""A recording holds what changed and no more; calls fail and disks fill while it is written."""

import gc
import json
import os
import signal
import weakref

import numpy as np
import pytest

from pagedkv import OutOfPagesError, PagedKVCache, offload_idle
from pagedkv.errors import ForeignFileError
from pagedkv.pages import sequences
from pagedkv.pages.dirty import DirtyEntries
from pagedkv.pages.pool import PagePool
from pagedkv.recording.lines import TraceFile
from pagedkv.step.device_tables import DeviceTables
from pagedkv.trace import replay
from pagedkv.trace.read import Trace
from tests.cases import in_few_bits, one_group, two_groups
from tests.contents import advance, start
from tests.trace.recorded import assert_same_pages


@pytest.fixture
def file(tmp_path):
    return tmp_path / "a.trace"


def record(file, config=None, **options):
    return PagedKVCache(config or one_group(), device="cpu", debug=True, trace=file, **options)


def calls(file):
    return [event["op"] for _, event in Trace(file)]


# ------------------------------------------------------------------ the cache


def test_books_that_nobody_watches_are_plain():
    tables = PagedKVCache(one_group(), device="cpu")._tables
    assert (type(tables.pool), type(tables.changed)) == (PagePool, DirtyEntries)


def test_a_recorded_cache_goes_as_soon_as_nobody_has_it(file):
    config = one_group(host_tokens=16, growth_step=8, retention="fifo", budget=16, page_size=1)
    cache = record(file, config)
    cache.offload(start(cache, [1, 2, 3]))
    gc.disable()
    try:
        gone = weakref.ref(cache)
        del cache
        assert gone() is None
    finally:
        gc.enable()


def test_a_trace_has_neither_ids_nor_salts(file):
    cache = record(file)
    start(cache, [31337, 31338], salt=b"a customer's name")
    assert not [word for word in ("3133", "customer") if word in file.read_text()]


def test_a_call_that_finds_no_pages_is_told_before_what_makes_room_for_it(file):
    cache = record(file, one_group(max_tokens=16, host_tokens=32), on_pressure=offload_idle)
    start(cache, [1] * 10)
    start(cache, [2] * 10)
    assert calls(file)[3:] == ["add", "failed", "offload", "prepare", "commit"]
    assert_same_pages(replay(file), cache)


@pytest.mark.parametrize(("config", "size"), [(two_groups(5), 29), (in_few_bits("int4"), 37)])
def test_loads_are_told_also_those_that_find_no_pages(config, size, file, tmp_path):
    cache, text = record(file, config), [i % 3 for i in range(size)]
    seq = start(cache, text)
    cache.save(seq, tmp_path / "seq")
    loaded = cache.load(tmp_path / "seq")
    advance(cache, {loaded: [*text, 1]})
    with pytest.raises(OutOfPagesError):
        [cache.load(tmp_path / "seq") for _ in range(4)]
    assert calls(file)[-1] == "failed"
    cache.free([seq, loaded])
    assert_same_pages(replay(file), cache)


@pytest.mark.parametrize("broken", [DeviceTables.send, "keep"], ids=["step", "prefix"])
def test_what_was_undone_or_lost_for_want_of_memory_is_told(broken, file, monkeypatch):
    cache = record(file, one_group(max_tokens=16, host_tokens=64))

    def none(*_):
        raise MemoryError("none")

    cache.free(start(cache, [1] * 12))
    where = DeviceTables if broken is DeviceTables.send else type(cache._tier.storage)
    monkeypatch.setattr(where, "send" if where is DeviceTables else "keep", none)
    try:
        cache.prepare([cache.add()], [[4] * 16])
    except MemoryError:
        assert where is DeviceTables
    assert calls(file)[-1] == ("failed" if where is DeviceTables else "prepare")
    assert_same_pages(replay(file), cache)


def test_what_a_finalizer_released_and_what_an_interrupt_took_back_is_told(file, monkeypatch):
    cache, fork = record(file), sequences.fork
    seq = start(cache, [1, 2, 3, 4, 5])
    cache.prepare([seq], [[4]])
    cache.release_later([seq])
    seq = start(cache, [1, 2, 3])
    assert calls(file)[4:6] == ["abort", "free"]

    def pressed(*args):
        forks = fork(*args)
        signal.raise_signal(signal.SIGINT)
        return forks

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        monkeypatch.setattr(sequences, "fork", pressed)
        with pytest.raises(KeyboardInterrupt):
            cache.fork(seq, 2)
    finally:
        signal.signal(signal.SIGINT, before)
    assert calls(file)[-2:] == ["fork", "free"]
    assert_same_pages(replay(file), cache)


# ------------------------------------------------------------------ the file


def test_a_file_that_is_no_trace_is_left_alone_and_an_older_trace_is_replaced(file):
    file.write_text("Why is the sky blue?\n")
    with pytest.raises(ForeignFileError, match="expected a new file or an older trace"):
        record(file)
    assert file.read_text() == "Why is the sky blue?\n"
    file.write_text('{"format":"pagedkv trace","version":1}\n')
    old = record(file)
    seq = start(old, [1, 2, 3])
    new = record(file, one_group(rollback=np.int32(2), max_tokens=np.int64(64)))
    start(new, [4, 5])
    old.free(seq)  # goes to a file without a name
    assert_same_pages(replay(file), new)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize("begins", [False, True])
def test_processes_that_begin_one_trace_at_once_each_have_a_file(begins, file, monkeypatch):
    """The other one removes the older trace first, and may have begun its own."""
    TraceFile(file, {}).close()
    unlink, others = os.unlink, []

    def slowly(path):
        monkeypatch.setattr(os, "unlink", unlink)
        unlink(path)
        if begins:
            others.append(TraceFile(file, {"own": False}))
        else:
            unlink(path)  # raises: somebody was quicker

    monkeypatch.setattr(os, "unlink", slowly)
    own = TraceFile(file, {"own": True})
    own.write({"op": "free"})
    for other in others:
        other.write({"op": "add", "seq": 7})
    header, *events = map(json.loads, file.read_bytes().splitlines())
    assert (header["own"], [event["op"] for event in events]) == (True, ["free"])


def test_a_full_disk_ends_the_recording_and_not_the_job():
    with pytest.warns(RuntimeWarning, match="the job goes on: .*No space left"):
        cache = record("/dev/full")
    assert cache.length(start(cache, [1, 2, 3])) == 3
    assert cache._tables.notes.pages == []  # nobody reads them any more


def test_a_disk_that_fills_up_in_between_leaves_a_trace_of_what_was_before(file, monkeypatch):
    cache = record(file)
    seq = start(cache, [1, 2, 3])

    def torn(self, event):
        os.truncate(file, file.stat().st_size - 5)  # what a write that came to its limit leaves
        self.stop("the device is full")

    monkeypatch.setattr(TraceFile, "write", torn)
    with pytest.warns(RuntimeWarning, match="ends after 3 events"):
        advance(cache, {seq: [1, 2, 3, 4]})
    trace = Trace(file)
    assert [event["op"] for _, event in trace] == ["add", "prepare"]
    assert trace.torn


def test_a_forked_child_records_nothing(file):
    cache = record(file)
    child = os.fork()
    if child == 0:
        try:
            cache.add([4, 5])
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    start(cache, [1, 2, 3])
    assert calls(file) == ["add", "prepare", "commit"]
    assert_same_pages(replay(file), cache)
