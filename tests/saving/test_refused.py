"""Files and arguments that are refused, each by name, and a cache that stays as it was."""

import json
import os
import random
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from pagedkv.errors import (
    CorruptFileError,
    ForeignFileError,
    HostMemoryError,
    NewerFileError,
    OutOfPagesError,
    SavedFileError,
    SequenceTooLongError,
    TooManySequencesError,
    UnknownSequenceError,
    WrongModelError,
    WrongShapeError,
)
from pagedkv.saving import format as files
from tests.cases import window_only
from tests.contents import assert_contents, start
from tests.saving.saved import TEXT, make, refused


def test_every_flipped_bit_is_detected(saved):
    data = bytearray(saved.read_bytes())
    files.verify(bytes(data))
    for at in range(len(data)):
        for bit in range(8):
            data[at] ^= 1 << bit
            with pytest.raises((CorruptFileError, ForeignFileError)):
                files.verify(bytes(data))
            data[at] ^= 1 << bit
    files.verify(bytes(data))


@pytest.mark.parametrize("cut", [0, 7, 8, 100, 400, -1])
def test_a_file_that_is_cut_short_is_refused(cut, saved):
    saved.write_bytes(saved.read_bytes()[:cut])
    refused(saved, SavedFileError, str(saved))


def test_a_file_that_has_grown_is_refused_before_memory_is_taken_for_it(saved):
    with saved.open("ab") as file:
        file.truncate(1 << 40)
    refused(saved, CorruptFileError, "are not those of its header")


def test_a_file_that_is_larger_than_free_memory_is_refused_before_memory_is_taken(saved):
    data = saved.read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    entries, size = json.loads(data[8:begin]), 1 << 40
    entries["holes"] = {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}
    text = json.dumps(entries).encode()
    with saved.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + size)
    refused(saved, HostMemoryError, f"{saved}: expected at most .* bytes, as are free, got ")


def test_files_of_others_are_refused_as_such(saved, tmp_path):
    (tmp_path / "text").write_text("once upon a time")
    save_file({"weight": torch.zeros(3)}, tmp_path / "weights")
    save_file({"x": torch.zeros(3)}, tmp_path / "said", {"format": "pt"})
    with (tmp_path / "large").open("wb") as file:
        file.truncate(1 << 40)  # holes; who reads it whole runs out of memory
    os.mkfifo(tmp_path / "pipe")  # who waits for its writer waits for ever
    os.mkfifo(tmp_path / "full")
    writer = os.open(tmp_path / "full", os.O_RDWR | os.O_NONBLOCK)
    for name in ("text", "weights", "said", "large", "pipe", "full"):
        refused(tmp_path / name, ForeignFileError, "expected a sequence")
    os.write(writer, saved.read_bytes()[:1024])  # until now it was silent
    refused(tmp_path / "full", ForeignFileError, "expected a sequence")
    os.close(writer)
    with pytest.raises(FileNotFoundError):
        make().load(tmp_path / "nothing")


def test_the_version_to_come_is_refused_as_such(saved, monkeypatch):
    monkeypatch.setattr(files, "VERSION", 2)
    rewrite(saved)
    monkeypatch.undo()
    refused(saved, NewerFileError, "version 2, this pagedkv reads 1")


def rewrite(path: Path, change=lambda header, tensors: None) -> None:
    """A file with something else in it, and a checksum that is right."""
    header, tensors = files.read(path)
    del header["sha256"], header["version"]
    change(header, tensors)
    files.write(path, header, tensors)


