"""How far a job is, in numbers and in a log."""

import io
import time
from types import SimpleNamespace

import numpy as np
import pytest
from rich.console import Console, Group
from rich.text import Text

from pagedkv.batch.results import Running
from pagedkv.cli import screen
from pagedkv.cli.screen import TALL, Progress, Screen
from pagedkv.cli.show import Show


class Job(Progress):
    """Progress of a fifth."""

    share, passed, seconds_left = 0.2, 10.0, None

    def done(self) -> list[str]:
        return ["2/10 rows", "20.0 tokens/s"]


WORDS = "2/10 rows, 20.0 tokens/s, 0:00:10 passed"


# ------------------------------------------------------------------ in a log


def wait_for(condition) -> None:
    end = time.monotonic() + 600
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_a_log_gets_a_line_soon_and_then_now_and_then(monkeypatch):
    waits = []

    class Over:
        """Hands out time: what is waited for passes at once, three times."""

        def wait(self, seconds: float) -> bool:
            waits.append(seconds)
            return len(waits) > 3

        def set(self) -> None: ...

    monkeypatch.setattr(screen, "Event", Over)
    file = io.StringIO()
    shown = Screen(Console(file=file, soft_wrap=True))
    shown.doing(Job())
    with shown:
        pass
    assert waits == [5.0, 30.0, 30.0, 30.0]
    assert file.getvalue() == f"pagedkv: {WORDS}\n" * 3


def test_a_log_tells_what_is_loaded_and_nothing_after_the_end(monkeypatch):
    monkeypatch.setattr(screen, "FIRST", 0.01)
    monkeypatch.setattr(screen, "EVERY", 0.01)
    file = io.StringIO()
    with Screen(Console(file=file, soft_wrap=True)) as shown:
        shown.doing("loading the model")
        wait_for(lambda: file.getvalue().count("\n") >= 2)
        shown.doing(Job())
        wait_for(lambda: WORDS in file.getvalue())
    length = len(file.getvalue())
    assert file.getvalue().startswith("pagedkv: loading the model ... 0:00:00\npagedkv: ")
    assert "\x1b" not in file.getvalue()
    time.sleep(0.05)
    assert len(file.getvalue()) == length


def test_forced_colour_makes_no_terminal_of_a_log(monkeypatch):
    monkeypatch.setattr(screen, "FIRST", 60)
    file = io.StringIO()
    with Screen(Console(file=file, force_terminal=True, force_interactive=True)) as shown:
        shown.doing("loading the model")
    assert file.getvalue() == ""


# ------------------------------------------------------------------ on a terminal


@pytest.mark.parametrize(("width", "bar"), [(200, 30), (60, 19), (49, 8), (48, 0), (20, 0), (5, 0)])
def test_the_bar_takes_the_room_that_the_words_leave(width, bar):
    file = io.StringIO()
    console = Console(file=file, width=width)
    shown = Screen(console)
    shown.doing(Job())
    console.print(Group(shown._line()))
    (line,) = file.getvalue().splitlines()
    words = Job().told(width)
    assert line.index(words[:width]) == (bar + 1 if bar else 0)
    assert line[: bar // 5] == "━" * (bar // 5)  # a fifth is done
    assert len(line) <= width


def test_one_row_is_shown_until_it_ends_below_the_pages_of_all():
    rows = [Running(0, 0, [1], 0), Running(1, 0, [1, 2], 0), Running(2, 0, [], 9)]
    owners = np.array([3, 1, 1, 0])
    cache = SimpleNamespace(owners=lambda: owners)
    generator = SimpleNamespace(running=rows, cache=cache)
    show = Show(generator, ["first", "second", "third"], lambda ids: "words " * len(ids))

    def drawn() -> list[str]:
        return [line.plain for line in show(60)]

    assert drawn()[:2] == ["", "  ██▓··\n  █ live 2  ▓ shared 1  · saved by sharing 2"]
    assert drawn()[2:] == ["> second", "words words"]
    rows[0] = Running(0, 0, [1, 2, 3], 0)
    assert drawn()[2] == "> second"
    del rows[1]
    assert drawn()[2:] == ["> first", "words words words"]
    rows[:] = [Running(2, 0, [], 4)]
    assert len(drawn()) == 2
    owners[:] = 0
    assert drawn() == []


def test_a_low_terminal_has_the_bar_alone():
    for height, lines in ((TALL, ["of 60", WORDS]), (TALL - 1, [WORDS])):
        file = io.StringIO()
        console = Console(file=file, width=60, height=height)
        shown = Screen(console)
        shown.doing(Job(), lambda width: [Text(f"of {width}")])
        console.print(shown._drawn())
        drawn = file.getvalue().splitlines()
        assert len(drawn) == len(lines)
        assert all(line in seen for line, seen in zip(lines, drawn))
