"""How far a job is, in numbers and in a log."""

import io
import time
from types import SimpleNamespace

import pytest

pytest.importorskip("rich")

from rich.console import Console, Group

from pagedkv.cli import screen
from pagedkv.cli.screen import Pace, Screen


class Job:
    """A pace, and the clock and the tokens that it goes by."""

    def __init__(self, allowed: list[int], **others) -> None:
        self.now, self.stats = 100.0, SimpleNamespace(new_tokens=0)
        self.pace = Pace(allowed, self.stats, clock=lambda: self.now, **others)

    def at(self, seconds: float, tokens: int) -> str:
        self.now, self.stats.new_tokens = 100.0 + seconds, tokens
        return str(self.pace)


def test_no_time_left_is_told_before_there_are_tokens():
    job = Job([100] * 10)
    assert job.at(0, 0) == "0/10 rows, 0.0 tokens/s, 0:00:00 passed"
    assert job.at(7.9, 0) == "0/10 rows, 0.0 tokens/s, 0:00:07 passed"


def test_the_first_prompts_say_nothing_about_the_time_left():
    job = Job([50] * 10)
    assert job.at(0.6, 1) == "0/10 rows, 1.7 tokens/s, 0:00:00 passed"
    job.pace.ended(50, 20, failed=False)
    assert "left" in job.at(0.7, 20)


def test_time_left_is_that_of_all_tokens_until_a_row_ends():
    job = Job([100] * 10)
    assert job.at(10, 200) == "0/10 rows, 20.0 tokens/s, 0:00:10 passed, about 0:00:40 left"
    assert job.at(20, 400) == "0/10 rows, 20.0 tokens/s, 0:00:20 passed, about 0:00:30 left"


def test_rows_that_ended_tell_what_share_of_their_limits_the_others_will_use():
    job = Job([100] * 4 + [200] * 3)
    for _ in range(2):
        job.pace.ended(100, 25, False)
    # 800 tokens were allowed to the others; a quarter of these is 200, of which they have 50.
    assert job.at(10, 100) == "2/7 rows, 10.0 tokens/s, 0:00:10 passed, about 0:00:15 left"
    assert job.pace.tokens_left == 150
    # They may get more than that.
    assert job.at(60, 600).endswith("about 0:00:00 left")
    for allowed in (100, 100, 200, 200, 200):
        job.pace.ended(allowed, allowed, False)
    assert (
        job.at(3661, 1234 * 3661)
        == "7/7 rows, 1,234.0 tokens/s, 1:01:01 passed, about 0:00:00 left"
    )


def test_rows_that_fail_do_not_promise_an_early_end():
    job = Job([100] * 4)
    job.pace.ended(100, 0, True)
    job.pace.ended(100, 20, True)
    assert job.at(10, 120) == "2/4 rows, 12.0 tokens/s, 0:00:10 passed, about 0:00:08 left"


def test_a_narrow_terminal_is_not_told_what_has_passed():
    job = Job([100] * 10)
    whole = job.at(10, 200)
    assert job.pace.told(len(whole)) == whole
    assert job.pace.told(len(whole) - 1) == "0/10 rows, 20.0 tokens/s, about 0:00:40 left"


def test_the_layer_of_a_streamed_pass_is_told():
    job = Job([100], layers=SimpleNamespace(done=3, total=30))
    assert job.at(1, 0).endswith(", layer 3 of 30")


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
    file, job = io.StringIO(), Job([10])
    shown = Screen(Console(file=file, soft_wrap=True))
    shown.doing(job.pace)
    with shown:
        pass
    assert waits == [5.0, 30.0, 30.0, 30.0]
    assert file.getvalue() == "pagedkv: 0/1 rows, 0.0 tokens/s, 0:00:00 passed\n" * 3


def test_a_log_tells_what_is_loaded_and_nothing_after_the_end(monkeypatch):
    monkeypatch.setattr(screen, "FIRST", 0.01)
    monkeypatch.setattr(screen, "EVERY", 0.01)
    file = io.StringIO()
    with Screen(Console(file=file, soft_wrap=True)) as shown:
        shown.doing("loading the model")
        wait_for(lambda: file.getvalue().count("\n") >= 2)
        shown.doing(Job([1]).pace)
        wait_for(lambda: "0/1 rows" in file.getvalue())
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


@pytest.mark.parametrize(("width", "bar"), [(200, 30), (80, 19), (69, 8), (68, 0), (40, 0), (5, 0)])
def test_the_bar_takes_the_room_that_the_words_leave(width, bar):
    job = Job([100] * 10)
    job.at(10, 200)
    file = io.StringIO()
    console = Console(file=file, width=width)
    shown = Screen(console)
    shown.doing(job.pace)
    console.print(Group(shown._line()))
    (line,) = file.getvalue().splitlines()
    words = job.pace.told(width)
    assert line.index(words[:width]) == (bar + 1 if bar else 0)
    assert line[: bar // 5] == "━" * (bar // 5)  # a fifth is done
    assert len(line) <= width
