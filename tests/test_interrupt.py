"""Ctrl-C waits for the end of a region, and is never lost."""

import signal
import threading

import pytest

from pagedkv.interrupt import Uninterrupted


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
