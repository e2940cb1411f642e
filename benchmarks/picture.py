"""The last screen of the demo, as a picture for the README.

    PYTHONSAFEPATH= python -m benchmarks.picture docs/demo.svg -- pagedkv generate MODEL ...

`make picture` gives it the command of `make demo`. The command runs on a pseudo-terminal; what it
leaves on the screen is drawn with rich's own picture of a terminal, without its fonts, which would
be fetched from the network.
"""

import fcntl
import io
import os
import pty
import re
import shlex
import struct
import sys
import termios
from pathlib import Path

import pyte
from rich.console import Console
from rich.text import Text

COLUMNS, LINES = 106, 30
COLOURS = {"default": "", "brown": "yellow", "brightbrown": "bright_yellow"}


def main() -> None:
    target, _, *command = sys.argv[1:]
    title = f"pagedkv {' '.join(command[1:2])}" if "pagedkv" in command[0] else shlex.join(command)
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(Text("\n").join(screen(command)))
    svg = console.export_svg(title=title)
    svg = re.sub(r"\s*@font-face \{.*?\}", "", svg, flags=re.DOTALL)
    Path(target).write_text(re.sub(r"[ \t]+$", "", svg, flags=re.MULTILINE), encoding="utf-8")


def screen(command: list[str]) -> list[Text]:
    """Run a command and return the lines that are on its terminal when it has ended."""
    shown = pyte.Screen(COLUMNS, LINES)
    stream = pyte.ByteStream(shown)
    child, terminal = pty.fork()
    if not child:
        os.environ |= {"TERM": "xterm-256color", "COLUMNS": str(COLUMNS), "LINES": str(LINES)}
        os.execvp(command[0], command)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", LINES, COLUMNS, 0, 0))
    while True:
        try:
            stream.feed(os.read(terminal, 65536))
        except OSError:  # the command has ended
            break
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status:
        raise SystemExit(f"{shlex.join(command)} ended with {status}")
    lines = [_line([shown.buffer[y][x] for x in range(COLUMNS)]) for y in range(LINES)]
    while lines and not lines[-1].plain:
        lines.pop()
    return lines


def _line(cells: list[pyte.screens.Char]) -> Text:
    line = Text()
    for cell in cells:
        line.append(cell.data, " ".join(filter(None, ["bold" if cell.bold else "", _colour(cell)])))
    line.rstrip()
    return line


def _colour(cell: pyte.screens.Char) -> str:
    if re.fullmatch(r"[0-9a-f]{6}", cell.fg):
        return f"#{cell.fg}"
    return COLOURS.get(cell.fg, re.sub("^bright", "bright_", cell.fg))


if __name__ == "__main__":
    main()
