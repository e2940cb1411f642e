"""Where memory runs short sequences lose pages by their policy, before anybody is refused."""

import numpy as np
import pytest

from pagedkv import LayerGroup, OutOfPagesError, PagedKVCache
from pagedkv.errors import PolicyError
from pagedkv.pages.evict import _level
from pagedkv.retention import Fifo, Policy, Sinks
from tests.cases import in_few_bits, one_group
from tests.contents import advance, assert_contents, start, write_step


def cache_of(retention="fifo", pages=20, **fields):
    fields = {"max_tokens": 4 * pages, "max_sequence_length": 10_000, **fields}
    return PagedKVCache(one_group(retention=retention, **fields), device="cpu", debug=True)


def text(n, first=0):
    return [(first + i) % 11 for i in range(n)]


def grow(cache, seq, tokens):
    while (n := cache.length(seq)) < len(tokens):
        advance(cache, {seq: tokens[: n + 1]})
        cache.check()


def stored(cache, seq):
    return len(cache.positions(seq, 0))


def test_nothing_is_evicted_below_the_high_watermark():
    cache = cache_of()
    seq = start(cache, text(4 * 19))  # 95 %
    assert stored(cache, seq) == 76
    assert cache.stats().evicted == 0


def test_a_step_that_would_pass_it_evicts_down_to_the_low_one():
    cache = cache_of()
    seq = start(cache, text(4 * 19))
    advance(cache, {seq: text(4 * 19 + 1)})
    assert cache.stats().evicted == 2
    assert cache.stats().live == 18  # 90 %, the new page included
    assert cache.positions(seq, 0).tolist() == list(range(8, 77))


def test_a_text_without_end_fits_a_pool():
    cache = cache_of(Sinks(Fifo()))
    seq = cache.add()
    grow(cache, seq, text(400))
    assert cache.stats().live <= 19
    assert cache.positions(seq, 0).tolist()[:5] != [0, 1, 2, 3, 4]
    assert cache.positions(seq, 0).tolist()[:4] == [0, 1, 2, 3]


def test_cached_prefixes_go_before_pages_of_sequences():
    cache = cache_of()
    done = start(cache, text(40, first=5))
    seq = start(cache, text(30))
    cache.free(done)
    assert cache.stats().cached == 10
    grow(cache, seq, text(4 * 19))
    assert cache.stats().evicted == 0
    assert_contents(cache, seq, text(4 * 19))


def test_those_who_hold_most_give_first():
    cache = cache_of()
    long, short = start(cache, text(52)), start(cache, text(20, first=3))
    advance(cache, {short: text(20, first=3) + [7] * 9})
    assert stored(cache, short) == 29
    assert stored(cache, long) == 40  # 3 of its pages: 13 + 5 + 3 are to be 18
    assert cache.stats().live == 18


def test_what_may_go_stays_where_a_pool_cannot_grow_by_what_is_still_missing(monkeypatch):
    cache = cache_of("fifo", pages=40, growth_step=80)  # half of the pool is there
    long = start(cache, text(60))
    short = start(cache, text(4, first=5))

    def refuse(*args):
        raise MemoryError("no memory")

    monkeypatch.setattr(cache._tables.growth, "_resize", refuse)
    kept = cache.positions(long, 0).tolist()
    forks = cache.fork(long)
    mine = start(cache, text(12, first=3))
    with pytest.raises(OutOfPagesError):
        cache.prepare([short], [[1] * 80])
    for seq in (long, *forks):
        assert cache.positions(seq, 0).tolist() == kept
    assert stored(cache, mine) == 12
    assert cache.stats().evicted == 0
    cache.check()


def test_sequences_outside_the_step_give_as_well():
    cache = cache_of()
    idle = [start(cache, text(24, first=i)) for i in range(3)]
    seq = start(cache, text(4, first=7))
    grow(cache, seq, text(30, first=7))
    assert sum(stored(cache, other) for other in idle) < 3 * 24
    assert cache.stats().live <= 19


def test_pages_that_are_reserved_stay_where_they_are():
    cache = cache_of()
    safe = cache.add(text(40), max_tokens=40)
    advance(cache, {safe: text(40)})
    seq = cache.add()
    grow(cache, seq, text(100, first=4))
    assert_contents(cache, safe, text(40))
    assert stored(cache, seq) <= 36


def test_of_reserved_sequences_with_staging_pages_the_coded_ones_are_counted():
    sizes = {"max_tokens": 16 * 10, "max_sequence_length": 10_000, "max_sequences": 2}
    config = in_few_bits("int4", retention="fifo", **sizes)
    cache = PagedKVCache(config, device="cpu", debug=True)
    assert config.num_pages() == 9
    promised = start(cache, text(16), max_tokens=16 * 5)  # four coded pages, and the first one
    advance(cache, {promised: text(16 * 6)})
    start(cache, text(16 * 6, first=3))  # five more coded pages, of nine
    cache.check()
    assert cache.stats().evicted == 1
    assert stored(cache, promised) == 16 * 5