@pytest.mark.parametrize(
    ("fields", "error", "match"),
    [
        ({"fingerprint": b"other"}, WrongModelError, "expected K and V of the model 6f74686572"),
        ({"fingerprint": b""}, WrongModelError, "expected K and V of the model .unnamed"),
        ({"head_dim": 8}, WrongShapeError, "expected head_dim 8, got 4"),
        ({"num_kv_heads": 1}, WrongShapeError, "num_kv_heads"),
        ({"num_layers": 3}, WrongShapeError, "num_layers"),
        ({"dtype": "bfloat16"}, WrongShapeError, "expected dtype 'bfloat16', got 'float32'"),
        ({"groups": window_only(6).groups}, WrongShapeError, "groups"),
        ({"max_sequence_length": 9}, SequenceTooLongError, "10 tokens"),
        ({"max_tokens": 12}, OutOfPagesError, "load needs 3 more pages"),
        ({"max_sequences": 1}, TooManySequencesError, "max_sequences"),
    ],
)
def test_a_file_that_does_not_fit_the_cache_is_refused_by_name(fields, error, match, saved):
    refused(saved, error, match, make(**{"fingerprint": b"some model", **fields}))


def contradictions():
    def header(name, value):
        return lambda header, tensors: header.update({name: value})

    def without(name):
        return lambda header, tensors: (tensors if name in tensors else header).pop(name)

    def tensor(name, change):
        return lambda header, tensors: tensors.update({name: change(tensors[name]).contiguous()})

    return {
        "length": header("length", 11),
        "negative": header("length", -1),
        "words": header("length", "ten"),
        "page size": header("page_size", 5),
        "no page size": header("page_size", 0),
        "shape": header("shape", 3),
        "no shape": without("shape"),
        "no model": without("model"),
        "no keys": without("0.0.k"),
        "no positions": without("0.0.positions"),
        "fewer pages": tensor("0.0.k", lambda k: k[:, :2]),
        "heads": tensor("0.0.v", lambda v: v[:, :, :1]),
        "dtype": tensor("0.0.v", lambda v: v.half()),
        "rank": tensor("0.0.v", lambda v: v[0]),
        "shifted": tensor("0.0.positions", lambda p: p + 4),
        "repeated": tensor("0.0.positions", lambda p: p * 0),
        "far": tensor("0.0.positions", lambda p: p + 4_000_000),
        "gap": tensor("0.0.positions", lambda p: p * 2),
        "between pages": tensor("0.0.positions", lambda p: p + 1),
        "float positions": tensor("0.0.positions", lambda p: p.float()),
        "fewer ids": tensor("tokens", lambda t: t[:5]),
        "negative ids": tensor("tokens", lambda t: -t),
        "long ids": tensor("tokens", lambda t: t.long()),
        "pending": lambda header, tensors: tensors.update(pending=torch.zeros(2)),
        "more": lambda header, tensors: tensors.update({"0.0.w": torch.zeros(2, 3)}),
        "a kind": lambda header, tensors: tensors.update({"0.x.w": torch.zeros(2, 3)}),
    }


@pytest.mark.parametrize("name", contradictions())
@pytest.mark.parametrize("size", [4, 3])
def test_a_file_that_contradicts_itself_is_refused_though_its_checksum_is_right(name, size, saved):
    rewrite(saved, contradictions()[name])
    cache = make(fingerprint=b"some model", page_size=size)
    refused(saved, CorruptFileError, "contradicts itself", cache)


@pytest.mark.parametrize("where", ["put_in", "repage"])
@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
def test_an_error_while_a_file_is_loaded_changes_nothing(where, error, saved, monkeypatch):
    cache = make(fingerprint=b"some model", page_size=3)

    def fail(*args):
        raise error

    monkeypatch.setattr(type(cache._storage), where, fail)
    refused(saved, error, None, cache)
    monkeypatch.undo()
    assert_contents(cache, cache.load(saved), TEXT[:10])


def test_an_error_while_a_file_is_written_leaves_the_old_one(saved, monkeypatch):
    before, cache = saved.read_bytes(), make()
    seq = start(cache, TEXT)

    def fail(*args):
        raise OSError("no space left on device")

    for name in ("replace", "fsync"):
        monkeypatch.setattr(files.os, name, fail)
        with pytest.raises(OSError, match="no space"):
            cache.save(seq, saved)
        monkeypatch.undo()
        assert saved.read_bytes() == before
        assert os.listdir(saved.parent) == [saved.name]


