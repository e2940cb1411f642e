"""Prefixes that last: found by another cache as computed, and by none of another kind."""

import pytest
import torch

from pagedkv import CacheConfig, LayerGroup, PagedKVCache, PrefixStore
from pagedkv.errors import SequenceTooLongError, TooManySequencesError
from pagedkv.trace import replay
from tests.cache.stored import PIECE, TEXT, compute, files, make
from tests.cases import in_few_bits, one_group, two_groups
from tests.contents import advance, assert_contents, start

NAMED = {"fingerprint": b"a model"}
WHOLE = len(TEXT) // PIECE * PIECE  # tokens of whole pieces


def test_another_cache_finds_what_the_first_computed(folder):
    assert compute(make(folder), TEXT) == 0
    assert len(files(folder)) == len(TEXT) // PIECE
    other = make(folder)
    assert compute(other, TEXT) == WHOLE == other.stats().tokens_from_store
    assert other.stats().tokens_computed == len(TEXT) - WHOLE
    assert compute(other, TEXT) == len(TEXT) - 1
    assert other.stats().tokens_from_store == WHOLE  # the rest came from its own pages


def test_a_text_that_parts_finds_the_pieces_it_shares(folder):
    compute(make(folder), TEXT)
    assert compute(make(folder), [*TEXT[:19], 77, 78, 79, 80, 81, 82]) == 2 * PIECE
    assert compute(make(folder), TEXT[:17]) == 2 * PIECE
    assert compute(make(folder), TEXT[:16]) == 15  # the last token is always computed
    assert compute(make(folder), TEXT[:7]) == 0


def test_scales_that_are_too_small_for_a_piece_have_it_computed_again(folder):
    config = in_few_bits("fp8", max_tokens=128, **NAMED)
    compute_large = make(folder, config)
    seq = compute_large.add(TEXT)
    with compute_large.step([seq]) as step:
        from pagedkv import write_kv

        for layer in range(config.num_layers):
            k = torch.full((len(TEXT), 2, 32), 1e4)
            write_kv(k, k, step, layer)
    other = make(folder, config)
    start(other, [7, 7, 7])
    with pytest.warns(UserWarning, match=r"prefix_store: .* is passed over"):
        assert other.length(other.add(TEXT)) == 0
    other.check()


def test_pages_that_a_window_dropped_are_found_as_long_as_they_are_cached(folder):
    config = two_groups(window=6, **NAMED)
    compute(make(folder, config), TEXT[:26])  # behind 24 tokens the window needs those from 18 on
    assert compute(make(folder, config), TEXT[:26]) == 24


def test_without_the_pages_of_a_window_a_text_is_computed(folder):
    config = two_groups(window=6, **NAMED)
    store = PrefixStore(folder)
    store._first = 0
    cache = make(store, config)
    seq = start(cache, TEXT[:26])
    for page in cache._tables.pool.group_of.nonzero()[0].tolist()[:-1]:
        if cache._tables.index.findable[page] and not cache._tables.pool.refcount[page]:
            cache._tables.index.forget(1, [page])
    assert cache.store(seq) == 24
    other = make(folder, config)
    assert [compute(other, TEXT[:26]) for _ in range(2)] == [0, 25]


@pytest.mark.parametrize(
    "others",
    [
        {"fingerprint": b"another model"},
        {"page_size": 8},
        {"dtype": "bfloat16"},
        {"num_kv_heads": 1},
        {"head_dim": 8},
        {"num_layers": 1},
        {"kv_format": "int8", "head_dim": 32},
        {"groups": (LayerGroup((0, 1), 40),)},
        {"read_tokens": 16},
    ],
    ids=str,
)
def test_a_cache_of_another_kind_finds_nothing(folder, others):
    compute(make(folder), TEXT)
    other = make(folder, **others)
    assert other.length(other.add(TEXT)) == 0


def test_a_prefix_is_found_under_its_own_salt_alone(folder):
    compute(make(folder), TEXT, salt=b"other tenant")
    assert compute(make(folder), TEXT) == 0
    assert compute(make(folder), TEXT, salt=b"other tenant") == WHOLE
    assert compute(make(folder), TEXT, salt=b"third") == 0


def test_a_full_pool_takes_what_fits(folder):
    compute(make(folder), TEXT)
    small = make(folder, max_tokens=64)
    start(small, [7] * 45)
    seq = small.add(TEXT)
    assert small.length(seq) == 16
    small.check()
    assert_contents(small, seq, TEXT[:16])


def test_a_text_that_can_never_fit_or_has_no_row_is_refused_as_without_a_store(folder):
    compute(make(folder), TEXT)
    with pytest.raises(SequenceTooLongError):
        make(folder, max_tokens=28).add(TEXT)
    one = make(folder, max_sequences=1)
    one.add(TEXT[:3])
    with pytest.raises(TooManySequencesError):
        one.add(TEXT)
    one.check()


