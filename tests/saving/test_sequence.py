"""Sequences saved to files come back as they were, into pages of any size."""

import os

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from pagedkv import LayerGroup, PagedKVCache
from pagedkv.cache.identity import Identity
from pagedkv.errors import SequenceTooLongError, WrongModelError, WrongShapeError
from tests.cases import CASES, two_groups, window_only
from tests.contents import advance, assert_contents, start
from tests.saving.saved import TEXT, contents, make, refused, save_text


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


def test_numbers_of_a_shape_may_be_numpys(tmp_path):
    plain = make()
    seq = start(plain, TEXT)
    numbers = {"num_kv_heads": np.int64(2), "head_dim": np.int64(4), "page_size": np.int32(4)}
    cache = make(**numbers, groups=(LayerGroup(tuple(np.arange(2)), None, np.int64(2)),))
    cache.save(start(cache, TEXT), tmp_path / "x")
    loaded = plain.load(tmp_path / "x")
    for x, y in zip(contents(plain, loaded), contents(plain, seq), strict=True):
        assert torch.equal(x, y)


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
