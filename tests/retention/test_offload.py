"""Sequences that lost pages go to the host and to files, and come back with what they have left."""

import pytest
import torch

from pagedkv import PagedKVCache
from pagedkv.cache.pressure import offload_idle
from pagedkv.errors import WrongShapeError
from pagedkv.retention import Fifo
from tests.cases import one_group
from tests.contents import advance, start
from tests.retention.cases import CASES


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_text_that_lost_pages_is_loaded_with_those_it_has_left(case, tmp_path):
    cache, other = (PagedKVCache(case.config, device="cpu", debug=True) for _ in range(2))
    P, text, seq = case.config.page_size, [], cache.add()
    while not cache.stats().evicted:
        text += [len(text) % 3] * P
        advance(cache, {seq: text})
    cache.save(seq, tmp_path / "x")
    copy = other.load(tmp_path / "x")
    other.check()
    for _ in range(3):
        for layer in range(case.config.num_layers):
            assert other.positions(copy, layer).tolist() == cache.positions(seq, layer).tolist()
            for x, y in zip(cache.gather(seq, layer), other.gather(copy, layer), strict=True):
                assert torch.equal(x, y)
        text += [1] * (P + 1)
        advance(cache, {seq: text})
        advance(other, {copy: text})
        other.check()
    assert other.length(other.add(text)) == 0, "what lost pages is no prefix"
    assert other.stats().evicted > 0


def test_what_lost_pages_needs_a_cache_that_knows_of_it_and_pages_of_the_same_size(tmp_path):
    cache = PagedKVCache(one_group(retention="fifo", budget=8), device="cpu")
    cache.save(start(cache, list(range(20))), tmp_path / "x")
    plain = PagedKVCache(one_group(), device="cpu")
    with pytest.raises(WrongShapeError, match="has 2 of the 5 pages of its text"):
        plain.load(tmp_path / "x")
    other = PagedKVCache(one_group(retention="fifo", budget=8, page_size=2), device="cpu")
    with pytest.raises(WrongShapeError, match="some of the text was evicted"):
        other.load(tmp_path / "x")
    assert plain.stats().live == other.stats().live == 0


def test_what_attention_a_page_got_comes_back_with_it():
    config = one_group(retention="importance", budget=80, host_tokens=64, max_tokens=96)
    cache = PagedKVCache(config, device="cpu", debug=True)
    a, b = start(cache, list(range(18))), start(cache, list(range(18, 36)))

    def marks(seq):
        pages = cache._tables.tables[0, cache._tables.row_of(seq), :5]
        return cache._statistics.export(pages)

    for seq in (a, b):
        pages = cache._tables.tables[0, cache._tables.row_of(seq), :5]
        cache._statistics._mass[torch.from_numpy(pages)] = torch.rand(5)
        cache._statistics._attended[torch.from_numpy(pages)] = torch.randint(9, (5,))
    expected = [marks(seq) for seq in (a, b)]
    cache.offload([a, b])
    cache.clear_prefixes()
    start(cache, [7] * 30)
    cache.restore([b, a])
    for seq, before in zip((a, b), expected):
        assert all(map(torch.equal, marks(seq), before))


def test_who_waits_leaves_before_a_policy_takes_anything():
    config = one_group(retention=Fifo(), max_tokens=32, host_tokens=64, max_sequence_length=1000)
    cache = PagedKVCache(config, device="cpu", debug=True, on_pressure=offload_idle)
    a, b = start(cache, list(range(16))), start(cache, list(range(50, 62)))
    advance(cache, {b: list(range(50, 70))})
    assert cache.is_offloaded(a)
    assert cache.stats().evicted == 0
    advance(cache, {b: list(range(50, 95))})
    assert cache.stats().evicted > 0, "when nobody waits the policy does its work"
    cache.check()
