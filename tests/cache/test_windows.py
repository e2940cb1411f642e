"""Groups with a window keep what it sees, and what may still be taken back."""

import pytest

from pagedkv.errors import SequenceTooLongError
from tests.cache.small import P, ids, make, snapshot
from tests.cases import two_groups, window_only
from tests.contents import advance, assert_contents, start


@pytest.mark.parametrize("rollback", [0, 3])
@pytest.mark.parametrize("window", [1, 4, 6, 9])
def test_a_window_group_drops_the_pages_behind_it(window, rollback):
    cache = make(two_groups(window, rollback=rollback, max_tokens=64, max_sequences=2))
    a = cache.add()
    for n in range(1, 30):
        advance(cache, {a: ids(n)})
        dropped = max(0, n - rollback - window) // P
        assert cache.gather(a, 1)[0].shape[0] == n - P * dropped
        assert cache.gather(a, 0)[0].shape[0] == n
        assert_contents(cache, a, ids(n))
        assert cache.stats().live == 2 * -(-n // P) - dropped
    cache.check()
    step = cache.prepare([a], num_new=1)
    dropped = max(0, 29 - rollback - window) // P
    table = step.page_table(1)[0]
    assert (table[:dropped] == -1).all()
    assert (table[dropped:8] >= 0).all()
    assert step.kv_lens(1).tolist() == step.kv_lens(0).tolist() == [30]
    indptr, indices, last = step.csr(1)
    assert indptr.tolist() == [0, 8 - dropped]
    assert indices.tolist() == table[dropped:8].tolist()
    assert last.tolist() == [2]
    cache.abort(step)
    assert_contents(cache, a, ids(29))


@pytest.mark.parametrize("config", [window_only(6), two_groups(6, max_tokens=64)])
def test_a_revocable_step_can_be_taken_back_from_windows_until_the_next_commit(config):
    cache = make(config)
    seq = cache.add()
    for new in (17, 9):
        step = cache.prepare([seq], num_new=new)
        cache.commit(step, revocable=True, layers=())
        cache.check()
    for n in (25, 20, 17):  # back to any length of the latest step
        cache.truncate(seq, n)
        cache.check()
    held = cache.stats().live
    with pytest.raises(ValueError, match="set `rollback` to keep more"):
        cache.truncate(seq, 8)
    step = cache.prepare([seq], num_new=1)
    cache.commit(step, layers=())
    with pytest.raises(ValueError, match="set `rollback` to keep more"):
        cache.truncate(seq, 11)
    assert cache.stats().live <= held
    cache.check()


@pytest.mark.parametrize("rollback", [0, 4])
def test_a_window_can_be_truncated_by_rollback_tokens_and_to_nothing(rollback):
    cache = make(window_only(6, rollback=rollback))
    a = start(cache, ids(30))
    dropped = (30 - rollback - 6) // P
    for n in range(1, 30):
        if max(0, n - 6) // P < dropped:
            before = snapshot(cache, [a])
            with pytest.raises(ValueError, match=r"\d"):
                cache.truncate(a, n)
            assert snapshot(cache, [a]) == before
    n = 30 - rollback
    cache.truncate(a, n)
    assert_contents(cache, a, ids(n))
    advance(cache, {a: [*ids(n), 99, 98]})
    assert_contents(cache, a, [*ids(n), 99, 98])
    cache.truncate(a, 0)
    assert (cache.length(a), cache.stats().live) == (0, 0)
    advance(cache, {a: ids(9, 1)})
    assert_contents(cache, a, ids(9, 1))


def test_a_step_longer_than_the_window_pool_was_sized_for_is_refused_by_name():
    config = window_only(4, max_tokens=256, max_sequences=2, max_step_tokens=8)
    assert config.num_pages() == 2 * (1 + 2) + 2
    cache = make(config)
    a = cache.add()
    with pytest.raises(SequenceTooLongError, match="max_step_tokens"):
        cache.prepare([a], num_new=9)
    b = cache.add()
    for n in range(4, 256, 4):  # two sequences of the greatest length, in a pool of eight pages
        advance(cache, {a: ids(n), b: ids(n, 1)})
    advance(cache, {a: ids(256), b: ids(256, 1)})
    assert_contents(cache, a, ids(256))
    assert_contents(cache, b, ids(256, 1))
    cache.check()
