"""Traces that were cut off, changed, or are none."""

import gzip

import pytest

from pagedkv import PagedKVCache
from pagedkv.errors import CorruptFileError, ForeignFileError, NewerFileError
from pagedkv.trace import replay
from pagedkv.trace.history import history_of
from pagedkv.trace.page import page
from pagedkv.trace.read import read
from tests.cases import one_group
from tests.contents import start
from tests.trace.recorded import assert_same_pages


@pytest.fixture
def written(tmp_path):
    """A trace of two sequences, and its cache."""
    cache = PagedKVCache(one_group(), device="cpu", trace=tmp_path / "a.trace")
    for first in (1, 2):
        start(cache, [first] * 6)
    return tmp_path / "a.trace", cache


def test_a_trace_cut_at_any_byte_replays_as_far_as_it_goes(written):
    path, _ = written
    data = path.read_bytes()
    begin = data.index(b"\n") + 1
    lines = data.count(b"\n") - 1
    for end in range(begin, len(data) + 1, 7):
        path.write_bytes(data[:end])
        trace = read(path)
        assert len(trace.events) == data[:end].count(b"\n") - 1 <= lines
        assert trace.torn == (data[end - 1 : end] != b"\n")
        replay(path)


def changed(written, old, new):
    """The recorded file, with one thing in it replaced."""
    path, _ = written
    data = path.read_bytes()
    assert old in data
    path.write_bytes(data.replace(old, new, 1))
    return path


def test_a_compressed_trace_reads_like_any(written):
    path, cache = written
    path.write_bytes(gzip.compress(path.read_bytes()))
    assert_same_pages(replay(path), cache)
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(CorruptFileError, match="damaged within"):
        read(path)


def test_a_damaged_line_is_named(written):
    path, _ = written
    lines = path.read_bytes().split(b"\n")
    lines[3] = lines[3][:-4]
    path.write_bytes(b"\n".join(lines))
    with pytest.raises(CorruptFileError, match="line 4 is no event"):
        read(path)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        (b'"version":1', b'"version":"1"', "line 1 tells no version"),
        (b'"version":1', b'"versioN":1', "line 1 tells no version"),
        (b'"config"', b'"confiq"', "line 1 tells no version or no configuration"),
        (b'"page_size":4', b'"page_size":-4', "line 1 has a configuration that no cache has"),
        (b'"max_tokens"', b'"max_t0kens"', "line 1 has a configuration.*KeyError"),
        (b'"bytes_per_page":[', b'"bytes_per_page":["",', "line 1 has a configuration"),
        (b'"window"', b'"vindow"', "line 1 has a configuration"),
        (b'"us":', b'"us":-', "line 2 is no event: us"),
        (b'"us":', b'"us":"",' + b'"":', "line 2 is no event"),
        (b'{"op":"add"', b"[" * 99_999, "line 2 is no event"),
        (b'"op":"add"', b'"op":"add","memory":7', "line 2, add"),
        (b'"op":"add"', b'"op":"add","evicted":[[[1]]]', "line 2, add"),
        (b'"op":"add"', b'"op":"asked"', "line 2, asked"),
        (b'"op":"add"', b'"op":"failed"', "line 2, failed"),
    ],
)  # fmt: skip
def test_whatever_is_damaged_is_told_with_its_line(written, old, new, says):
    path = changed(written, old, new)
    with pytest.raises(CorruptFileError, match=says):
        page(history_of(read(path)))


def test_damage_within_a_compressed_trace_is_told(written):
    path, _ = written
    path.write_bytes(gzip.compress(path.read_bytes())[:20] + b"\xff" * 30)
    with pytest.raises(CorruptFileError, match="damaged within"):
        read(path)


@pytest.mark.parametrize("text", [b"", b"Why?\n", b"{}\n", b"[1]\n", b"\xff\xfe\n"])
def test_another_file_is_refused(tmp_path, text):
    (tmp_path / "x").write_bytes(text)
    with pytest.raises(ForeignFileError, match="expected a trace"):
        read(tmp_path / "x")


def test_a_later_version_is_refused(written):
    path = changed(written, b'"version":1', b'"version":2')
    with pytest.raises(NewerFileError, match="version 2, this can read 1"):
        read(path)


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        (b'"seq":0', b'"seq":3', "line 2, add, .*expected 3, got 0"),
        (b'"op":"commit"', b'"op":"abort"', "line 4, abort, .*other pages are in use"),
        (b'"op":"commit"', b'"op":"melt"', "line 4, melt, .*has no attribute"),
        (b'"page_size":4', b'"page_size":2', "line 2, add, .*other pages are in use"),
    ],
)
def test_a_trace_that_does_not_happen_again_says_which_event(written, old, new, says):
    path = changed(written, old, new)
    with pytest.raises(CorruptFileError, match=says):
        replay(path)
