"""The command in a terminal of 100 x 34, replayed byte by byte, as a person sees it."""

import fcntl
import os
import re
import select
import struct
import subprocess
import sys
import termios

import pyte
import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform == "win32", reason="terminals of Unix"),
]

COLUMNS, LINES = 100, 34
PIECE = 97  # bytes between two looks at the screen; they end anywhere
STATES = ("loading torch", "reading the tokenizer", "encoding 14 prompts", "loading the model")


class Terminal:
    """A pseudo-terminal, and the screen that it shows."""

    def __init__(self) -> None:
        self.ours, self.theirs = os.openpty()
        size = struct.pack("HHHH", LINES, COLUMNS, 0, 0)
        fcntl.ioctl(self.theirs, termios.TIOCSWINSZ, size)
        self.written = b""

    def drew(self, what: str) -> bool:
        """Whether this was ever drawn: some of it is gone again between two looks."""
        return re.search(what, self.written.decode(errors="replace")) is not None

    def looks(self):
        """The lines after every few bytes, those that scrolled away included."""
        screen = pyte.HistoryScreen(COLUMNS, LINES, history=10_000)
        stream, gone = pyte.ByteStream(screen), []
        for begin in range(0, len(self.written), PIECE):
            stream.feed(self.written[begin : begin + PIECE])
            for line in list(screen.history.top)[len(gone) :]:
                gone.append("".join(line[x].data for x in range(COLUMNS)))
            yield lines_of("\n".join([*gone, *screen.display]))


def lines_of(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


def shown(text: str) -> list[str]:
    """The lines of a plain text on such a terminal, where long ones take several."""
    terminal = Terminal()
    terminal.written = text.replace("\n", "\r\n").encode()
    *_, last = terminal.looks()
    return last


def watch(start, arguments, stdout: Terminal | None, stderr: Terminal | None) -> tuple[str, str]:
    """Runs the command on these terminals; what it wrote to pipes in place of others."""
    ends = [end.theirs if end else subprocess.PIPE for end in (stdout, stderr)]
    env = {"TERM": "xterm-256color", "COLUMNS": "", "LINES": ""}
    process = start(*arguments, stdout=ends[0], stderr=ends[1], env=env)
    of_terminals = {end.ours: end for end in (stdout, stderr) if end}
    for end in of_terminals.values():
        os.close(end.theirs)
    pipes = {pipe.fileno(): b"" for pipe in (process.stdout, process.stderr) if pipe}
    open_ends = {*of_terminals, *pipes}
    while open_ends:
        for end in select.select(open_ends, [], [], 60)[0]:
            try:
                read = os.read(end, 1000)
            except OSError:  # the other end of a terminal is closed
                read = b""
            if not read:
                open_ends.remove(end)
            elif end in of_terminals:
                of_terminals[end].written += read
            else:
                pipes[end] += read
    assert process.wait(600) == 0, (pipes, stderr and stderr.written)
    for end in of_terminals:
        os.close(end)
    texts = [
        pipes[pipe.fileno()].decode() if pipe else "" for pipe in (process.stdout, process.stderr)
    ]
    return texts[0], texts[1]


def is_state(line: str) -> bool:
    """Whether a line, or what there is of it yet, tells what is going on, or is of the map."""
    return bool(line.strip()) and (
        line.strip()[0] in "━╸╺█▓·" or any(line[: len(s)] == s[: len(line)] for s in STATES)
    )


PROMPTS = ["".join("abcdefgh"[(i * k) % 8] for k in range(1, 4 + 3 * i)) for i in range(14)]


@pytest.fixture(scope="module")
def job(model):
    # Long texts too, which take several lines; in a cache where rows wait for each other.
    return ("generate", model, "-t", 0, "-n", 60, "--max-tokens", 500, *PROMPTS)


@pytest.fixture(scope="module")
def texts(pagedkv, job):
    """Returns the command's output into a pipe."""
    return pagedkv(*job).stdout


def as_they_ended(texts: str, lines: list[str]) -> list[str]:
    """The lines of these texts, in the order in which a screen has their questions."""
    blocks = dict(zip(PROMPTS, texts.rstrip("\n").split("\n\n"), strict=True))
    order = dict.fromkeys(line[2:] for line in lines if line.startswith("> "))
    assert order.keys() == blocks.keys()
    return shown("\n\n".join(blocks[prompt] for prompt in order))


def test_texts_stand_whole_above_the_bar_in_every_moment(start, job, texts):
    terminal = Terminal()
    watch(start, job, terminal, terminal)
    looks = [*terminal.looks()]
    expected = as_they_ended(texts, looks[-1])
    for lines in looks[:-1]:
        below = next((i for i, line in enumerate(lines) if is_state(line)), len(lines))
        above = lines_of("\n".join(lines[:below]))
        whole, last = above[:-1], above[-1]
        known = min(len(whole), len(expected))
        assert whole[:known] == expected[:known]
        if len(whole) < len(expected):
            assert expected[len(whole)].startswith(last)
    assert terminal.drew("loading torch and transformers")  # gone between two looks, perhaps
    assert terminal.drew("[0-9]+/14 rows, ")
    assert terminal.drew("shared [0-9]+.*saved by sharing")
    assert looks[-1][: len(expected)] == expected
    rest = "\n".join(looks[-1][len(expected) :])
    assert "tokens a second" in rest
    assert "rows, " not in rest


def test_the_text_of_a_row_grows_under_its_question_while_it_runs(start, model):
    terminal = Terminal()
    watch(start, ("generate", model, "-t", 0, "-n", 250, "abc"), terminal, terminal)
    *looks, last = terminal.looks()
    _, whole = "".join(last).split("> abc")
    growing = set()
    for lines in looks:
        drawn = [i for i, line in enumerate(lines) if "saved by sharing" in line]
        if drawn and lines[drawn[-1] + 1 :][:1] == ["> abc"]:
            growing |= set(lines[drawn[-1] + 2 :][:1])
    growing = {text for text in growing if text and not is_state(text)}
    assert len(growing) > 1
    assert all(text in whole for text in growing)
    assert "[cut at 250 tokens]" in whole


def test_texts_on_a_terminal_stand_alone_where_standard_error_is_elsewhere(start, job, texts):
    terminal = Terminal()
    _, err = watch(start, job, terminal, None)
    *_, last = terminal.looks()
    assert last == as_they_ended(texts, last)
    assert b"\x1b[2K" not in terminal.written
    assert "tokens a second" in err
    assert "\x1b" not in err


def test_the_bar_leaves_texts_in_the_pipe(start, job, texts):
    terminal = Terminal()
    out, _ = watch(start, job, None, terminal)
    assert out == texts
    *looks, last = terminal.looks()
    assert terminal.drew("/14 rows, ")
    assert all(len(lines) == 1 for lines in looks if "rows, " in lines[-1])
    assert last[:2] == ["", next(line for line in last if line)]
    assert "rows, " not in "\n".join(last)


def test_the_end_of_a_long_prompt_stands_above_its_text(start, model):
    terminal = Terminal()
    watch(start, ("generate", model, "-t", 0, "-n", 5, "a" + "b" * 100), terminal, terminal)
    *_, last = terminal.looks()
    assert last[0] == "> ..." + "b" * 93


def test_the_bar_of_another_terminal_leaves_texts_to_theirs(start, job, texts):
    above, bar = Terminal(), Terminal()
    watch(start, job, above, bar)
    *_, last = above.looks()
    assert last == as_they_ended(texts, last)
    assert bar.drew("/14 rows, ")
