"""Sequences saved to files: what comes back, what is refused, and what a kill leaves behind."""

import json
import os
import random
from hashlib import sha256
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from pagedkv import PagedKVCache, write_kv
from pagedkv.cache.identity import Identity
from pagedkv.errors import (
    CorruptFileError,
    ForeignFileError,
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
from tests.support import (
    CASES,
    World,
    advance,
    assert_contents,
    one_group,
    random_op,
    start,
    two_groups,
    window_only,
)

DATA = Path(__file__).parent / "data"
TEXT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9]


def make(config=None, **fields) -> PagedKVCache:
    return PagedKVCache(config or one_group(**fields), device="cpu", debug=True)


def save_text(path: Path, config=None, n: int = 10, **fields) -> Path:
    cache = make(config, **fields)
    cache.save(start(cache, TEXT[:n]), path)
    return path


def contents(cache: PagedKVCache, seq: int) -> list[torch.Tensor]:
    return [x for layer in range(cache.config.num_layers) for x in cache.gather(seq, layer)]


@pytest.fixture
def saved(tmp_path) -> Path:
    return save_text(tmp_path / "a.safetensors", fingerprint=b"some model")


def refused(
    path: Path, error: type[Exception], match: str | None, cache: PagedKVCache | None = None
) -> None:
    """Loading raises, and the cache is as it was."""
    cache = cache or make(fingerprint=b"some model")
    seq = start(cache, [7, 7, 7, 7, 7])
    before = cache.stats()
    with pytest.raises(error, match=match):
        cache.load(path)
    assert cache.stats() == before
    cache.check()
    assert_contents(cache, seq, [7, 7, 7, 7, 7])


def test_a_mark_lasts_as_long_as_its_sequence_and_goes_to_its_forks(tmp_path):
    cache = make(fingerprint=b"old", max_sequences=2)
    seq = start(cache, TEXT)
    cache.mark(seq)
    cache.identity = Identity(b"new")
    cache.save(cache.fork(seq)[0], tmp_path / "fork")
    cache.free(seq)
    cache.save(start(cache, TEXT), tmp_path / "later")
    assert make(fingerprint=b"old").load(tmp_path / "fork") >= 0
    refused(tmp_path / "fork", WrongModelError, "6e6577", make(fingerprint=b"new"))
    assert make(fingerprint=b"new").load(tmp_path / "later") >= 0


# ------------------------------------------------------------------ there and back


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_random_work_left_behind_is_loaded_as_it_was(case, tmp_path):
    source, world = random.Random(case.name), World(case, everything=False)
    path, other = tmp_path / "x", PagedKVCache(case.config, device="cpu", debug=True)
    loaded = 0
    for index in range(120):
        world.apply(random_op(source, case.config))
        here = sorted(set(world.texts) - world.away)
        if index % 4 or not here:
            continue
        seq = here[index % len(here)]
        world.cache.save(seq, path)
        salt = world.texts[seq].salt
        copy = other.load(path, salt=salt)
        assert other.length(copy) == world.cache.length(seq)
        assert other.uncached(copy).tolist() == world.cache.uncached(seq).tolist()
        for layer in range(case.config.num_layers):
            for x, y in zip(other.gather(copy, layer), world.cache.gather(seq, layer), strict=True):
                assert torch.equal(x, y)
        text = world.texts[seq].tokens
        if len(text) < case.config.max_sequence_length:
            advance(other, {copy: [*text, *(world.texts[seq].pending or [1])[:1]]}, salt)
        other.check()
        other.free(copy)
        loaded += 1
    assert loaded > 10


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_what_is_saved_amid_a_step_is_what_was_committed_before_it(case, tmp_path):
    cache, other = (PagedKVCache(case.config, device="cpu", debug=True) for _ in "ab")
    seq = start(cache, TEXT[:5])
    before = contents(cache, seq)
    step = cache.prepare([seq], [TEXT[5:11]])  # pages that nothing is committed to
    cache.save(seq, tmp_path / "x")
    cache.abort(step)
    copy = other.load(tmp_path / "x")
    assert other.length(copy) == 5
    for x, y in zip(contents(other, copy), before, strict=True):
        assert torch.equal(x, y)
    other.check()


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 8, 16])
@pytest.mark.parametrize("n", [1, 4, 10, 12])
def test_a_text_is_loaded_into_pages_of_any_size(size, n, tmp_path):
    path = save_text(tmp_path / "x", n=n)
    cache = make(page_size=size)
    seq = cache.load(path)
    assert_contents(cache, seq, TEXT[:n])
    advance(cache, {seq: TEXT[: n + 3]})
    assert_contents(cache, seq, TEXT[: n + 3])
    cache.check()


