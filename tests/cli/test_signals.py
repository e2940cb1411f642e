"""Interruptions that land where Python can raise none."""

import signal
import sys
import time

import pytest

from pagedkv.cli.signals import Ending


class Interrupted:
    """An object in whose end a Ctrl-C lands."""

    def __init__(self, error: type[BaseException]) -> None:
        self.error = error

    def __del__(self) -> None:
        raise self.error


@pytest.fixture
def hearing():
    """Ctrl-C is heard, also where the tests were started in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def test_an_interruption_that_python_would_forget_comes_again(capsys, hearing):
    before = sys.unraisablehook
    went_on = []

    def work() -> None:
        Interrupted(KeyboardInterrupt)
        went_on.append(True)
        time.sleep(60)

    with pytest.raises(KeyboardInterrupt), Ending():
        work()
    assert went_on
    assert sys.unraisablehook is before
    assert capsys.readouterr().err == ""


def test_other_errors_there_are_told_as_ever(monkeypatch):
    told = []
    monkeypatch.setattr(sys, "unraisablehook", told.append)
    with Ending():
        Interrupted(ValueError)
    assert [each.exc_type for each in told] == [ValueError]
