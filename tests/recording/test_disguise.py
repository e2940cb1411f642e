"""Token ids in a trace: equal texts stay equal, and nobody reads them."""

import numpy as np

from pagedkv import PagedKVCache
from pagedkv.recording.disguise import Disguise
from pagedkv.trace.read import ids_of, read
from tests.cases import one_group


def hide(disguise, tokens, first=0):
    tokens = np.asarray(tokens, dtype=np.int32)
    return ids_of(disguise.ids(tokens, first + np.arange(tokens.size)))


def test_equal_beginnings_stay_equal_and_other_ids_differ():
    disguise = Disguise()
    a, b = hide(disguise, [5, 6, 7, 8]), hide(disguise, [5, 6, 9, 8])
    assert (a == b).tolist() == [True, True, False, True]
    every = hide(disguise, np.arange(100_000) % 100_000, first=0)
    assert (every >= 0).all()


def test_an_id_looks_different_at_every_position_and_in_every_trace():
    disguise = Disguise()
    same = hide(disguise, [7] * 1000)
    assert np.unique(same).size == 1000
    assert not (same == hide(Disguise(), [7] * 1000)).any()


def test_ids_and_positions_beyond_sixteen_bits_are_told_apart():
    disguise, tokens = Disguise(), np.array([1, 1 + (1 << 16), 1 + (1 << 30)], np.int32)
    at = [ids_of(disguise.ids(tokens, np.full(3, where))) for where in (3, 3 + (1 << 16))]
    assert np.unique(np.concatenate(at)).size == 6


def test_an_unknown_id_stays_unknown():
    assert hide(Disguise(), [3, -1, 3])[1] == -1


def test_a_trace_has_neither_ids_nor_salts(tmp_path):
    cache = PagedKVCache(one_group(), device="cpu", trace=tmp_path / "a.trace")
    cache.add([31337, 31338], salt=b"a customer's name")
    text = (tmp_path / "a.trace").read_text()
    assert "31337" not in text
    assert "customer" not in text
    assert not set(ids_of(read(tmp_path / "a.trace").events[0]["prompt"])) & {31337, 31338}
