"""A user can make room before pages run out."""

import pytest

from pagedkv import OutOfPagesError, PagedKVCache
from pagedkv.cache.pressure import Pressure, offload_idle
from pagedkv.errors import OffloadedError, OpenStepError, UnknownSequenceError
from tests.cases import one_group
from tests.contents import advance, assert_contents, start


class Asked:
    """A callback that notes why it was asked, and does what it is told."""

    def __init__(self, act=lambda cache, pressure: False) -> None:
        self.act, self.seen = act, list[Pressure]()

    def __call__(self, cache, pressure):
        self.seen.append(pressure)
        return self.act(cache, pressure)


def make(asked, **fields) -> PagedKVCache:
    config = one_group(**{"max_tokens": 24, "host_tokens": 64, **fields})
    return PagedKVCache(config, device="cpu", debug=True, on_pressure=asked)


def test_what_is_no_callback_is_refused_by_name():
    with pytest.raises(TypeError, match="on_pressure: expected a callable, got int"):
        make(3)


def test_a_step_that_the_callback_leaves_open_is_not_lost():
    opened = []

    def act(cache, pressure):
        cache.offload(pressure.idle[0])
        opened.append(cache.prepare([cache.add()], [[1]]))
        return True

    cache = make(act)
    _, b, _ = (start(cache, [i] * 8) for i in range(3))
    with pytest.raises(OpenStepError):
        cache.prepare([b], [[1]])
    assert cache.open_step is opened[0]
    cache.abort(opened[0])
    cache.check()
    assert_contents(cache, b, [1] * 8)


def test_the_user_is_asked_before_a_call_fails_and_told_who_waits():
    asked = Asked()
    cache = make(asked)
    a, b, c = (start(cache, [i] * 8) for i in range(3))
    with pytest.raises(OutOfPagesError):
        cache.prepare([b], [[1]])
    with pytest.raises(OutOfPagesError):
        cache.add(max_tokens=20)
    assert asked.seen == [
        Pressure("prepare", 1, 0, (b,), (a, c)),
        Pressure("add", 5, 0, (), (a, b, c)),
    ]
    cache.check()


def test_cached_prefixes_go_before_anybody_is_asked():
    asked = Asked()
    cache = make(asked)
    cache.free(start(cache, [9] * 16))
    start(cache, [1] * 20)
    assert not asked.seen


def test_the_sequence_that_has_waited_longest_is_offloaded_first_and_the_call_succeeds():
    asked = Asked(offload_idle)
    cache = make(asked)
    a, b = start(cache, [1] * 8), start(cache, [2] * 7)
    advance(cache, {a: [1] * 11})
    c = start(cache, [3] * 4)
    advance(cache, {c: [3] * 5})
    assert [cache.is_offloaded(seq) for seq in (a, b, c)] == [False, True, False]
    advance(cache, {c: [3] * 13})
    assert [cache.is_offloaded(seq) for seq in (a, b, c)] == [True, True, False]
    with pytest.raises(OffloadedError):
        cache.prepare([a], [[1]])
    cache.restore([a, b])  # which makes the third one wait
    assert cache.is_offloaded(c)
    for seq, text in ((a, [1] * 11), (b, [2] * 7)):
        assert_contents(cache, seq, text)
    assert [pressure.call for pressure in asked.seen] == ["prepare", "prepare", "restore"]


def test_who_is_in_an_open_step_does_not_wait():
    asked = Asked(offload_idle)
    cache = make(asked)
    a, b = start(cache, [1] * 8), start(cache, [2] * 8)
    cache.offload(b)
    c = start(cache, [3] * 12)
    with cache.step([c], [[1]], layers=()):
        cache.restore(b)
        assert_contents(cache, b, [2] * 8)
    assert asked.seen == [Pressure("restore", 2, 0, (b,), (a,))]
    cache.check()


def test_a_file_is_loaded_and_a_fork_made_where_the_user_makes_room(tmp_path):
    asked = Asked(offload_idle)
    cache = make(asked)
    a = start(cache, [1] * 9)
    cache.save(a, tmp_path / "x")
    b = start(cache, [2] * 10, max_tokens=12)
    c = cache.load(tmp_path / "x")
    assert (cache.is_offloaded(a), cache.is_offloaded(c)) == (True, False)
    cache.fork(b)
    assert [pressure.call for pressure in asked.seen] == ["load", "fork"]
    cache.check()


def test_the_user_may_free_or_truncate_instead():
    cache = make(Asked(lambda cache, pressure: cache.free(pressure.idle[0]) or True))
    a, b = start(cache, [1] * 12), start(cache, [2] * 12)
    advance(cache, {b: [2] * 13})
    assert cache.stats().sequences == 1
    cache = make(Asked(lambda cache, pressure: cache.truncate(pressure.idle[0], 4) or True))
    a, b = start(cache, [1] * 12), start(cache, [2] * 12)
    advance(cache, {b: [2] * 13})
    assert (cache.length(a), cache.length(b)) == (4, 13)


def test_a_user_who_changes_nothing_is_asked_once():
    asked = Asked(lambda cache, pressure: True)
    cache = make(asked)
    a = start(cache, [1] * 24)
    before = cache.stats()
    with pytest.raises(OutOfPagesError):
        cache.add(max_tokens=4)
    assert len(asked.seen) == 1
    assert cache.stats() == before
    assert_contents(cache, a, [1] * 24)


def test_what_the_callback_raises_comes_out_and_its_own_calls_ask_nobody():
    def act(cache, pressure):
        with pytest.raises(OutOfPagesError):
            cache.add(max_tokens=4)
        raise ZeroDivisionError

    asked = Asked(act)
    cache = make(asked)
    a = start(cache, [1] * 24)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            cache.add(max_tokens=4)
    assert len(asked.seen) == 2
    cache.check()
    assert_contents(cache, a, [1] * 24)


def test_a_sequence_that_took_the_row_of_another_did_not_step_when_that_did():
    asked = Asked()
    cache = make(asked, max_sequences=3)
    a = start(cache, [1] * 4)
    b = start(cache, [2] * 8)
    advance(cache, {a: [1] * 8})
    cache.free(a)
    new = cache.fork(b)[0]  # on the row of `a`, which was the last to step
    with pytest.raises(OutOfPagesError):
        cache.prepare([cache.add()], [[5] * 24])
    assert asked.seen[-1].idle == (new, b)


def test_the_user_may_free_what_is_to_be_restored():
    def act(cache, pressure):
        cache.free(pressure.seqs[0])
        return True

    cache = make(act)
    a, b, c = (start(cache, [i] * 8) for i in range(3))
    cache.offload([a, b])
    d = start(cache, [5] * 12)
    with pytest.raises(UnknownSequenceError, match=f"{a} is not a live sequence"):
        cache.restore([a, b])
    cache.check()
    for seq, tokens in ((c, [2] * 8), (d, [5] * 12)):
        assert_contents(cache, seq, tokens)


def test_where_the_host_is_full_as_well_the_call_fails():
    cache = make(Asked(offload_idle), host_tokens=4)
    start(cache, [1] * 12), start(cache, [2] * 12)
    with pytest.raises(OutOfPagesError):
        cache.add(max_tokens=4)
    cache.check()
