"""Groups with a window keep what it sees, and what may still be taken back."""

import pytest

from pagedkv.errors import SequenceTooLongError
from tests.cache.small import ids, make
from tests.cases import two_groups, window_only
from tests.contents import advance, assert_contents


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