def test_what_a_sequence_has_beyond_its_reservation_may_go():
    cache = cache_of()
    seq = cache.add(text(8), max_tokens=16)
    grow(cache, seq, text(100))
    assert cache.stats().evicted > 0
    assert stored(cache, seq) >= 16


def test_prepare_raises_only_where_evicting_would_not_do_and_then_evicts_nothing():
    cache = cache_of(pages=8)
    first, second = start(cache, text(13)), start(cache, text(13, first=5))
    before = cache.stats()
    with pytest.raises(OutOfPagesError, match="Free or truncate"):
        cache.prepare([first, second], num_new=16)
    assert cache.stats() == before
    assert_contents(cache, first, text(13))
    step = cache.prepare([first], num_new=22)  # five pages: all six whole ones have to go
    cache.abort(step)
    assert cache.stats().evicted == 6
    cache.check()


def test_following_the_advice_works():
    cache = cache_of(pages=8)
    seq = start(cache, text(12))
    twin = cache.fork(seq)[0]
    with pytest.raises(OutOfPagesError) as error:
        cache.prepare([seq], num_new=24)
    assert error.value.pages_needed == 6
    cache.free(twin)
    cache.abort(cache.prepare([seq], num_new=24))


def test_pages_of_several_owners_stay():
    cache = cache_of(pages=12)
    seq = start(cache, text(24))
    twin = cache.fork(seq)[0]
    grow(cache, twin, text(24) + [9] * 60)
    assert_contents(cache, seq, text(24))
    assert cache.positions(twin, 0).tolist()[:24] == list(range(24))


def test_only_the_groups_that_run_short_lose_pages():
    groups = (LayerGroup((0,)), LayerGroup((1,), 8))
    cache = cache_of(groups=groups, rollback=4)
    seq = cache.add()
    grow(cache, seq, text(150))
    assert len(cache.positions(seq, 0)) > 50
    assert cache.positions(seq, 1).tolist() == list(range(136, 150))


def test_a_window_loses_nothing_though_its_pool_is_full():
    cache = cache_of(groups=(LayerGroup((0,)), LayerGroup((1,), 36)))
    seqs = [start(cache, text(38)), start(cache, text(38, 5))]
    cache.check()
    assert [len(cache.positions(seq, 1)) for seq in seqs] == [38, 38]
    assert cache.stats().evicted > 0


def test_a_policy_that_answers_wrongly_in_prepare_changes_nothing():
    class Wrong(Policy):
        recent = 0

        def keep_scores(self, pages):
            return np.full(len(pages.position), np.nan)

    cache = cache_of(Wrong())
    seq = start(cache, text(76))
    before = cache.stats()
    with pytest.raises(PolicyError, match="NaN"):
        cache.prepare([seq], num_new=1)
    assert cache.open_step is None
    assert cache.stats() == before
    assert_contents(cache, seq, text(76))
    cache.check()


def test_what_was_evicted_for_a_step_stays_so_when_it_is_aborted():
    cache = cache_of()
    seq = start(cache, text(76))
    step = cache.prepare([seq], tokens=[[1]])
    write_step(cache, step, [[*text(76), 1]])
    cache.abort(step)
    cache.check()
    assert cache.length(seq) == 76
    assert cache.positions(seq, 0).tolist() == list(range(8, 76))


def test_a_pool_grows_before_anything_is_evicted():
    cache = cache_of(growth_step=16)
    seq = cache.add()
    grow(cache, seq, text(200))
    stats = cache.stats()
    assert (stats.growths, stats.pages) == (4, 20)
    assert stats.evicted > 0
    assert stored(cache, seq) > 60


def test_a_pool_that_cannot_grow_evicts(monkeypatch):
    cache = cache_of(growth_step=16)
    seq = start(cache, text(16))

    def refuse(pages):
        raise MemoryError("no")

    monkeypatch.setattr(cache._tables.growth, "_resize", refuse)
    grow(cache, seq, text(30))
    assert cache.stats().pages == 4
    assert stored(cache, seq) < 17


def test_a_pool_of_few_pages_still_has_room_for_one():
    cache = cache_of(pages=1, page_size=4)
    seq = cache.add()
    grow(cache, seq, text(12))
    assert stored(cache, seq) == 4


@pytest.mark.parametrize(
    ("whole", "spare", "wanted", "given"),
    [
        ([9, 3, 3], [9, 9, 9], 4, [4, 0, 0]),
        ([5, 5, 5], [9, 9, 9], 4, [1, 1, 2]),
        ([9, 9, 1], [2, 9, 9], 6, [2, 4, 0]),
        ([4, 4], [1, 1], 6, [1, 1]),
        ([4], [0], 1, [0]),
    ],
)
def test_all_give_what_they_have_above_one_level(whole, spare, wanted, given):
    actual = _level(np.asarray(whole), np.asarray(spare), wanted).tolist()
    assert sorted(actual) == sorted(given)
    assert sum(actual) == min(wanted, sum(spare))