@pytest.mark.parametrize("make_config", [window_only, two_groups])
@pytest.mark.parametrize("size", [1, 2, 3, 8])
def test_what_a_window_keeps_is_loaded_into_pages_of_another_size_or_refused(
    size, make_config, tmp_path
):
    outcomes = set()
    for n in range(5, 16):
        path = save_text(tmp_path / "x", make_config(page_size=4, rollback=2), n=n)
        cache = make(make_config(page_size=size))
        try:
            seq = cache.load(path)
        except WrongShapeError as error:
            assert "cannot become pages" in str(error)  # noqa: PT017
            assert cache.stats().live == 0
            outcomes.add("refused")
            continue
        outcomes.add("loaded")
        assert_contents(cache, seq, TEXT[:n])
        stored = cache.gather(seq, 1)[0].shape[0]
        assert min(n, 6) <= stored
        if n < 15:
            advance(cache, {seq: TEXT[: n + 1]})
            assert_contents(cache, seq, TEXT[: n + 1])
        cache.check()
    assert "loaded" in outcomes
    if 4 % size == 0:
        assert outcomes == {"loaded"}


def test_a_smaller_rollback_loads_less_of_a_window(tmp_path):
    path = save_text(tmp_path / "x", window_only(4, rollback=8), n=15)
    cache = make(window_only(4))
    seq = cache.load(path)
    assert cache.gather(seq, 0)[0].shape[0] == 15 - 8
    assert_contents(cache, seq, TEXT)


def test_an_empty_sequence_and_one_with_uncomputed_ids_are_loaded_too(tmp_path):
    cache = make()
    empty, begun = cache.add(), cache.add(TEXT)
    with cache.step([begun], num_new=6, layers=()):
        pass
    cache.save(empty, tmp_path / "empty")
    cache.save(begun, tmp_path / "begun")
    other = make(page_size=3)
    assert other.length(other.load(tmp_path / "empty")) == 0
    seq = other.load(tmp_path / "begun")
    assert (other.length(seq), other.uncached(seq).tolist()) == (6, TEXT[6:])


def test_a_prompt_that_can_never_be_finished_is_refused(tmp_path):
    cache, path = make(max_sequence_length=40), tmp_path / "x"
    seq = cache.add(TEXT * 2)
    with cache.step([seq], num_new=6, layers=()):
        pass
    cache.save(seq, path)
    refused(path, SequenceTooLongError, "has 30 tokens", make(max_sequence_length=29))
    other = make(max_sequence_length=30)
    assert other.uncached(other.load(path)).size == 24


def test_what_is_loaded_is_found_by_its_tokens_under_the_salt_given_then(tmp_path):
    path = save_text(tmp_path / "x", n=10)
    cache = make(page_size=3)
    cache.free(cache.load(path, salt=b"mine"))
    assert cache.stats().cached == 4
    assert cache.length(cache.add(TEXT)) == 0
    hit = cache.add(TEXT, salt=b"mine")
    assert cache.length(hit) == 10
    cache.check()


def test_loading_twice_serves_both_and_finds_one(saved):
    cache = make(fingerprint=b"some model")
    a, b = cache.load(saved), cache.load(saved)
    cache.check()
    cache.free(a)
    for seq in (b, cache.add(TEXT[:10])):
        text = TEXT[: cache.length(seq)]
        assert_contents(cache, seq, text)
    cache.check()


@pytest.mark.parametrize("how", ["count", "clear"])
def test_what_was_not_findable_is_not_findable_when_loaded(how, tmp_path):
    cache = make()
    if how == "count":
        seq = cache.add()
        with cache.step([seq], num_new=9, layers=()):
            pass
    else:
        seq = start(cache, TEXT[:9])
        cache.clear_prefixes()
    cache.save(seq, tmp_path / "x")
    assert "tokens" not in load_file(tmp_path / "x")
    other = make()
    other.load(tmp_path / "x")
    assert other.length(other.add(TEXT)) == 0


def test_a_file_holds_neither_the_salt_nor_what_others_wrote_behind_the_text(tmp_path):
    cache, path = make(), tmp_path / "x"
    a = start(cache, TEXT[:10], salt=b"a very secret salt")
    b = cache.fork(a)[0]
    cache.truncate(b, 9)
    cache.save(b, path)
    assert b"secret" not in path.read_bytes()
    assert b"secret".hex().encode() not in path.read_bytes()
    assert not load_file(path)["0.0.k"][:, 2, :, 1:].any()


