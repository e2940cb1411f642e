"""`pagedkv compile`: kernels of a model, compiled before anything waits for them."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from pagedkv.errors import PagedKVError

from .errors import UsageError
from .options import DTYPES_SAID, cache_of, dtype_of, kv_formats_of
from .plan import KV_HELP
from .report import USAGE

if TYPE_CHECKING:  # they bring torch along, for which --help does not wait
    from transformers import PreTrainedModel

    from pagedkv.kernels.triton.card import Chip

PAGES = partial(typer.Option, rich_help_panel="As in the jobs that will run")
EXIT_CODES = "Exit codes: 0 all is compiled, 1 a kernel does not compile, 2 an option is wrong."
TOKENS = 4096  # in the pool that kernels are compiled for; pools of all sizes have the same kernels


def compile_kernels(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A folder, or the id of a model on the hub.")
    ],
    arch: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="The card's architecture: 90 for H100 and H200. [dim]Default: that of the card "
            "here.[/dim]",
        ),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            min=1,
            metavar="N",
            help="Processes that compile. [dim]Default: one for each core.[/dim]",
        ),
    ] = None,
    dtype: Annotated[
        str, PAGES(metavar="DTYPE", help=f"What the model computes in: {DTYPES_SAID}.")
    ] = "auto",
    kv_format: Annotated[str, PAGES(metavar="FORMAT", help=KV_HELP)] = "dense",
    page_size: Annotated[
        int | None,
        PAGES(
            min=1,
            metavar="TOKENS",
            help="Tokens in a page. [dim]Default: 16, or 32 with int4.[/dim]",
        ),
    ] = None,
    cache: Annotated[
        list[str] | None,
        PAGES(metavar="NAME=VALUE", help="A field of the cache, for example read_tokens=1024."),
    ] = None,
) -> None:
    """Compile a model's kernels before the first job needs them, into Triton's cache.

    It needs neither weights nor a card.

    For example:

    pagedkv compile MODEL --arch 90
    """
    try:
        fields = cache_of(cache or [])
        fields |= {"kv_format": kv_formats_of(kv_format)}
        fields |= {} if page_size is None else {"page_size": page_size}
        began = time.perf_counter()
        number, found = _compile(model, arch, dtype_of(dtype), fields, workers)
    except (UsageError, PagedKVError, ValueError, NotImplementedError) as error:
        typer.echo(f"pagedkv: {error}", err=True)
        raise typer.Exit(USAGE) from None
    except RuntimeError as error:
        typer.echo(f"pagedkv: {error}", err=True)
        raise typer.Exit(1) from None
    seconds = time.perf_counter() - began
    typer.echo(f"{number} kernels compiled for {found} in {seconds:.0f} s", err=True)


def _compile(
    name: str, arch: int | None, dtype: str, fields: dict[str, Any], workers: int | None
) -> tuple[int, str]:
    """Compiles kernels; returns their number, and the architecture that they are for."""
    from pagedkv import BatchGenerator, PagedKVCache
    from pagedkv.hf.model import cache_config

    found, chip = _card(arch)
    from pagedkv.kernels.triton.card import absent_card

    shape = _without_weights(name, dtype)
    with absent_card(found, chip):
        pages = PagedKVCache(cache_config(shape, TOKENS, **fields), device="cpu", backend="triton")
        with BatchGenerator(shape, cache=pages) as generator:
            return generator.warm_up(workers), f"sm_{found}" if isinstance(found, int) else found


def _card(arch: int | None) -> tuple[int | str, Chip]:
    """The architecture to compile for, and what it offers."""
    import torch

    try:
        from pagedkv.kernels.triton.card import CHIPS, Chip
        from pagedkv.kernels.triton.launch import interpreting, target_of
    except ImportError:
        raise UsageError("kernels are compiled by Triton, which is not installed") from None
    if interpreting():
        raise UsageError("TRITON_INTERPRET: expected not to be set, nothing is compiled with it")
    known = ", ".join(map(str, CHIPS))
    if arch is not None and arch not in CHIPS:
        raise UsageError(f"--arch: expected one of {known}, got {arch}")
    if arch is not None:
        return arch, CHIPS[arch]
    if not torch.cuda.is_available():
        raise UsageError(f"--arch: expected one of {known}, because no card is here to be asked")
    found = target_of(torch.device("cuda"))
    return found.arch, Chip(found.shared, found.processors, 0, 0)


def _without_weights(name: str, dtype: str) -> PreTrainedModel:
    """Makes a model whose weights are memory that is never written, which takes no room."""
    import torch
    from transformers.initialization import no_init_weights

    from .loading import class_of, config_of

    config = config_of(name)
    wanted = config.dtype or torch.float32 if dtype == "auto" else getattr(torch, dtype)
    with no_init_weights():
        model: PreTrainedModel = class_of(name).from_config(config, dtype=wanted)
    return model.eval()
