"""The commands."""

from __future__ import annotations

from typing import Annotated

import typer

from .check import EXIT_CODES as CHECK_EXIT_CODES
from .check import check
from .command import console
from .compile import EXIT_CODES as COMPILE_EXIT_CODES
from .compile import compile_kernels
from .eval import CONTEXT as EVAL_CONTEXT
from .eval import evaluate
from .generate import Generate, generate
from .info import info, version_of
from .plan import EXIT_CODES as PLAN_EXIT_CODES
from .plan import plan
from .quality import EXIT_CODES as QUALITY_EXIT_CODES
from .quality import Several, quality
from .report import EXIT_CODES as GENERATE_EXIT_CODES
from .report import USAGE
from .score import score
from .torchrun import only_alone
from .trace import EXIT_CODES as TRACE_EXIT_CODES
from .trace import trace as trace_command

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"pagedkv {version_of('pagedkv')}")
        raise typer.Exit


@app.callback()
def common(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option(
            "--version",
            metavar="",
            callback=_print_version,
            is_eager=True,
            help="Print the version.",
        ),
    ] = False,
) -> None:
    """Answer many prompts at once, over a paged KV cache.

    For example:

    pagedkv generate MODEL --file prompts.csv --column question

    pagedkv score MODEL --file tickets.csv --column text --choices billing,login

    pagedkv plan MODEL --device-memory 8GiB
    """
    if alone := only_alone(context.invoked_subcommand):
        console.print(f"pagedkv: {alone}", style="red")
        raise typer.Exit(USAGE)


app.command(epilog=GENERATE_EXIT_CODES, cls=Generate)(generate)
app.command(epilog=GENERATE_EXIT_CODES)(score)
app.command(epilog=PLAN_EXIT_CODES)(plan)
app.command("compile", epilog=COMPILE_EXIT_CODES)(compile_kernels)
app.command("trace", epilog=TRACE_EXIT_CODES)(trace_command)
app.command(epilog=QUALITY_EXIT_CODES, cls=Several)(quality)
app.command("eval", context_settings=EVAL_CONTEXT)(evaluate)
app.command(epilog=CHECK_EXIT_CODES)(check)
app.command()(info)
