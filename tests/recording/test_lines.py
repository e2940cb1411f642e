"""The file of a trace: what it never overwrites, and what becomes of it when something breaks."""

import json
import os
import threading

import numpy as np
import pytest

from pagedkv import PagedKVCache
from pagedkv.errors import ForeignFileError
from pagedkv.recording.lines import TraceFile
from pagedkv.trace import replay
from pagedkv.trace.read import read
from tests.cases import one_group
from tests.contents import advance, start
from tests.trace.recorded import assert_same_pages


def lines_of(path):
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def test_each_event_is_in_the_file_as_soon_as_its_call_returns(tmp_path):
    cache = PagedKVCache(one_group(), device="cpu", trace=tmp_path / "a.trace")
    seq = start(cache, [1, 2, 3])
    assert [e.get("op") for e in lines_of(tmp_path / "a.trace")] == [
        None, "add", "prepare", "commit",
    ]  # fmt: skip
    cache.free(seq)
    assert lines_of(tmp_path / "a.trace")[-1]["op"] == "free"


def test_a_file_that_is_no_trace_is_left_alone(tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("Why is the sky blue?\n")
    with pytest.raises(ForeignFileError, match="expected a new file or an older trace"):
        PagedKVCache(one_group(), device="cpu", trace=file)
    assert file.read_text() == "Why is the sky blue?\n"


def test_an_older_trace_is_replaced(tmp_path):
    file = tmp_path / "a.trace"
    start(PagedKVCache(one_group(), device="cpu", trace=file), [1, 2, 3])
    cache = PagedKVCache(one_group(), device="cpu", trace=file)
    cache.add()
    assert [e["op"] for e in read(file).events] == ["add"]


def test_a_cache_whose_trace_was_replaced_writes_nothing_into_the_new_one(tmp_path):
    file = tmp_path / "a.trace"
    old = PagedKVCache(one_group(), device="cpu", trace=file)
    seq = start(old, [1, 2, 3])
    new = PagedKVCache(one_group(), device="cpu", trace=file)
    start(new, [4, 5])
    old.free(old.fork(seq, 2))
    assert_same_pages(replay(file), new)


def test_numbers_of_numpy_in_a_configuration_are_written_as_any(tmp_path):
    config = one_group(rollback=np.int32(2), max_tokens=np.int64(64))
    cache = PagedKVCache(config, device="cpu", trace=tmp_path / "a.trace")
    start(cache, [1, 2, 3])
    assert_same_pages(replay(tmp_path / "a.trace"), cache)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_ends_the_recording_and_not_the_job():
    with pytest.warns(RuntimeWarning, match="the job goes on: .*No space left"):
        cache = PagedKVCache(one_group(), device="cpu", trace="/dev/full")
    seq = start(cache, [1, 2, 3])
    cache.check()
    assert cache.length(seq) == 3


def test_a_disk_that_fills_up_in_between_leaves_a_trace_that_replays(tmp_path, monkeypatch):
    cache = PagedKVCache(one_group(), device="cpu", trace=tmp_path / "a.trace")
    seq = start(cache, [1, 2, 3])
    write, file = TraceFile.write, tmp_path / "a.trace"

    def torn(self, event):
        os.truncate(file, file.stat().st_size - 5)  # what a write that came to its limit leaves
        self.stop("the device is full")

    monkeypatch.setattr(TraceFile, "write", torn)
    with pytest.warns(RuntimeWarning, match="ends after 3 events"):
        advance(cache, {seq: [1, 2, 3, 4]})
    monkeypatch.setattr(TraceFile, "write", write)
    advance(cache, {seq: [1, 2, 3, 4, 5]})
    trace = read(file)
    assert trace.torn
    assert [e["op"] for e in trace.events] == ["add", "prepare"]
    assert replay(file).open_step is not None


def test_a_forked_child_records_nothing(tmp_path):
    cache = PagedKVCache(one_group(), device="cpu", trace=tmp_path / "a.trace")
    start(cache, [1, 2, 3])
    child = os.fork()
    if child == 0:
        try:
            cache.add([4, 5])
        finally:
            os._exit(0)
    os.waitpid(child, 0)
    cache.add()
    assert [e["op"] for e in read(tmp_path / "a.trace").events][-2:] == ["commit", "add"]
    replay(tmp_path / "a.trace")


def test_threads_that_take_turns_write_whole_lines_in_the_order_of_their_calls(tmp_path):
    cache = PagedKVCache(one_group(max_tokens=256), device="cpu", trace=tmp_path / "a.trace")

    def work(first):
        for n in range(10):
            with cache.lock:
                seq = start(cache, [first, n, n + 1])
            with cache.lock:
                cache.free(seq)

    threads = [threading.Thread(target=work, args=(first,)) for first in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(read(tmp_path / "a.trace").events) == 2 * 10 * 4
    assert_same_pages(replay(tmp_path / "a.trace"), cache)
