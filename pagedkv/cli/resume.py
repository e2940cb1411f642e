"""What of a job is done already, and the rest of it; where nothing is left torch is not loaded."""

from __future__ import annotations

from pathlib import Path

from pagedkv.interrupt import Uninterrupted

from .output import Output, key_of
from .report import DONE, SOME_FAILED
from .request import Job
from .screen import Screen
from .table import rows_beside, write_table


def carry_out(job: Job, out: Path | None, device: str, screen: Screen) -> int:
    """Runs what is not done yet.

    Args:
        out: the file for the answers; standard output without one.

    Returns:
        The command's exit code.

    Raises:
        UsageError: it cannot be run; nothing was computed.
    """
    every = list(range(len(job.prompts)))
    if out is None:
        return _run(job, every, None, device, screen)
    screen.doing("looking what is done already")
    rows, console = rows_beside(out), screen.console
    made_with = job.made_with()
    keys = [key_of(made_with, prompt.content, prompt.options) for prompt in job.prompts]
    output = Output(rows, keys, job.samples, made_with)
    try:
        left = output.unfinished()
        if len(left) < len(every):
            console.print(f"{rows} has {len(every) - len(left)} of {len(every)} prompts already")
        elif rows != out:
            console.print(f"rows go to {rows}; {out} is made of them at the end")
        code = _run(job, left, output, device, screen) if left else DONE
        return _tabulate(out, output, code, screen) if rows != out else code
    finally:
        output.close()


def _run(job: Job, left: list[int], output: Output | None, device: str, screen: Screen) -> int:
    screen.doing("loading torch and transformers")
    with Uninterrupted():  # torch's start in C++ aborts the process if one gets in
        from .job import run

    return run(job, left, output, device, screen)


def _tabulate(out: Path, output: Output, code: int, screen: Screen) -> int:
    """Makes the table of all rows if they are there; returns the exit code."""
    if output.unfinished():
        screen.console.print(f"{out} is made when no row is missing: run the same command again")
        return code
    try:
        number = write_table(out, output.path.read_bytes().splitlines())
    except (OSError, ValueError) as error:  # which Arrow's are
        screen.console.print(f"cannot write {out}, its rows are kept: {error}", style="red")
        return code or SOME_FAILED
    screen.console.print(f"{out} has {number:,} rows")
    return code
