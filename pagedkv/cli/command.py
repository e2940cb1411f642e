"""Begins and ends every job over many prompts: processes meet, mistakes are printed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import typer
from rich.console import Console

from .errors import UsageError
from .report import DONE, INTERRUPTED, TERMINATED
from .signals import Ending
from .torchrun import Launch, follows

console = Console(
    stderr=True, highlight=False, markup=False, emoji=False, soft_wrap=True, quiet=follows()
)


@dataclass
class Command:
    """A command that runs.

    Attributes:
        launch: the processes that run it together.
        code: with which it ends.
    """

    launch: Launch
    code: int = DONE


@contextmanager
def running() -> Iterator[Command]:
    """A region at whose end the command ends, also where a mistake or an interruption ends it."""
    with Ending() as ending, Launch() as launch:
        command = Command(launch)
        try:
            launch.meet()
            yield command
            code = launch.ended(command.code, ending.terminated)
        except UsageError as error:
            console.print(f"pagedkv: {error}", style="red")
            code = error.code
        except KeyboardInterrupt:
            code = INTERRUPTED
    code = TERMINATED if ending.terminated and code == INTERRUPTED else code
    launch.leave(code)
    raise typer.Exit(code)