def test_wrong_arguments_are_named(saved, tmp_path):
    cache = make(fingerprint=b"some model")
    with pytest.raises(TypeError, match="salt: expected bytes"):
        cache.load(saved, salt="text")
    with pytest.raises(UnknownSequenceError):
        cache.save(3, tmp_path / "x")
    with pytest.raises(FileNotFoundError):
        cache.save(cache.add(), tmp_path / "no folder" / "x")
    assert not (tmp_path / "x").exists()


WITHOUT_SAFETENSORS = """
import sys
sys.modules["safetensors"] = None
from pagedkv import PagedKVCache
from tests.cases import one_group
from tests.contents import assert_contents, start

cache = PagedKVCache(one_group(), device="cpu")
cache.save(start(cache, [1, 2, 3, 4, 5]), sys.argv[1])
assert_contents(cache, cache.load(sys.argv[1]), [1, 2, 3, 4, 5])
"""


def test_files_need_no_package_of_their_own(fresh_python, tmp_path):
    root = Path(__file__).resolve().parents[2]
    fresh_python("-c", WITHOUT_SAFETENSORS, str(tmp_path / "x"), path=root)


FULL_DISK = """
import errno, os, resource, sys
from pathlib import Path
from pagedkv import PagedKVCache
from tests.cases import one_group
from tests.contents import start

path = Path(sys.argv[1])
cache = PagedKVCache(one_group(head_dim=64), device="cpu")
cache.save(start(cache, [1, 2, 3]), path)
before, long = path.read_bytes(), start(cache, list(range(60)))
for limit in (0, 100, 5_000, 40_000):
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
    try:
        cache.save(long, path)
    except OSError as error:
        assert error.errno == errno.EFBIG
        print(limit, path.read_bytes() == before, os.listdir(path.parent))
    cache.check()
"""


def test_a_full_disk_is_an_error_of_the_system_and_the_old_file_stays(forked, tmp_path):
    said = forked(FULL_DISK, str(tmp_path / "x"))
    assert said.splitlines() == [f"{limit} True ['x']" for limit in (0, 100, 5_000, 40_000)]


@pytest.mark.parametrize("name", ["x" * 255, "x" * 242, "ä" * 127])
def test_a_name_may_be_as_long_as_the_system_allows(name, tmp_path):
    cache = make()
    cache.save(start(cache, TEXT), tmp_path / name)
    assert os.listdir(tmp_path) == [name]
    assert_contents(cache, cache.load(tmp_path / name), TEXT)


@pytest.mark.parametrize("there", [True, False])
def test_a_link_is_followed_and_stays_one(there, tmp_path):
    (tmp_path / "disk").mkdir()
    target, link = tmp_path / "disk" / "chat", tmp_path / "link"
    if there:
        target.write_bytes(b"old")
    link.symlink_to(Path("disk") / "chat")
    cache = make()
    cache.save(start(cache, TEXT), link)
    assert link.is_symlink()
    assert not target.is_symlink()
    assert_contents(cache, cache.load(target), TEXT)
    assert (os.listdir(tmp_path / "disk"), len(os.listdir(tmp_path))) == (["chat"], 2)


@pytest.mark.parametrize("kind", ["fifo", "folder", "link to a fifo"])
def test_what_is_no_file_is_not_replaced(kind, tmp_path):
    place = tmp_path / "x"
    place.mkdir() if kind == "folder" else os.mkfifo(place)
    if kind == "link to a fifo":
        (tmp_path / "link").symlink_to(place)
        place = tmp_path / "link"
    before = place.lstat(), sorted(os.listdir(tmp_path))
    cache = make()
    with pytest.raises(OSError, match="x: expected a file or a free name"):
        cache.save(start(cache, TEXT), place)
    assert (place.lstat(), sorted(os.listdir(tmp_path))) == before


