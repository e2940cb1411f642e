"""The commands."""

from __future__ import annotations

from typing import Annotated

import typer

from .check import check
from .compile import compile_kernels
from .eval import CONTEXT, evaluate
from .generate import generate
from .info import info, version_of
from .plan import plan
from .quality import quality
from .report import USAGE
from .score import score
from .start import console
from .torchrun import only_alone
from .trace import trace

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


for command in (generate, score, plan, compile_kernels, trace, quality):
    app.command(**vars(command)["how"])(command)
app.command("eval", context_settings=CONTEXT)(evaluate)
app.command(**vars(check)["how"])(check)
app.command()(info)
