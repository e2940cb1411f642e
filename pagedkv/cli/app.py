"""The commands and their options.

Texts go to standard output, everything else to standard error.
"""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from .ending import Ending
from .eval import CONTEXT as EVAL_CONTEXT
from .eval import evaluate
from .info import info, version_of
from .options import (
    CACHE,
    DTYPES_SAID,
    cache_of,
    dtype_of,
    kv_formats_of,
    memory_of,
    one_of,
    options_of,
    sampling_of,
    store_of,
)
from .plan import EXIT_CODES as PLAN_EXIT_CODES
from .plan import plan
from .prompts import OPTIONS, read, read_prefix
from .quality import EXIT_CODES as QUALITY_EXIT_CODES
from .quality import Several, quality
from .report import INTERRUPTED, TERMINATED, USAGE
from .screen import Screen
from .trace import EXIT_CODES as TRACE_EXIT_CODES
from .trace import trace as trace_command
from .usage import UsageError, require_apart

EXIT_CODES = (
    "Exit codes: 0 every row finished, 1 some rows ended in an error or the run had to stop (what "
    "was finished is kept), 2 nothing was run because of what was given, 130 interrupted by Ctrl-C "
    "and 143 by SIGTERM (what was finished is kept)."
)

# An option of each panel of the help.
PROMPTS, SAMPLING, MEMORY, OUTPUT = (
    partial(typer.Option, rich_help_panel=name)
    for name in ("Prompts", "Sampling", "Memory", "Output")
)

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
console = Console(stderr=True, highlight=False, markup=False, emoji=False, soft_wrap=True)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"pagedkv {version_of('pagedkv')}")
        raise typer.Exit


@app.callback()
def common(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Print the version."
        ),
    ] = False,
) -> None:
    """Answers to many prompts at once, over a paged KV cache.

    For example:

    pagedkv generate MODEL --file prompts.csv --column question --out answers.jsonl

    pagedkv plan MODEL --device-memory 8GiB
    """