def test_promises_to_others_are_kept(folder):
    compute(make(folder), TEXT)
    cache = make(folder, max_tokens=40, max_sequence_length=64)
    promised = cache.add([7, 7], max_tokens=28)
    seq = cache.add(TEXT)
    cache.check()
    assert cache.length(seq) < WHOLE
    advance(cache, {promised: [7] * 28})
    cache.check()


def test_the_beginning_that_prompts_share_is_written_and_their_ends_are_not(folder):
    """Once prompts have had their part of the folder, what is found twice is written alone."""
    store = PrefixStore(folder, max_bytes=40_000)
    store._first = 0
    cache = make(store, max_tokens=1024, max_sequences=64)
    for i in range(20):
        compute(cache, [*TEXT[:16], *range(100 * i, 100 * i + 16)])
    assert len(files(folder)) == 2
    assert compute(make(folder), TEXT) == 16


def test_store_writes_what_was_asked_for(folder):
    store = PrefixStore(folder)
    store._first = 0
    cache = make(store)
    seq = start(cache, TEXT[:10])
    advance(cache, {seq: TEXT})  # an answer, say
    assert not files(folder)
    assert cache.store(seq) == WHOLE
    assert compute(make(folder), TEXT) == WHOLE
    with pytest.raises(ValueError, match="salt: expected the one"):
        cache.store(seq, salt=b"x")
    without = make(None)
    seq = start(without, TEXT)
    with pytest.raises(ValueError, match="no prefix store"):
        without.store(seq)


def test_tokens_that_some_layers_did_not_write_are_not_stored(folder):
    cache = make(folder)
    seq = cache.add(TEXT)
    step = cache.prepare([seq])
    step.wrote[:] = [0]
    cache.commit(step, layers=[0])
    assert not files(folder)


def test_prefixes_that_were_cleared_are_not_written_later(folder):
    cache = make(folder)
    seq = cache.add(TEXT)
    cache.clear_prefixes()
    advance(cache, {seq: TEXT})
    assert not files(folder)


def test_prefixes_that_were_cleared_do_not_come_back_from_the_store(folder):
    cache = make(folder)
    compute(cache, TEXT)
    cache.clear_prefixes()  # perhaps because of a change that no digest shows
    assert compute(cache, TEXT) == 0
    assert compute(make(folder), TEXT) == WHOLE


def test_a_prompt_that_is_freed_or_cut_before_it_was_computed_is_not_written(folder):
    cache = make(folder)
    freed, cut = cache.add(TEXT), cache.add(TEXT[::-1])
    cache.free(freed)
    cache.truncate(cut, 0)
    advance(cache, {cache.add([1, 2, 3]): [1, 2, 3]})
    assert not files(folder)


def test_a_step_that_only_decodes_asks_nothing_of_a_store(folder, monkeypatch):
    cache = make(folder)
    seq = cache.add(TEXT[:20])
    advance(cache, {seq: TEXT[:20]})
    written = len(files(folder))
    for name in ("has", "use", "read", "write", "may_write", "may_write_first"):
        monkeypatch.delattr(PrefixStore, name)
    for end in range(21, len(TEXT) + 1):
        advance(cache, {seq: TEXT[:end]})
    assert len(files(folder)) == written == 2


def test_within_an_open_step_nothing_is_looked_up(folder):
    compute(make(folder), TEXT)
    cache = make(folder)
    step = cache.prepare([cache.add([1, 2])], num_new=2)
    assert cache.length(cache.add(TEXT)) == 0
    cache.abort(step)
    assert cache.length(cache.add(TEXT)) == WHOLE


def test_a_trace_tells_what_a_store_brought(folder, tmp_path):
    config = two_groups(rollback=PIECE, **NAMED)
    compute(make(folder, config), TEXT)
    path = tmp_path / "a.trace"
    cache = PagedKVCache(config, device="cpu", prefix_store=folder, trace=path)
    seq = cache.add(TEXT)
    assert cache.length(seq) == WHOLE
    advance(cache, {seq: TEXT})
    del cache
    assert replay(path).lengths == {seq: len(TEXT)}


@pytest.mark.parametrize(
    ("fields", "name"),
    [({"fingerprint": b""}, "no fingerprint"), ({"retention": "lru"}, "retention")],
)
def test_caches_whose_prefixes_cannot_last_are_refused(folder, fields, name):
    with pytest.raises(ValueError, match=f"prefix_store: not for a cache with {name}"):
        make(folder, CacheConfig(**{**vars_of(one_group()), **NAMED, **fields}))


def vars_of(config: CacheConfig) -> dict:
    names = ("num_layers", "num_kv_heads", "head_dim", "dtype", "max_tokens", "page_size")
    return {name: getattr(config, name) for name in names}
