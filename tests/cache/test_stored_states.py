"""Prefixes that last, of models with recurrent states: pages and states as they were computed.

What is loaded is held bit for bit against what was computed; states of `tests/states.py` say which
text and which length they are of, so a state of another length shows.
"""

import random
import warnings

import pytest
import torch

from pagedkv import CacheConfig, PagedKVCache, PrefixStore
from pagedkv.cache.identity import Identity
from pagedkv.trace import replay
from tests.cache.stored import PIECE, TEXT, files, make
from tests.cases import in_few_bits, one_group, two_groups
from tests.states import assert_state, begin, grow, with_states, write_all

NAMED = {"fingerprint": b"a model", "max_tokens": 128}


def config(slots: int = 8, **fields) -> CacheConfig:
    return with_states(one_group(**{**NAMED, **fields}), slots)


def keep(cache: PagedKVCache, text: list[int], *lengths: int, salt=b"") -> int:
    """Computes a text, keeps its states at some lengths, and checks all of it."""
    seq = cache.add(text, salt=salt)
    for length in sorted({*lengths, len(text)}):
        if length > cache.length(seq):
            grow(cache, {seq: text[:length]}, salt)
        if length in lengths:
            cache.checkpoint(seq)
    assert_state(cache, seq, text, salt)
    cache.check()
    return seq


def found(folder, text: list[int], salt=b"", given: CacheConfig | None = None) -> int:
    """Tokens of a text that another cache finds, all of them as computed."""
    cache = make(folder, given or config())
    seq = cache.add(text, salt=salt)
    length = cache.length(seq)
    assert_state(cache, seq, text[:length], salt)
    grow(cache, {seq: text}, salt)
    assert_state(cache, seq, text, salt)
    cache.check()
    assert cache.stats().tokens_from_store in (0, length)
    return length


LENGTHS = 1, 5, PIECE - 1, PIECE, PIECE + 1, 2 * PIECE + 3, len(TEXT) - 1


@pytest.mark.parametrize("length", LENGTHS)
def test_a_text_is_found_up_to_the_longest_state_of_it(folder, length):
    keep(make(folder, config()), TEXT, length, 3)
    assert found(folder, TEXT) == max(length, 3)
    assert found(folder, [*TEXT[:length], 77, 78]) == max(length, 3) if length > 2 else 1
    assert found(folder, [*TEXT[: length - 1], 77, 78]) == (3 if length > 3 else 0)
    assert found(folder, TEXT[:length]) == (3 if length > 3 else 1 if length == 3 else 0)


def test_a_text_without_a_state_is_computed_and_its_pages_are_there(folder):
    """Pages without a state are no prefix; whoever computes the text learns where to keep one."""
    keep(make(folder, config()), TEXT)
    assert len(files(folder)) == len(TEXT) // PIECE
    cache = make(folder, config())
    seq = cache.add(TEXT)
    assert cache.length(seq) == 0
    assert cache.stored_prefix(TEXT) == (3 * PIECE, 0)


@pytest.mark.parametrize(
    "given",
    [
        config(page_size=1),
        config(page_size=3),
        config(page_size=16),  # larger than a piece
        with_states(two_groups(6, page_size=4, rollback=PIECE, **NAMED), 6),
        config(growth_step=8, head_dim=8),
        config(host_tokens=64),
    ],
    ids=lambda given: f"{given.page_size} {given.kv_format} {given.max_states}",
)
def test_every_kind_of_pages_keeps_its_states(folder, given):
    keep(make(folder, given), TEXT, 5, 19)
    assert found(folder, TEXT, given=given) == 19


@pytest.mark.parametrize("kv_format", ["int4", "int8", "fp8", ("dense", "int4")], ids=str)
def test_coded_pages_and_states_are_those_that_were_computed(folder, kv_format):
    given, text = with_states(in_few_bits(kv_format, **NAMED), 4), TEXT * 2
    first, other = make(folder, given), make(folder, given)
    seq = first.add(text)
    grow(first, {seq: text[:43]})
    first.checkpoint(seq)
    copy = other.add(text)
    assert other.length(copy) == 43
    other.check()
    for layer in range(given.num_layers):
        for ours, theirs in zip(other.gather(copy, layer), first.gather(seq, layer), strict=True):
            assert torch.equal(ours, theirs)
    for layer in range(2):
        for ours, theirs in zip(other.read_state(copy, layer), first.read_state(seq, layer)):
            assert torch.equal(ours, theirs)


def test_states_are_found_under_their_own_salts_alone(folder):
    regions = ((0, b"all"), (12, b"user 7"))
    cache = make(folder, config())
    keep(cache, TEXT, 19, salt=b"tenant")
    assert [found(folder, TEXT, salt) for salt in (b"tenant", b"", b"other")] == [19, 0, 0]
    seq = cache.add(TEXT, salt=regions)
    for length in (14, 19):  # within the piece in which the second region begins, and behind it
        with cache.step([seq], num_new=length - cache.length(seq)) as step:
            write_all(cache, step, [TEXT[:length]], [b""])
        cache.checkpoint(seq)
        for salt, reach in ((regions, length), (((0, b"all"), (12, b"user 8")), 0), (b"all", 0)):
            other = make(folder, config())
            assert other.length(other.add(TEXT, salt=salt)) == reach


def test_a_file_tells_neither_ids_nor_salt(folder):
    text = [271828 + i for i in range(PIECE + 3)]
    keep(make(folder, config()), text, PIECE + 2, salt=b"a customer")
    for file in files(folder):
        data = file.read_bytes()
        assert b"a customer" not in data
        assert not any(token.to_bytes(4, "little") in data for token in text)


