"""Files of sequences with recurrent states: the very bits, or refused by name."""

from dataclasses import replace

import pytest
import torch

from pagedkv import OutOfPagesError, PagedKVCache
from pagedkv.config import StateLayer
from pagedkv.errors import CorruptFileError, HostMemoryError, WrongShapeError
from pagedkv.saving import format as files
from pagedkv.storage.states import StateStorage
from tests.cases import one_group
from tests.contents import start
from tests.saving.saved import TEXT
from tests.states import assert_state, begin, grow, with_states


def make(max_states: int = 4, **fields) -> PagedKVCache:
    return PagedKVCache(with_states(one_group(**fields), max_states), device="cpu", debug=True)


@pytest.fixture
def saved(tmp_path):
    cache = make()
    cache.save(begin(cache, TEXT[:10]), tmp_path / "seq")
    return tmp_path / "seq"


def refused(path, error, match, cache=None):
    cache = cache or make()
    seq = begin(cache, [7, 7]) if cache._states else start(cache, [7, 7])
    before = cache.stats()
    with pytest.raises(error, match=match):
        cache.load(path)
    assert cache.stats() == before
    cache.check()
    assert cache.length(seq) == 2


@pytest.mark.parametrize("page_size", [4, 3])
def test_a_sequence_comes_back_with_its_state_and_goes_on(page_size, saved):
    cache = make(page_size=page_size)
    seq = cache.load(saved)
    assert_state(cache, seq, TEXT[:10])
    cache.checkpoint(seq)
    assert cache.length(cache.add(TEXT)) == 10
    grow(cache, {seq: TEXT})
    assert_state(cache, seq, TEXT)
    cache.check()


def test_every_bit_of_a_state_is_kept(tmp_path):
    cache, other = make(), make()
    seq = begin(cache, TEXT[:5])
    before = cache._states.take_out(0)
    before[0][0, 0], before[2][0] = float("nan"), float("inf")
    cache._states.put_in(0, before)
    cache.save(seq, tmp_path / "seq")
    other.load(tmp_path / "seq")
    for x, y in zip(other._states.take_out(0), before, strict=True):
        assert x.view(torch.uint8).tolist() == y.view(torch.uint8).tolist()


def test_an_open_step_is_not_saved(tmp_path):
    cache, other = make(), make()
    seq = begin(cache, TEXT[:5])
    step = cache.prepare([seq], [[1]])
    cache.save(seq, tmp_path / "seq")
    cache.abort(step)
    assert_state(other, other.load(tmp_path / "seq"), TEXT[:5])
    empty = cache.add(TEXT)
    cache.save(empty, tmp_path / "empty")
    assert other.uncached(other.load(tmp_path / "empty")).tolist() == TEXT


def test_a_file_of_other_states_is_refused_by_name(saved, tmp_path):
    plain = PagedKVCache(one_group(), device="cpu")
    refused(
        saved, WrongShapeError, r"expected states \[\], got \[\[\[\[3, 2\], 'bfloat16'\]", plain
    )
    other = (StateLayer((((3, 2), "float32"),)),)
    config = replace(make().config, states=other)
    with pytest.raises(
        WrongShapeError, match=r"expected states \[\[\[\[3, 2\], 'float32'\]\]\], got"
    ):
        PagedKVCache(config, device="cpu").load(saved)
    plain.save(start(plain, TEXT[:5]), tmp_path / "plain")
    refused(tmp_path / "plain", WrongShapeError, r"expected states .*, got \[\]")


@pytest.mark.parametrize(
    "change",
    {
        "gone": lambda tensors: tensors.pop("state.0.1"),
        "all gone": lambda tensors: [tensors.pop(n) for n in list(tensors) if n[:5] == "state"],
        "more": lambda tensors: tensors.update({"state.2.0": torch.zeros(5)}),
        "strange": lambda tensors: tensors.update({"state.x": torch.zeros(5)}),
        "shape": lambda tensors: tensors.update({"state.1.0": torch.zeros(6).half()}),
        "dtype": lambda tensors: tensors.update({"state.1.0": torch.zeros(5)}),
    }.items(),
    ids=lambda item: item[0],
)
def test_a_forged_state_is_refused_though_its_checksum_is_right(change, saved):
    header, tensors = files.read(saved)
    del header["sha256"], header["version"]
    change[1](tensors)
    files.write(saved, header, tensors)
    refused(saved, CorruptFileError, "contradicts itself")


def test_running_out_of_slots_or_memory_leaves_the_cache_as_it_was(saved, monkeypatch):
    cache = make(1)
    refused(saved, OutOfPagesError, "load needs 1 state slots, 0 of 1 can be had", cache)
    cache.free(cache._tables.seqs[cache._tables.live_rows()].tolist())

    def fail(*_):
        raise MemoryError("none")

    monkeypatch.setattr(StateStorage, "put_in", fail)
    refused(saved, HostMemoryError, "load", make())
    monkeypatch.undo()
    assert_state(cache, cache.load(saved), TEXT[:10])
