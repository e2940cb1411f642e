"""`pagedkv plan`: what fits, before anything is downloaded or loaded."""

from __future__ import annotations

import inspect
import re
from typing import Annotated

import typer

from pagedkv.config import KV_FORMATS, format_pair
from pagedkv.errors import PagedKVError
from pagedkv.planner import plan_memory
from pagedkv.planner.gpus import gpu_table

from .report import USAGE

KV_HELP = f"{' or '.join(', '.join(KV_FORMATS).rsplit(', ', 1))}, or two: K,V."
EXIT_CODES = "Exit codes: 0 it fits, 2 it does not, or something given is wrong."
NAMES = set(inspect.signature(plan_memory).parameters) - {"model"}


def _list_gpus(name: str | None) -> str | None:
    """Ends the command with the table of known cards, if that is asked for."""
    if name and name.lower() == "list":
        typer.echo(gpu_table())
        raise typer.Exit
    return name


def plan(
    model: Annotated[str, typer.Argument(help="A folder or the id of a model on the hub.")],
    device_memory: Annotated[
        str | None,
        typer.Option(help="For weights, pages and passes: 8GiB, 8GB. Default: 0.9 of --gpu."),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            help="A known card, RTX 4090 say, for memory and speeds. list: which are known.",
            callback=_list_gpus,
            is_eager=True,
        ),
    ] = None,
    host_memory: Annotated[
        str | None, typer.Option(help="Holds streamed layers. Default: they come from disk.")
    ] = None,
    batch: Annotated[int, typer.Option("--batch", "-b", help="Sequences at once.")] = 1,
    length: Annotated[
        int | None,
        typer.Option("--length", "-l", help="Tokens of each. Default: 2048, or the longest."),
    ] = None,
    page_size: Annotated[
        int | None, typer.Option(help="Tokens a page. Default: 16, or 32 with int4.")
    ] = None,
    kv_dtype: Annotated[str | None, typer.Option(help="Default: what it computes in.")] = None,
    kv_format: Annotated[str, typer.Option(help=KV_HELP)] = "dense",
    weight_dtype: Annotated[
        str | None, typer.Option(help="float32, bfloat16, float16, float8, int8 or int4.")
    ] = None,
    max_tokens: Annotated[
        int | None, typer.Option(help="Token slots of the cache. Default: all that is left.")
    ] = None,
    step_tokens: Annotated[
        int | None, typer.Option(help="Tokens of one pass. Default: what the link leaves time for.")
    ] = None,
    link_gbps: Annotated[
        float | None, typer.Option(help="GB/s to the device. Default: PCIe 4 x16, or --gpu's.")
    ] = None,
    images: Annotated[
        bool, typer.Option("--images", help="With the tower that a type takes images with.")
    ] = False,
    ranks: Annotated[
        int,
        typer.Option(help="Processes of torchrun that share out the model; sizes are of each."),
    ] = 1,
    pack_weights: Annotated[
        bool,
        typer.Option("--pack-weights", help="On a CPU: with weights packed for its products, too."),
    ] = False,
    expert_slots: Annotated[
        int | None,
        typer.Option(
            min=0, help="Experts of a layer that stay; 0: whole layers. Default: what is sooner"
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="cuda or cpu.")] = "cuda",
    as_json: Annotated[bool, typer.Option("--json", help="Sizes in bytes.")] = False,
) -> None:
    """What fits: resident layers, pages, longest context, tokens a second."""
    try:
        found = plan_memory(
            model,
            device_memory=device_memory,
            gpu=gpu,
            host_memory=host_memory,
            batch=batch,
            length=length,
            page_size=page_size or "auto",
            kv_dtype=kv_dtype,
            kv_format=kv_formats(kv_format),
            weight_dtype=weight_dtype,
            max_tokens=max_tokens,
            step_tokens=step_tokens,
            link_gbps=link_gbps,
            images=images,
            ranks=ranks,
            pack_weights=pack_weights,
            expert_slots=expert_slots,
            device=device,
        )
    except (PagedKVError, ValueError, TypeError, ImportError) as error:
        typer.echo(f"pagedkv: {as_options(str(error))}", err=True)
        raise typer.Exit(USAGE) from None
    typer.echo(found.to_json() if as_json else str(found))


def as_options(message: str) -> str:
    """A message about arguments of `plan_memory`, as it can be followed in the command."""

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