@app.command(epilog=EXIT_CODES)
def generate(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A folder, or the id of a model on the hub.")
    ],
    prompts: Annotated[
        list[str] | None,
        typer.Argument(metavar="PROMPTS", help="One prompt each; or give --file, or a pipe."),
    ] = None,
    files: Annotated[
        list[str] | None,
        PROMPTS(
            "--file",
            "-f",
            metavar="FILE",
            help="Prompts: .txt has one a line; .jsonl, .json, .csv, .tsv and .parquet have them "
            f"in a column, and may have {', '.join(OPTIONS)} in others. '-': standard input.",
        ),
    ] = None,
    column: Annotated[
        str | None,
        PROMPTS(
            metavar="NAME",
            help="The column that holds the prompts. [dim]Default: prompt, or else messages.[/dim]",
        ),
    ] = None,
    prefix: Annotated[
        str | None,
        PROMPTS(
            metavar="FILE", help="A text, or chat messages in .json, that goes before every prompt."
        ),
    ] = None,
    raw: Annotated[
        bool,
        PROMPTS("--raw", help="Pass prompts to the model as they are, without its chat template."),
    ] = False,
    max_new_tokens: Annotated[
        int,
        SAMPLING(
            "--max-new-tokens",
            "-n",
            min=1,
            metavar="N",
            help="The most tokens that an answer gets.",
        ),
    ] = 128,
    temperature: Annotated[
        float | None,
        SAMPLING(
            "--temperature",
            "-t",
            min=0,
            metavar="X",
            help="0 always takes the likeliest token. [dim]Default: as the model says.[/dim]",
        ),
    ] = None,
    top_p: Annotated[
        float | None,
        SAMPLING(
            min=0,
            max=1,
            metavar="X",
            help="Draw from the likeliest tokens that together have this probability.",
        ),
    ] = None,
    samples: Annotated[
        int,
        SAMPLING("--samples", "-k", min=1, metavar="N", help="Answers to each prompt."),
    ] = 1,
    seed: Annotated[
        int | None,
        SAMPLING(metavar="N", help="Draw the same answers again: sample k draws from seed + k."),
    ] = None,
    stop: Annotated[
        list[str] | None,
        SAMPLING(metavar="TEXT", help="An answer ends with this text. May be given several times."),
    ] = None,
    options: Annotated[
        list[str] | None,
        SAMPLING(
            "--set",
            metavar="NAME=VALUE",
            help="Any other option of transformers' generate, for example top_k=40.",
        ),
    ] = None,
    draft: Annotated[
        str | None,
        MEMORY(
            metavar="MODEL",
            help="A smaller model with the same tokenizer that drafts; answers are the same.",
        ),
    ] = None,
    device_memory: Annotated[
        str | None,
        MEMORY(
            metavar="SIZE",
            help="Use no more than this, for example 8GiB; layers that do not fit are streamed.",
        ),
    ] = None,
    host_memory: Annotated[
        str | None,
        MEMORY(
            metavar="SIZE",
            help="Keep as much of the streamed layers in host memory, and read the rest from disk.",
        ),
    ] = None,
    max_tokens: Annotated[
        int | None,
        MEMORY(
            min=1,
            metavar="N",
            help="Room of the cache, in tokens of all rows together. "
            "[dim]Default: what the job needs.[/dim]",
        ),
    ] = None,
    kv_format: Annotated[
        str,
        MEMORY(
            metavar="FORMAT",
            help="How keys and values are stored: dense (as computed), fp8, int8 or int4; two with "
            "a comma between them are for keys and for values.",
        ),
    ] = "dense",
    page_size: Annotated[
        int | None,
        MEMORY(
            min=1, metavar="N", help="Tokens in a page. [dim]Default: 16, or 32 with int4.[/dim]"
        ),
    ] = None,
    cache: Annotated[
        list[str] | None,
        MEMORY(
            metavar="NAME=VALUE",
            help=f"A field of the cache, for when memory runs short: {', '.join(CACHE)}.",
        ),
    ] = None,
    step_tokens: Annotated[
        int | None,
        MEMORY(
            min=1,
            metavar="N",
            help="The most tokens computed in one step. [dim]Default: 1024.[/dim]",
        ),
    ] = None,
    prefix_store: Annotated[
        Path | None,
        MEMORY(
            metavar="FOLDER",
            help="Prefixes of prompts that outlast the job: found there, and left there.",
        ),
    ] = None,
    prefix_store_size: Annotated[
        str | None,
        MEMORY(
            metavar="SIZE",
            help="The most bytes of its files; the least recently used go. "
            "[dim]Default: 10GiB.[/dim]",
        ),
    ] = None,
    dtype: Annotated[
        str,
        MEMORY(metavar="DTYPE", help=f"What it computes in: {DTYPES_SAID}."),
    ] = "auto",
    device: Annotated[
        str,
        MEMORY(metavar="DEVICE", help="For example cpu, cuda or cuda:1."),
    ] = "auto",
    out: Annotated[
        Path | None,
        OUTPUT(
            "--out",
            "-o",
            metavar="FILE",
            help="Answers as JSON lines, each as soon as it is finished; the same command again "
            "goes on where it stopped. With .parquet or .csv a table is made of them at the end.",
        ),
    ] = None,
    logprobs: Annotated[
        bool,
        OUTPUT("--logprobs", help="Write the log-probability of every token as well; needs --out."),
    ] = False,
    trace: Annotated[
        Path | None,
        OUTPUT(metavar="FILE", help="Record what happens to every page, for `pagedkv trace`."),
    ] = None,
) -> None:
    """Generate answers to many prompts at once, as text on standard output or as rows in a file.

    For example:

    pagedkv generate MODEL "Why is the sky blue?" "Why does ice float?"

    pagedkv generate MODEL --file prompts.csv --column question --out answers.jsonl
    """
    with Ending() as ending:
        try:
            formats = kv_formats_of(kv_format)
            file = one_of("--file", files or [])
            if out is None and sys.stdout is None:
                raise UsageError("standard output is closed; texts need it, or --out FILE")
            if out is None and logprobs:
                raise UsageError("--logprobs: expected with --out FILE, whose rows have them")
            if out is not None:
                from .table import rows_beside

                require_apart("--trace", trace, ("--out", out), ("--out", rows_beside(out)))
            if prefix == "-" and (file == "-" or not (file or prompts)):
                raise UsageError("--prefix: expected a file, standard input has the prompts")
            chosen = {
                "max_new_tokens": max_new_tokens,
                **sampling_of(temperature, top_p, samples, stop),
                **options_of(options or []),
            }
            pages = cache_of(cache or [])
            memory = memory_of(device_memory, host_memory, max_tokens, cache, draft)
            number_type = dtype_of(dtype)
            store = store_of(prefix_store, prefix_store_size)
            with Screen(console) as screen:
                screen.doing("reading the prompts")
                found, before = read(prompts or [], file, column), read_prefix(prefix)
                from .request import Job
                from .resume import carry_out

                job = Job(
                    model=model,
                    prompts=found,
                    prefix=before,
                    raw=raw,
                    samples=samples,
                    options=chosen,
                    seed=seed,
                    logprobs=logprobs,
                    dtype=number_type,
                    sizes={
                        "max_tokens": max_tokens,
                        "page_size": page_size or "auto",
                        "kv_format": formats,
                        "step_tokens": step_tokens,
                        "trace": trace,
                        "prefix_store": store,
                    },
                    cache=pages,
                    memory=memory,
                    draft=draft,
                )
                code = carry_out(job, out, device, screen)
        except UsageError as error:
            console.print(f"pagedkv: {error}", style="red")
            code = USAGE
        except KeyboardInterrupt:
            code = INTERRUPTED
    raise typer.Exit(TERMINATED if ending.terminated and code == INTERRUPTED else code)


app.command(epilog=PLAN_EXIT_CODES)(plan)
app.command("trace", epilog=TRACE_EXIT_CODES)(trace_command)
app.command(epilog=QUALITY_EXIT_CODES, cls=Several)(quality)
app.command("eval", context_settings=EVAL_CONTEXT)(evaluate)
app.command()(info)
