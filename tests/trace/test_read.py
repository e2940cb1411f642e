"""Traces that were cut off, changed, packed or forged end in a sentence, in little memory."""

import gzip
import json
import random
import re
import resource
import subprocess
import sys

import pytest

from pagedkv import PagedKVCache
from pagedkv.errors import (
    CorruptCacheError,
    CorruptFileError,
    ForeignFileError,
    NewerFileError,
    PagedKVError,
)
from pagedkv.trace import books, history, replay
from pagedkv.trace.chrome import chrome
from pagedkv.trace.history import history_of
from pagedkv.trace.page import page
from pagedkv.trace.read import Trace
from tests.cases import one_group
from tests.contents import start
from tests.effort import examples, sampled, slow
from tests.trace.recorded import assert_same_pages


@pytest.fixture
def written(tmp_path):
    """A trace of three sequences, of which one is in host memory and one has ended; its cache."""
    config = one_group(host_tokens=64)
    cache = PagedKVCache(config, device="cpu", trace=tmp_path / "a.trace")
    first, second = start(cache, [1] * 6), start(cache, [2] * 6)
    cache.fork(second)
    cache.offload(first)
    cache.free(second)
    return tmp_path / "a.trace", cache


def drawn(path):
    """Everything that is made of a trace."""
    history = history_of(Trace(path), check=True)
    return page(history), chrome(history)


def test_a_trace_cut_at_any_byte_is_read_as_far_as_it_goes(written):
    path, _ = written
    data = path.read_bytes()
    for end in range(data.index(b"\n") + 1, len(data) + 1, 7):
        path.write_bytes(data[:end])
        trace = Trace(path)
        assert len(list(trace)) == data[:end].count(b"\n") - 1
        assert trace.torn == (data[end - 1 : end] != b"\n")
        replay(path)


def test_a_packed_trace_is_read_like_any_and_damage_within_is_told(written):
    path, cache = written
    path.write_bytes(gzip.compress(path.read_bytes()))
    assert_same_pages(replay(path), cache)
    packed = path.read_bytes()
    for damaged in (packed[:-9], packed[:-8] + b"\xff" * 8):
        path.write_bytes(damaged)
        with pytest.raises(CorruptFileError, match="damaged within"):
            replay(path)


HEADER = b'{"format":"pagedkv trace","version":2,"page_size":4,"segments":[["a",0,%d,1]],'
HEADER += b'"existing":[9],"free":[9],"cached":[0]}\n'
STEP = b'{"op":"prepare","us":1}\n{"op":"abort","us":1}\n'
TEXT = b'{"op":"add","us":1,"rows":[%d,1,0,1048576],"entries":[0,0,1048576,%d,0]}\n'
READ = "import sys; from pagedkv.trace.history import history_of as h; "
READ += "from pagedkv.trace.read import Trace; h(Trace(sys.argv[1]))"


@pytest.mark.parametrize(
    ("begin", "lines", "says"),
    [
        (HEADER % 9, [b"0" * 2**24] * 64, "CorruptFileError: .*line 2 is too long"),
        *slow(
            (b"", [b"0" * 2**24] * 64, "CorruptFileError: .*line 1 is too long"),
            (HEADER % 9, [STEP * 2**18] * 64, "CorruptFileError: .*packed more than 16 to 1"),
            (
                HEADER % 2**22,
                [TEXT % (i, i) for i in range(99)],
                "CorruptFileError: .*more than 67",
            ),
        ),
    ],
    ids=["one line", "no line", "many lines", "tables"],
)
def test_a_bomb_is_refused_in_little_memory(begin, lines, says, tmp_path):
    packed = {line: gzip.compress(line, 1) for line in lines}
    (tmp_path / "a.trace").write_bytes(gzip.compress(begin) + b"".join(map(packed.get, lines)))

    def limit():
        resource.setrlimit(resource.RLIMIT_AS, (1 << 30, 1 << 30))

    command = [sys.executable, "-c", READ, tmp_path / "a.trace"]
    done = subprocess.run(command, capture_output=True, text=True, preexec_fn=limit, timeout=300)
    assert re.search(says, done.stderr), done.stderr


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        (b'"version":2', b'"version":"2"', "line 1 tells no version"),
        (b'"page_size":4', b'"page_size":-4', "line 1 describes no cache"),
        (b'"segments"', b'"segmentz"', "line 1 describes no cache: KeyError"),
        (b'"existing":[', b'"existing":[1,', "line 1 describes no cache"),
        (b'["2 layers",0,16,', b'["2 layers",0,16777216,', "line 1 describes no cache"),
        (b'["2 layers",0,', b'["2 layers",1,', "line 1 describes no cache"),
        (b",16,512", b",16,Infinity", "line 1 describes no cache: .*bytes of a page"),
        (b'"us":', b'"us":-', "line 2 is no event"),
        (b'{"op":"add"', b"[" * 99_999, "line 2 is no event"),
        (b'"op":"commit"', b'"op":["commit"]', "line 4 is no event"),
        (b'"op":"offload"', b'"op":"unload"', "line 9 is no event: .*, got 'unload' and "),
        (b'"new":6', b'"new":[6,6]', "line 3, prepare, happened to no cache"),
        (b'"new":6', b'"new":9', "line 4, commit, happened to no cache: .* no pages"),
        (b'"entries":[0,0,2,0,0]', b'"entries":[0,15,2,0,0]', "line 3, prepare, .*: page 16 of 16"),
        (b'"entries":[0,0,2,0,0]', b'"entries":[1,0,2,0,0]', "line 3, prepare, .*place 1"),
        (b'"rows":[0,6,0,0]', b'"rows":[0,6,0,3]', "line 9, offload, .*places up to 3"),
        (b'"seqs":[0]', b'"seqs":["0"]', "line 3, prepare, .*expected whole numbers"),
        (b'"free":[14]', b'"free":[14,0]', "line 3, prepare, .*free: expected other numbers"),
        (b'"free":[14]', b'"free":[13]', "line 3, prepare, does not add up: .*14.* pages are free"),
        (b'"pages":[0,2,1,0]', b'"pages":[0,2,2,0]', "page 0 has 2 references and 1 owners"),
        (b'"pages":[0,2,1,0]', b'"pages":[0,3,1,0]', "page 2 has 1 references and 0 owners"),
    ],
)
def test_what_no_cache_does_and_what_does_not_add_up_is_told_with_its_line(written, old, new, says):
    path, _ = written
    data = path.read_bytes()
    assert old in data
    path.write_bytes(data.replace(old, new, 1))
    with pytest.raises((CorruptFileError, CorruptCacheError), match=says):
        drawn(path)


