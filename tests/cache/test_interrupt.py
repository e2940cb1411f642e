"""Ctrl-C waits for the end of a region, and is never lost."""

import signal
import sys
import threading
from pathlib import Path

import pytest

import pagedkv
from pagedkv import PagedKVCache
from pagedkv.interrupt import Uninterrupted
from tests.cases import one_group
from tests.contents import advance, assert_contents, start
from tests.effort import ALL, sampled
from tests.pressing import AtLine


@pytest.fixture(autouse=True)
def pythons_own_handler():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interrupt_waits_for_the_end_of_the_region():
    done = []

    def press():
        with Uninterrupted() as region:
            signal.raise_signal(signal.SIGINT)
            assert region.pressed
            done.append("the rest")

    with pytest.raises(KeyboardInterrupt):
        press()
    assert done == ["the rest"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_interrupt_is_not_lost_where_the_region_ends_by_an_error_that_callers_go_on_after():
    def press():
        with Uninterrupted():
            signal.raise_signal(signal.SIGINT)
            raise ValueError("no room")

    with pytest.raises(KeyboardInterrupt) as raised:
        press()
    assert str(raised.value.__context__) == "no room"


def test_the_outermost_region_is_the_one_that_ends():
    done = []

    def press():
        with Uninterrupted():
            with Uninterrupted():
                signal.raise_signal(signal.SIGINT)
            done.append("between")

    with pytest.raises(KeyboardInterrupt):
        press()
    assert done == ["between"]


def test_a_handler_of_the_callers_own_is_left_in_place():
    heard = []

    def note(*_):
        heard.append("signal")

    signal.signal(signal.SIGINT, note)
    with Uninterrupted():
        signal.raise_signal(signal.SIGINT)
        assert heard == ["signal"]
    assert signal.getsignal(signal.SIGINT) is note


def test_other_threads_leave_the_handler_alone():
    handlers = []

    def region():
        with Uninterrupted():
            handlers.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=region)
    thread.start()
    thread.join()
    assert handlers == [signal.default_int_handler]


# ------------------------------------------------------------------ at every line of a call

HERE = str(Path(pagedkv.__file__).resolve().parent)
TEXT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]


def is_ours(file):
    """Not of the region: before and behind its own lines an interrupt is the caller's."""
    return file.startswith(HERE) and not file.endswith("interrupt.py")


CALLS = {
    "add": lambda cache, seq: cache.add(TEXT, max_tokens=16),
    "fork": lambda cache, seq: cache.fork(seq, 2),
    "free": lambda cache, seq: cache.free(seq),
    "truncate": lambda cache, seq: cache.truncate(seq, 5),
    "prepare": lambda cache, seq: cache.prepare([seq], [[7] * 6]),
    "offload": lambda cache, seq: cache.offload(seq),
    "clear_prefixes": lambda cache, seq: cache.clear_prefixes(),
    "free later": lambda cache, seq: (cache.release_later([seq]), cache.stats()),
}


@sampled
@pytest.mark.skipif(sys.gettrace() is not None, reason="somebody traces already")
@pytest.mark.parametrize("name", CALLS)
def test_an_interrupt_at_any_line_of_a_call_leaves_a_whole_cache_and_nothing_behind(name):
    config = one_group(max_tokens=64, host_tokens=64)
    reached, n = True, 1
    while reached:
        cache = PagedKVCache(config, device="cpu", debug=True)
        other, seq = start(cache, TEXT), start(cache, TEXT[::-1])
        lines = AtLine(n, is_ours)
        try:
            with lines:
                CALLS[name](cache, seq)
        except KeyboardInterrupt:
            assert lines.pressed
        reached, n = lines.pressed, n + (3 if ALL else 23)
        if cache.open_step is not None:
            assert not reached, "a step that nobody knows of"
            cache.abort(cache.open_step)
        cache.check()
        assert_contents(cache, other, TEXT)
        if cache._tables.is_live(seq):
            cache.restore(seq)
            length = cache.length(seq)
            assert length in (5, 10)
            advance(cache, {seq: [*TEXT[::-1][:length], 8, 8]})
            cache.free(seq)
        cache.free(other)
        assert not reached or name == "add" or cache.stats().sequences == 0
        cache.check()
    assert n > 30