def test_a_file_is_the_same_whenever_it_is_written(folder, tmp_path):
    """Later tokens of a page, or those of another text, are not in it."""
    written = []
    for store in (PrefixStore(folder), PrefixStore(tmp_path / "later")):
        if written:
            store._first = 0
        cache = make(store, config())
        seq = keep(cache, TEXT[:21], 9)
        if written:
            assert not files(store.folder)
            cache.store(seq)
        written.append({file.name: file.read_bytes() for file in files(store.folder)})
    assert written[0].items() <= written[1].items()
    assert len(written[0]) == 3


def test_what_the_cache_has_is_not_read_again(folder, monkeypatch):
    keep(make(folder, config()), TEXT, 19)
    cache = make(folder, config())
    assert cache.length(cache.add(TEXT)) == 19
    monkeypatch.delattr(PrefixStore, "read")
    assert cache.length(cache.add(TEXT)) == 19


def test_a_state_that_lost_its_slot_comes_back_from_its_file(folder):
    cache = make(folder, config(2))
    seq = keep(cache, TEXT, 19)
    cache.free(seq)
    others = [begin(cache, [7, 8, i]) for i in range(2)]
    cache.free(others)
    assert cache.stored_prefix(TEXT)[1] == 0
    seq = cache.add(TEXT)
    assert cache.length(seq) == 19
    assert_state(cache, seq, TEXT[:19])


def test_without_a_slot_a_text_is_computed(folder):
    keep(make(folder, config()), TEXT, 19)
    cache = make(folder, config(2))
    begin(cache, [7])
    begin(cache, [8])
    assert cache.length(cache.add(TEXT)) == 0
    cache.check()


def test_what_a_second_text_finds_is_written_when_the_folder_is_full_of_others(folder):
    store = PrefixStore(folder)
    store._first = 0
    cache = make(store, config())
    keep(cache, TEXT, 19)
    assert not files(folder)
    cache.add([*TEXT[:19], 77])
    assert found(folder, TEXT) == 19


def test_store_writes_the_states_of_a_text_and_the_one_it_has(folder):
    store = PrefixStore(folder)
    store._first = 0
    cache = make(store, config())
    seq = keep(cache, TEXT[:10], 9)
    grow(cache, {seq: TEXT[:21]})
    assert cache.store(seq) == 21
    assert [found(folder, TEXT[:n]) for n in (10, 21, 22)] == [9, 9, 21]
    assert cache.checkpoints(seq) == [9, 21]


def test_states_of_answers_are_written_when_they_are_asked_for_alone(folder):
    cache = make(folder, config())
    seq = keep(cache, TEXT[:10], 10)
    grow(cache, {seq: TEXT[:21]})
    cache.checkpoint(seq)
    assert found(folder, TEXT) == 10
    cache.store(seq)
    assert found(folder, TEXT) == 21


@pytest.mark.parametrize("forget", [False, True])
def test_states_of_other_weights_and_of_cleared_prefixes_are_not_found(folder, forget):
    cache = make(folder, config())
    seq = cache.add(TEXT)
    grow(cache, {seq: TEXT[:19]})
    if forget:
        cache.clear_prefixes()
    cache.checkpoint(seq)
    assert found(folder, TEXT) == (0 if forget else 19)
    assert found(folder, TEXT, given=config(fingerprint=b"another")) == 0


class Changing(Identity):
    """Weights that change, and are looked at again when `forget_stale` asks."""

    changed = False

    def forget_stale(self, forget):
        if self.changed:
            self.changed = False
            forget()


def test_a_state_of_weights_that_have_changed_since_is_not_brought_back(folder):
    keep(make(folder, config()), TEXT, 19)
    cache = make(folder, config())
    cache.identity = Changing(b"a model")
    keep(cache, [*TEXT[:17], 7])  # of its pages none has to be loaded below
    cache.identity.changed = True
    assert cache.length(cache.add(TEXT[:20])) == 0


@pytest.mark.sampled
def test_a_damaged_state_is_passed_over_computed_again_and_replaced(folder):
    keep(make(folder, config()), TEXT[: PIECE + 4], PIECE + 3)
    of_pages, of_state = sorted(files(folder), key=lambda file: b'"state.0.0' in file.read_bytes())
    good, source = of_state.read_bytes(), random.Random(1)
    for data in [good[:-1], b"", of_pages.read_bytes(), *[good] * 9]:
        data = bytearray(data)
        if data == good:
            data[source.randrange(len(data))] ^= 1 << source.randrange(8)
        of_state.write_bytes(data)
        cache = make(folder, config())
        with pytest.warns(UserWarning, match=f"{of_state.name} is passed over"):
            assert cache.length(cache.add(TEXT)) == 0
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # it is told once
            keep(cache, TEXT[: PIECE + 4], PIECE + 3)
        assert of_state.read_bytes() == good
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert found(folder, TEXT) == PIECE + 3


def test_explain_counts_what_files_have_and_a_trace_tells_what_they_brought(folder, tmp_path):
    keep(make(folder, config()), TEXT, 3, 19)
    path = tmp_path / "a.trace"
    cache = PagedKVCache(config(), device="cpu", prefix_store=folder, trace=path)
    told = cache.explain(TEXT)
    assert (told.found, told.from_store) == (19, 19)
    (folder / "away").mkdir()
    pieces = [file for file in files(folder) if b'"state.0.0' not in file.read_bytes()]
    for piece in pieces:
        piece.rename(folder / "away" / piece.name)
    assert PagedKVCache(config(), device="cpu", prefix_store=folder).explain(TEXT).found == 3
    for piece in pieces:
        (folder / "away" / piece.name).rename(piece)
    seq = cache.add(TEXT)
    assert cache.length(seq) == 19
    assert cache.explain(TEXT).from_store == 0
    grow(cache, {seq: TEXT})
    del cache
    assert replay(path).lengths == {seq: len(TEXT)}