def test_a_few_lines_that_change_every_page_are_refused_before_they_fill_memory(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(history, "MOST_RUNS", 1000)
    every = b'{"op":"add","us":1,"pages":[0,300,0,%d]}\n' + STEP
    path = tmp_path / "a.trace"
    path.write_bytes(HEADER % 300 + b"".join(every % (i % 4 + 1) for i in range(9)))
    with pytest.raises(CorruptFileError, match="pages change more than 1,000 times"):
        history_of(Trace(path))


@pytest.mark.parametrize(
    ("what", "text", "says"),
    [
        ("MOST_TABLES", b'"rows":[%d,0,0,0]', "line 12, add, .*more than 10 tables"),
        ("MOST_ENTRIES", b'"rows":[%d,0,0,4],"entries":[0,0,4,%d,0]', "line 4, .*than 10 entries"),
        ("MOST_ENTRIES", b'"rows":[%d,0,0,11],"entries":[0,0,11,%d,0]', "line 2, .*10 of them"),
    ],
)
def test_more_than_a_cache_has_is_refused(what, text, says, tmp_path, monkeypatch):
    monkeypatch.setattr(books, what, 10)
    path = tmp_path / "a.trace"
    lines = (text.replace(b"%d", b"%d" % i) for i in range(11))
    path.write_bytes(HEADER % 19 + b"".join(b'{"op":"add","us":1,%s}\n' % line for line in lines))
    with pytest.raises(CorruptFileError, match=says):
        replay(path, check=False)


@sampled
def test_numbers_that_were_changed_at_random_never_end_in_another_error(written):
    path, _ = written
    lines = [json.loads(line) for line in path.read_bytes().splitlines()]
    for seed in range(examples(3000, 150)):
        source, told = random.Random(seed), [dict(line) for line in lines]
        for _ in range(source.choice((1, 1, 2, 5))):
            event = source.choice(told)
            name = source.choice(list(event))
            value = event[name]
            wild = source.choice((-1, 0, 1, 2, 7, 17, 2**31, 2**63, 2**70, 0.5, None, "a", [], {}))
            if isinstance(value, list) and value and source.random() < 0.7:
                at = source.randrange(len(value))
                event[name] = [*value[:at], wild, *value[at + 1 :]]
            else:
                event[name] = wild
        path.write_text("".join(json.dumps(event) + "\n" for event in told))
        try:
            drawn(path)
        except PagedKVError as error:
            assert "\n" not in str(error)  # noqa: PT017


@pytest.mark.parametrize("text", [b"", b"Why?\n", b"{}\n", b"[1]\n", b"\xff\xfe\n"])
def test_another_file_is_refused(tmp_path, text):
    (tmp_path / "x").write_bytes(text)
    with pytest.raises(ForeignFileError, match="expected a trace"):
        replay(tmp_path / "x")


def test_other_versions_are_refused(written):
    path, _ = written
    data = path.read_bytes()
    for version, error in ((1, ForeignFileError), (3, NewerFileError)):
        path.write_bytes(data.replace(b'"version":2', b'"version":%d' % version))
        with pytest.raises(error, match=f"a.trace: of version {version}, "):
            replay(path)