def damaged(data, source):
    """A file's bytes with something done to them: flipped, cut, or put in."""
    at, n = source.randrange(len(data)), source.choice([1, 2, 8, 64])
    some = bytes(source.randrange(256) for _ in range(n))
    how = source.randrange(5)
    if how == 0:
        return data[:at] + bytes([data[at] ^ (1 << source.randrange(8))]) + data[at + 1 :]
    if how == 1:
        return data[:at]
    if how == 2:
        return data[:at] + data[at + n :]
    if how == 3:
        return data[:at] + some + data[at:]
    return data[:at] + some + data[at + n :]


STRANGE = [-1, 0, 1, 2**31, 2**63, 2**70, 10**400, 0.5, "", "F32", "7", [], {}, None, True, [[1]]]


def forged(data, source):
    """A file with nonsense in one place of its header, and the checksum that belongs to it."""
    end = 8 + int.from_bytes(data[:8], "little")
    outer = json.loads(data[8:end])
    inner = json.loads(outer["__metadata__"][files.MARK])
    places = [(inner, name) for name in inner if name != "sha256"]
    places += [(inner["shape"], name) for name in inner["shape"]]
    for entry in (entry for name, entry in outer.items() if name != "__metadata__"):
        places += [(entry, name) for name in entry]
        places += [(entry["data_offsets"], 0), (entry["data_offsets"], 1)]
        places += [(entry["shape"], i) for i in range(len(entry["shape"]))]
    place, name = source.choice(places)
    value = source.choice(STRANGE)
    if type(place[name]) is int and source.random() < 0.3:
        value = place[name] + source.choice([-8, -4, -1, 1, 4, 8])
    if source.random() < 0.1 and isinstance(place, dict):
        del place[name]
    else:
        place[name] = value
    return signed(outer, inner, data[end:])


def signed(outer, inner, body):
    """A file of this header, whatever it says, with the checksum that belongs to it."""
    inner["sha256"] = files.NO_DIGEST
    outer["__metadata__"][files.MARK] = json.dumps(inner)
    text = json.dumps(outer).encode()
    whole = len(text).to_bytes(8, "little") + text + body
    digest = sha256(whole).hexdigest().encode()
    return whole.replace(files.NO_DIGEST.encode(), digest, 1)


@pytest.mark.parametrize(
    ("shape", "end"), [([0, 2**40, 2**40], 0), ([2**62, 2**62, 0], 0), ([0] * 70, 0), ({}, 4)]
)
def test_a_tensor_of_hardly_a_byte_may_not_have_any_shape(shape, end, saved):
    data = saved.read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    outer = json.loads(data[8:begin])
    inner = json.loads(outer["__metadata__"][files.MARK])
    outer["0.0.k"] |= {"shape": shape, "data_offsets": [0, end]}
    saved.write_bytes(signed(outer, inner, data[begin:]))
    refused(saved, CorruptFileError, r"contradicts itself[^\n]*$", make(fingerprint=b"some model"))


@pytest.mark.parametrize("kv_format", ["dense", "fp8", "int8", "int4"])
def test_no_damaged_or_forged_file_is_believed_and_none_changes_the_cache(kv_format, tmp_path):
    source, bad = random.Random(kv_format), tmp_path / "bad"
    fields = {"kv_format": kv_format, "head_dim": 32, "page_size": 16, "fingerprint": b"a model"}
    first, text = make(**fields), TEXT * 2
    first.save(start(first, text), tmp_path / "good")
    data = (tmp_path / "good").read_bytes()
    for size in (16, 16 if kv_format == "int4" else 8):
        cache = make(**{**fields, "page_size": size})
        for turn in range(100):
            bad.write_bytes((forged if turn % 2 else damaged)(data, source))
            before = cache.stats()
            try:
                seq = cache.load(bad)
            except (SavedFileError, SequenceTooLongError):
                assert cache.stats() == before
            else:
                assert turn % 2, "damage was believed"
                cache.free(seq)  # a forgery that makes sense, tensors that changed places say
                cache.clear_prefixes()
            cache.check()
        assert cache.length(cache.load(tmp_path / "good")) == len(text)