def test_saving_twice_gives_the_same_bytes_and_leaves_nothing_beside_them(tmp_path):
    cache = make()
    seq = start(cache, TEXT)
    cache.save(seq, tmp_path / "a")
    first = (tmp_path / "a").read_bytes()
    cache.save(seq, str(tmp_path / "a"))
    assert (tmp_path / "a").read_bytes() == first
    assert os.listdir(tmp_path) == ["a"]
    assert (tmp_path / "a").stat().st_mode & 0o077 == 0


def test_committed_state_is_saved_while_a_step_is_open(tmp_path):
    cache = make()
    a = start(cache, TEXT[:6])
    b = cache.fork(a)[0]
    with cache.step([a, b], tokens=[[1], [2]], layers=()):
        cache.save(b, tmp_path / "x")
        seq = cache.load(tmp_path / "x")
        assert_contents(cache, seq, TEXT[:6])
    cache.check()


# ------------------------------------------------------------------ formats

FORMATS = ["fp8", "int8", "int4", ("dense", "int4"), ("int8", "fp8"), ("int4", "fp8")]
LONG = TEXT * 9


def coded(kv_format, **fields):
    groups = two_groups(40).groups
    shape = {"num_layers": 3, "groups": groups, "head_dim": 32, "max_tokens": 320}
    return one_group(**{**shape, "page_size": 16, "kv_format": kv_format, **fields})


def assert_alike(cache: PagedKVCache, seq: int, other: PagedKVCache, copy: int) -> None:
    for layer in range(3):
        for x, y in zip(cache.gather(seq, layer), other.gather(copy, layer), strict=True):
            assert torch.equal(x, y[len(y) - len(x) :])


@pytest.mark.parametrize("kv_format", FORMATS, ids=str)
@pytest.mark.parametrize("cut", [3, 16, 40, 100, 105])
def test_coded_pages_are_loaded_as_they_are(kv_format, cut, tmp_path):
    cache, other = make(coded(kv_format, rollback=96)), make(coded(kv_format, rollback=96))
    seq = start(cache, LONG[:105])
    cache.truncate(seq, cut)  # within a page that is coded as a whole, or at its end
    cache.save(seq, tmp_path / "x")
    copy = other.load(tmp_path / "x")
    other.check()
    assert_alike(cache, seq, other, copy)
    for each, text in ((cache, seq), (other, copy)):
        advance(each, {text: LONG[: cut + 20]})
        each.check()
    assert_alike(cache, seq, other, copy)
    assert other.length(other.add(LONG)) == cut + 20


@pytest.mark.parametrize("page_size", [48, 32])  # 32 is the head dim as well
@pytest.mark.parametrize("kv_format", FORMATS, ids=str)
def test_pages_coded_token_by_token_change_their_size_and_others_are_refused(
    kv_format, page_size, tmp_path
):
    cache, other = make(coded(kv_format)), make(coded(kv_format, page_size=page_size))
    seq = start(cache, LONG[:33])
    cache.save(seq, tmp_path / "x")
    if "int4" in kv_format:
        with pytest.raises(WrongShapeError, match=f"cannot become pages of {page_size}: int4"):
            other.load(tmp_path / "x")
    else:
        assert_alike(cache, seq, other, other.load(tmp_path / "x"))
    other.check()


def test_fp8_is_loaded_beside_pages_of_another_scale(tmp_path):
    cache, other = make(coded("fp8")), make(coded("fp8"))
    seq, large = start(cache, LONG), other.add([1])
    with other.step([large]) as step:
        for layer in range(3):
            k = torch.full((1, 2, 32), 900.0)
            write_kv(k, k, step, layer)
    cache.save(seq, tmp_path / "x")
    copy = other.load(tmp_path / "x")
    for layer in range(3):
        for x, y in zip(cache.gather(seq, layer), other.gather(copy, layer), strict=True):
            torch.testing.assert_close(x, y, rtol=0, atol=8 * 2.0**-10)  # the finest step of both


def test_fp8_beyond_the_range_of_scales_that_are_set_is_refused(tmp_path):
    cache, other = make(coded("fp8")), make(coded("fp8"))
    seq = cache.add()
    with cache.step([seq], num_new=3) as step:
        for layer in range(3):
            k = torch.full((3, 2, 32), 900.0)
            write_kv(k, k, step, layer)
    cache.save(seq, tmp_path / "x")
    before = start(other, TEXT), other.stats()
    with pytest.raises(WrongShapeError, match="fp8: expected K within the range of the scales"):
        other.load(tmp_path / "x")
    assert other.stats() == before[1]
    other.check()
    empty = make(coded("fp8"))
    assert_alike(cache, seq, empty, empty.load(tmp_path / "x"))


