"""The commands and their options.

Texts go to standard output, everything else to standard error.
"""

from __future__ import annotations

import platform
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from pagedkv.interrupt import Uninterrupted

from .ending import Ending
from .plan import EXIT_CODES as PLAN_EXIT_CODES
from .plan import KV_HELP, kv_formats, plan
from .prompts import OPTIONS, UsageError, read, read_prefix, strict_json
from .report import INTERRUPTED, TERMINATED, USAGE
from .screen import Screen

EXIT_CODES = (
    "Exit codes: 0 every row finished, 1 some rows ended in an error or the run had to stop (what "
    "was finished is kept), 2 nothing was run because of what was given, 130 interrupted by Ctrl-C "
    "and 143 by SIGTERM (what was finished is kept)."
)

# Options that --set refuses, because they have a flag of their own, which the command reads.
FLAGS = {
    "max_new_tokens": "--max-new-tokens",
    "num_return_sequences": "--samples",
    "max_length": "--max-new-tokens",
    "seed": "--seed",
    "stop_strings": "--stop",
    "temperature": "--temperature",
    "top_p": "--top-p",
    "logprobs": "--logprobs",
}

# Fields that --cache accepts; other fields follow from the model or have an option of their own.
CACHE = (
    "retention",
    "budget",
    "read_tokens",
    "host_tokens",
    "growth_step",
    "high_water",
    "low_water",
    "max_sequences",
    "max_states",
)

# Options that --set refuses, because their values are Python objects.
OBJECTS = (
    "generation_config",
    "logits_processor",
    "prefix_allowed_tokens_fn",
    "stopping_criteria",
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
        typer.echo(f"pagedkv {_version('pagedkv')}")
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
    """Batched generation over a paged KV cache."""


@app.command(epilog=EXIT_CODES)
def generate(
    model: Annotated[str, typer.Argument(help="A folder or the id of a model on the hub.")],
    prompts: Annotated[list[str] | None, typer.Argument(help="Prompts, one each.")] = None,
    file: Annotated[
        str | None,
        typer.Option(
            "--file",
            "-f",
            help="Prompts, one a line; .jsonl: objects with 'prompt' and, if wanted, "
            f"{', '.join(OPTIONS)}; '-': standard input. No tables.",
        ),
    ] = None,
    prefix: Annotated[
        str | None,
        typer.Option(help="A file that precedes every prompt: text, or .json chat messages."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="JSON lines; run again to go on where it stopped."),
    ] = None,
    raw: Annotated[bool, typer.Option("--raw", help="No chat template.")] = False,
    max_new_tokens: Annotated[int, typer.Option("--max-new-tokens", "-n", min=1)] = 128,
    temperature: Annotated[
        float | None,
        typer.Option("--temperature", "-t", min=0, help="0: greedy. Default: as the model says."),
    ] = None,
    top_p: Annotated[float | None, typer.Option(min=0, max=1)] = None,
    samples: Annotated[int, typer.Option("--samples", "-k", min=1, help="Answers per prompt.")] = 1,
    seed: Annotated[int | None, typer.Option(help="Sample k draws from seed + k.")] = None,
    stop: Annotated[list[str] | None, typer.Option(help="Text that ends an answer.")] = None,
    options: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="NAME=VALUE", help="Any other option of generate."),
    ] = None,
    logprobs: Annotated[
        bool, typer.Option("--logprobs", help="Into --out, which it needs.")
    ] = False,
    max_tokens: Annotated[
        int | None, typer.Option(min=1, help="Token slots of the cache. Default: what is needed.")
    ] = None,
    page_size: Annotated[
        int | None, typer.Option(min=1, help="Default: 16, or 32 with int4.")
    ] = None,
    kv_format: Annotated[str, typer.Option(help=KV_HELP)] = "dense",
    cache: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME=VALUE",
            help=f"For when memory runs short: {', '.join(CACHE)}.",
        ),
    ] = None,
    step_tokens: Annotated[
        int | None, typer.Option(min=1, help="Tokens computed in one step. Default: 1024.")
    ] = None,
    dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or float16.")] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, ...")] = "auto",
    device_memory: Annotated[
        str | None,
        typer.Option(help="Limit, for example 8GiB: layers that do not fit are streamed."),
    ] = None,
    host_memory: Annotated[
        str | None, typer.Option(help="For layers that stream; the rest is read from files.")
    ] = None,
) -> None:
    """Generate for many prompts at once."""
    with Ending() as ending:
        try:
            formats = _kv_formats(kv_format)
            if out is None and sys.stdout is None:
                raise UsageError("standard output is closed; texts need it, or --out FILE")
            if out is None and logprobs:
                raise UsageError("--logprobs: expected with --out FILE, whose rows have them")
            if prefix == "-" and (file == "-" or not (file or prompts)):
                raise UsageError("--prefix: expected a file, standard input has the prompts")
            found, before = read(prompts or [], file), read_prefix(prefix)
            chosen = {
                "max_new_tokens": max_new_tokens,
                **_sampling(temperature, top_p, samples, stop),
                **_options(options or []),
            }
            pages = _cache(cache or [])
            memory = _memory(device_memory, host_memory, max_tokens, cache)
            with Screen(console) as screen:
                screen.doing("loading torch and transformers")  # for which --help does not wait
                with Uninterrupted():  # torch's start in C++ aborts the process if one gets in
                    from .job import Job, run

                job = Job(
                    model=model,
                    prompts=found,
                    prefix=before,
                    raw=raw,
                    samples=samples,
                    options=chosen,
                    seed=seed,
                    logprobs=logprobs,
                    dtype=dtype,
                    sizes={
                        "max_tokens": max_tokens,
                        "page_size": page_size or "auto",
                        "kv_format": formats,
                        "step_tokens": step_tokens,
                    },
                    cache=pages,
                    memory=memory,
                )
                code = run(job, out, device, screen)
        except UsageError as error:
            console.print(f"pagedkv: {error}", style="red")
            code = USAGE
        except KeyboardInterrupt:
            code = INTERRUPTED
    raise typer.Exit(TERMINATED if ending.terminated and code == INTERRUPTED else code)


