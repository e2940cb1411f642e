"""`pagedkv plan`: says what fits, before anything is downloaded or loaded."""

from __future__ import annotations

import inspect
import re

import typer

from pagedkv.config import KV_FORMATS, format_pair
from pagedkv.errors import PagedKVError
from pagedkv.planner import plan_memory
from pagedkv.planner.gpus import gpu_table

from .errors import refusing
from .option import MODEL, PLAIN, Given, Panel, takes

*FIRST, LAST = KV_FORMATS
KV_HELP = (
    f"How keys and values are stored: {', '.join(FIRST)} or {LAST}; dense is as computed, two with "
    "a comma between them are for keys and for values."
)
PAGE_SIZE_HELP = "Tokens in a page. [dim]Default: 16, or 32 with int4.[/dim]"
EXIT_CODES = "Exit codes: 0 it fits, 2 it does not, or something given is wrong."
MACHINE, WORK, WEIGHTS, CACHE = map(Panel, ("Machine", "Work", "Model", "Cache"))
NAMES = set(inspect.signature(plan_memory).parameters) - {"model"}


def _list_gpus(name: str | None) -> str | None:
    """Ends the command with the table of known cards, if that is asked for."""
    if name and name.lower() == "list":
        typer.echo(gpu_table())
        raise typer.Exit
    return name


PLAN_OPTIONS = (
    MODEL,
    MACHINE(
        "--device-memory SIZE",
        str | None,
        "Memory of the device that the model may use, for example 8GiB. "
        "[dim]Default: nine tenths of the memory of --gpu.[/dim]",
    ),
    MACHINE(
        "--gpu NAME",
        str | None,
        "Take memory and speeds of this card, for example 'RTX 4090'; list prints the known cards.",
        callback=_list_gpus,
        is_eager=True,
    ),
    MACHINE(
        "--host-memory SIZE",
        str | None,
        "Host memory for layers that are streamed. [dim]Default: they are read from disk.[/dim]",
    ),
    MACHINE(
        "--link-gbps GB/S",
        float | None,
        "Speed at which layers reach the device. [dim]Default: that of --gpu, or of PCIe "
        "4 x16.[/dim]",
    ),
    MACHINE("--device DEVICE", str, "cuda or cpu.", "cuda"),
    MACHINE(
        "--ranks N",
        int,
        "Processes of torchrun that share out the model; every size here, given or "
        "printed, is for one of them.",
        1,
    ),
    WORK("--batch -b N", int, "Sequences that run at once.", 1),
    WORK(
        "--length -l TOKENS",
        int | None,
        "Tokens of each sequence, prompt and answer. [dim]Default: 2048, or fewer if the "
        "model takes fewer.[/dim]",
    ),
    WORK(
        "--step-tokens TOKENS",
        int | None,
        "The most tokens computed in one pass through the model. [dim]Default: as many "
        "as are computed while streamed layers arrive.[/dim]",
    ),
    WORK("--images", bool, "Count the part of the model that sees images as well."),
    WEIGHTS(
        "--weight-dtype DTYPE",
        str | None,
        "float32, bfloat16, float16, float8, int8 or int4. [dim]Default: as in the "
        "model's files.[/dim]",
    ),
    WEIGHTS(
        "--expert-slots N",
        int | None,
        "Experts of a streamed layer that stay in memory; 0 reads whole layers. "
        "[dim]Default: what is sooner.[/dim]",
        min=0,
    ),
    WEIGHTS(
        "--pack-weights",
        bool,
        "On a CPU: count the second copy of the weights that generate makes with it.",
    ),
    CACHE("--kv-format FORMAT", str, KV_HELP, "dense"),
    CACHE(
        "--kv-dtype DTYPE",
        str | None,
        "What keys and values are computed in. [dim]Default: as the model is.[/dim]",
    ),
    CACHE("--page-size TOKENS", int | None, PAGE_SIZE_HELP),
    CACHE(
        "--max-tokens TOKENS",
        int | None,
        "Room of the cache, in tokens of all sequences together. [dim]Default: all memory "
        "that is left.[/dim]",
    ),
    PLAIN("--json", bool, "Print JSON, with sizes in bytes."),
)


@takes(*PLAN_OPTIONS, epilog=EXIT_CODES)
def plan(given: Given) -> None:
    """Say what fits, before it is loaded: layers, pages, the longest context, tokens a second.

    For example:

    pagedkv plan MODEL --device-memory 8GiB

    pagedkv plan MODEL --gpu "RTX 4090" --batch 8 --length 4096
    """
    asked = {name: value for name, value in vars(given).items() if name in NAMES}
    with refusing(PagedKVError, ValueError, TypeError, ImportError, says=as_options):
        asked["kv_format"] = kv_formats(given.kv_format)
        asked["page_size"] = given.page_size or "auto"
        found = plan_memory(given.model, **asked)
    typer.echo(found.to_json() if given.json else str(found))


def as_options(message: str) -> str:
    """Rewrites a message about arguments of `plan_memory` into options of the command."""

    def flag(found: re.Match[str]) -> str:
        name, value = found.groups()
        if value == "False":
            return f"no --{name.replace('_', '-')}"
        said = "" if value is None else " " + value.strip("'")
        return f"--{name.replace('_', '-')}{said}"

    names = "|".join(sorted(NAMES, key=len, reverse=True))
    return re.sub(rf"\b({names})(?:=('[^']*'|[\w.]+)|(?=:))", flag, message)


def kv_formats(text: str) -> tuple[str, str]:
    """The formats of K and V: one name for both, or two with a comma between them."""
    names = text.split(",")
    return format_pair(names[0] if len(names) == 1 else tuple(names))