def write_all(cache: PagedKVCache, seq: int, value: float) -> None:
    with cache.step([seq], num_new=3) as step:
        for layer in range(cache.config.num_layers):
            k = torch.full((3, 2, 32), value)
            write_kv(k, k, step, layer)


def test_a_file_of_zeros_sets_no_scale_of_fp8_and_takes_that_of_another(tmp_path):
    cache, empty, large = (make(coded("fp8")) for _ in range(3))
    seq, other = cache.add(), large.add()
    write_all(cache, seq, 0.0)
    cache.save(seq, tmp_path / "x")
    write_all(large, other, 900.0)
    for into, value in ((empty, 1e-3), (large, 800.0)):
        copy = into.load(tmp_path / "x")
        write_all(into, copy, value)
        for x in contents(into, copy):
            assert not x[:-3].any()
            torch.testing.assert_close(x[-3:], torch.full_like(x[-3:], value), rtol=2**-4, atol=0)


@pytest.mark.parametrize("config", [one_group, two_groups])
def test_a_refused_file_sets_no_scale_of_fp8(config, tmp_path):
    sizes = {"head_dim": 32, "kv_format": "fp8"}
    cache, other = make(config(**sizes)), make(config(**sizes))
    seq, small = cache.add(), other.add()
    write_all(cache, seq, 900.0)
    cache.save(seq, tmp_path / "x")
    with other.step([small], num_new=1) as step:  # scales of the last layer's first V head alone
        for layer in range(other.config.num_layers):
            k, v = torch.zeros(2, 1, 2, 32)
            v[:, 0] = 1e-3 * (layer == 1)
            write_kv(k, v, step, layer)
    with pytest.raises(WrongShapeError, match="fp8: expected V within the range"):
        other.load(tmp_path / "x")
    seq = other.add()
    write_all(other, seq, 1e-3)
    for x in contents(other, seq):
        torch.testing.assert_close(x, torch.full_like(x, 1e-3), rtol=2**-4, atol=0)


def test_a_cache_that_holds_zeros_takes_the_scales_of_a_file(tmp_path):
    cache, other = make(coded("fp8")), make(coded("fp8"))
    seq = cache.add()
    write_all(cache, seq, 1e-3)
    cache.save(seq, tmp_path / "x")
    write_all(other, other.add(), 0.0)
    assert_alike(cache, seq, other, other.load(tmp_path / "x"))


def test_another_format_is_refused_by_name(tmp_path):
    cache = make(coded("int8"))
    cache.save(start(cache, TEXT), tmp_path / "x")
    with pytest.raises(WrongShapeError, match=r"expected kv_format ..fp8., .fp8.., got ..int8"):
        make(coded("fp8")).load(tmp_path / "x")


# ------------------------------------------------------------------ refused


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


def test_ten_thousand_random_flips_are_detected(saved):
    source, data = random.Random(6), saved.read_bytes()
    for _ in range(10_000):
        damaged = bytearray(data)
        for at in source.sample(range(len(data)), source.choice((1, 1, 2, 3, 30))):
            damaged[at] ^= 1 << source.randrange(8)
        with pytest.raises((CorruptFileError, ForeignFileError)):
            files.verify(bytes(damaged))


def test_damaged_files_are_refused_and_the_cache_is_untouched(saved):
    source, data = random.Random(7), saved.read_bytes()
    cache = make(fingerprint=b"some model")
    seq = start(cache, TEXT[:5])
    before = cache.stats()
    for index in range(300):
        damaged = bytearray(data)
        if index % 3:
            damaged[source.randrange(len(data))] ^= 1 << source.randrange(8)
        else:
            damaged = damaged[: source.randrange(len(data))]
        saved.write_bytes(damaged)
        with pytest.raises(SavedFileError):
            cache.load(saved)
        assert cache.stats() == before
    cache.check()
    assert_contents(cache, seq, TEXT[:5])
    saved.write_bytes(data)
    assert_contents(cache, cache.load(saved), TEXT[:10])


@pytest.mark.parametrize("cut", [0, 7, 8, 100, 400, -1])
def test_a_file_that_is_cut_short_is_refused(cut, saved):
    saved.write_bytes(saved.read_bytes()[:cut])
    refused(saved, SavedFileError, str(saved))