app.command(epilog=PLAN_EXIT_CODES)(plan)


@app.command()
def info() -> None:
    """Versions, devices, and which backend each would use."""
    import torch

    from pagedkv.attention.backend import choose_backend
    from pagedkv.storage.memory import available_memory

    table = Table(box=None, show_header=False, padding=(0, 1))
    table.add_column(style="bold")
    table.add_row("python", platform.python_version())
    for package in ("pagedkv", "torch", "triton", "numpy", "transformers"):
        table.add_row(package, _version(package))
    devices = [torch.device("cpu")]
    devices += [torch.device("cuda", i) for i in range(torch.cuda.device_count())]
    for device in devices:
        name = platform.processor() or platform.machine()
        if device.type == "cuda":
            name = torch.cuda.get_device_name(device)
        free = f"{available_memory(device) / 2**30:.1f} GiB available"
        backend = f"backend {choose_backend('auto', device)}"
        table.add_row(str(device), f"{name}, {free}, {backend}")
    Console(highlight=False).print(table)


def _kv_formats(text: str) -> tuple[str, str]:
    try:
        return kv_formats(text)
    except ValueError as error:
        raise UsageError(f"--kv-format: {str(error).removeprefix('kv_format: ')}") from None


def _memory(
    device: str | None, host: str | None, max_tokens: int | None, cache: list[str] | None
) -> dict[str, str | None]:
    """The budgets that a plan is made for; empty without a plan."""
    if device is None and host is not None:
        raise UsageError("--host-memory: expected with --device-memory, which it is planned with")
    if device is None:
        return {}
    if max_tokens is not None:
        raise UsageError("--max-tokens: expected none with --device-memory, the plan says how many")
    if cache:
        raise UsageError("--cache: expected none with --device-memory, pages are the plan's own")
    return {"device_memory": device, "host_memory": host}


def _sampling(
    temperature: float | None, top_p: float | None, samples: int, stop: list[str] | None
) -> dict[str, Any]:
    """The options that have a flag of their own; those not given stay as the model has them."""
    if stop and "" in stop:
        raise UsageError("--stop: expected a text, got none, with which every answer ends")
    chosen: dict[str, Any] = {"stop_strings": stop} if stop else {}
    if samples > 1:
        chosen |= {"num_return_sequences": samples, "do_sample": True}
    if temperature == 0:
        return chosen | {"do_sample": False}
    if temperature is not None:
        chosen |= {"temperature": temperature, "do_sample": True}
    return chosen | ({"top_p": top_p, "do_sample": True} if top_p is not None else {})


def _options(pairs: list[str]) -> dict[str, Any]:
    """The options that --set gives."""
    found = dict(_pair("--set", pair) for pair in pairs)
    for name in found:
        if name in FLAGS:
            raise UsageError(f"--set: {name} has an option of its own, {FLAGS[name]}")
        if name in OBJECTS:
            raise UsageError(f"--set: {name} is for `BatchGenerator` in Python, it takes objects")
    return found


def _cache(pairs: list[str]) -> dict[str, Any]:
    """The fields that --cache gives."""
    found = dict(_pair("--cache", pair) for pair in pairs)
    for name in found:
        if name not in CACHE:
            raise UsageError(f"--cache: expected one of {', '.join(CACHE)}, got {name}")
    return found


def _pair(option: str, text: str) -> tuple[str, Any]:
    """`NAME=VALUE`; a value is JSON where it can be read as that, else text."""
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise UsageError(f"{option}: expected NAME=VALUE, got {text!r}")
    try:
        return name, strict_json(value)
    except ValueError:
        return name, value


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