def test_files_of_others_are_refused_as_such(tmp_path):
    (tmp_path / "text").write_text("once upon a time")
    save_file({"weight": torch.zeros(3)}, tmp_path / "weights")
    save_file({"x": torch.zeros(3)}, tmp_path / "said", {"format": "pt"})
    with (tmp_path / "large").open("wb") as file:
        file.truncate(1 << 40)  # holes; who reads it whole runs out of memory
    for name in ("text", "weights", "said", "large"):
        refused(tmp_path / name, ForeignFileError, "expected a sequence")
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
from tests.support import assert_contents, one_group, start

cache = PagedKVCache(one_group(), device="cpu")
cache.save(start(cache, [1, 2, 3, 4, 5]), sys.argv[1])
assert_contents(cache, cache.load(sys.argv[1]), [1, 2, 3, 4, 5])
"""


def test_files_need_no_package_of_their_own(fresh_python, tmp_path):
    root = Path(__file__).resolve().parents[1]
    fresh_python("-c", WITHOUT_SAFETENSORS, str(tmp_path / "x"), path=root)


FULL_DISK = """
import errno, os, resource, sys
from pathlib import Path
from pagedkv import PagedKVCache
from tests.support import one_group, start

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


def test_a_full_disk_is_an_error_of_the_system_and_the_old_file_stays(fresh_python, tmp_path):
    root = Path(__file__).resolve().parents[1]
    said = fresh_python("-c", FULL_DISK, str(tmp_path / "x"), path=root)
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
    with pytest.raises(OSError, match="x: expected a file, or nothing"):
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


@pytest.mark.parametrize("shape", [[0, 2**40, 2**40], [2**62, 2**62, 0], [0] * 70])
def test_a_tensor_of_no_bytes_may_not_have_any_shape(shape, saved):
    data = saved.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    outer = json.loads(data[8:end])
    inner = json.loads(outer["__metadata__"][files.MARK])
    outer["0.0.k"] |= {"shape": shape, "data_offsets": [0, 0]}
    saved.write_bytes(signed(outer, inner, data[end:]))
    refused(saved, CorruptFileError, "contradicts itself", make(fingerprint=b"some model"))


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


# ------------------------------------------------------------------ kill -9

KILLED = """
import os, signal, sys
from pathlib import Path
from pagedkv import PagedKVCache, write_kv
from pagedkv.saving import format as files
from tests.support import one_group, start

path, cache = Path(sys.argv[1]), PagedKVCache(one_group(), device="cpu")
old, new = start(cache, [1, 2, 3]), start(cache, [4, 5, 6, 7, 8])
cache.save(new, path)
new_bytes = path.read_bytes()
cache.save(old, path)
old_bytes = path.read_bytes()
seen = []
while True:
    child = os.fork()
    if not child:
        left = len(seen)
        def trace(frame, event, arg):
            global left
            if frame.f_code.co_filename != files.__file__:
                return None
            if event == "line":
                left -= 1
                if left < 0:
                    os.kill(os.getpid(), signal.SIGKILL)
            return trace
        sys.settrace(trace)
        cache.save(new, path)
        sys.settrace(None)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    found = path.read_bytes()
    seen.append("old" if found == old_bytes else "new" if found == new_bytes else "neither")
    if status != -signal.SIGKILL:
        break
    path.write_bytes(old_bytes)
print(status, " ".join(seen))
"""


def test_a_kill_at_any_line_of_a_save_leaves_the_old_file_or_the_new_one(fresh_python, tmp_path):
    root = Path(__file__).resolve().parents[1]
    status, *seen = fresh_python("-c", KILLED, str(tmp_path / "x"), path=root).split()
    assert status == "0"
    assert len(seen) > 25
    assert seen == sorted(seen, reverse=True)  # old until the move, new from there on
    assert set(seen) == {"old", "new"}


# ------------------------------------------------------------------ the format lasts


def test_the_golden_file_goes_on_loading():
    """Written by version 1: a change that breaks this needs a version 2 that still reads it."""
    config = two_groups(6, dtype="bfloat16", fingerprint=b"golden")
    cache = make(config)
    seq = cache.load(DATA / "sequence-v1.safetensors", salt=b"now")
    assert_contents(cache, seq, TEXT[:13])
    assert cache.uncached(seq).tolist() == TEXT[13:]
    assert cache.gather(seq, 1)[0].shape[0] == 9
    other = make(two_groups(6, dtype="bfloat16", fingerprint=b"golden", page_size=2))
    assert_contents(other, other.load(DATA / "sequence-v1.safetensors"), TEXT[:13])
    hit = other.add(TEXT)
    assert_contents(other, hit, TEXT[: other.length(hit)])
    assert other.length(hit) == 13
    assert files.verify((DATA / "sequence-v1.safetensors").read_bytes())["version"] == 1
