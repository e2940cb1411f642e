"""`pagedkv compile`: compiles the kernels of a model before a job waits for them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import typer

from pagedkv.errors import PagedKVError

from .errors import UsageError, refusing
from .option import MODEL, PLAIN, Given, Panel, takes
from .options import DTYPES_SAID, cache_of, dtype_of, kv_formats_of
from .plan import KV_HELP, PAGE_SIZE_HELP

if TYPE_CHECKING:  # they bring torch along, for which --help does not wait
    from transformers import PreTrainedModel

    from pagedkv.kernels.triton.card import Chip

PAGES = Panel("As in the jobs that will run")
EXIT_CODES = "Exit codes: 0 all is compiled, 1 a kernel does not compile, 2 an option is wrong."
TOKENS = 4096  # in the pool that kernels are compiled for; pools of all sizes have the same kernels


@takes(
    MODEL,
    PLAIN(
        "--arch N",
        int | None,
        "The card's architecture: 90 for H100 and H200. [dim]Default: that of the card here.[/dim]",
    ),
    PLAIN(
        "--workers N",
        int | None,
        "Processes that compile. [dim]Default: one for each core.[/dim]",
        min=1,
    ),
    PAGES("--dtype DTYPE", str, f"What the model computes in: {DTYPES_SAID}.", "auto"),
    PAGES("--kv-format FORMAT", str, KV_HELP, "dense"),
    PAGES("--page-size TOKENS", int | None, PAGE_SIZE_HELP, min=1),
    PAGES(
        "--cache NAME=VALUE",
        list[str] | None,
        "A field of the cache, for example read_tokens=1024.",
    ),
    name="compile",
    epilog=EXIT_CODES,
)
def compile_kernels(given: Given) -> None:
    """Compile a model's kernels before the first job needs them, into Triton's cache.

    It needs neither weights nor a card.

    For example:

    pagedkv compile MODEL --arch 90
    """
    with refusing(PagedKVError, ValueError, NotImplementedError, failed=(RuntimeError,)):
        fields = cache_of(given.cache or [])
        fields |= {"kv_format": kv_formats_of(given.kv_format)}
        fields |= {} if given.page_size is None else {"page_size": given.page_size}
        began = time.perf_counter()
        number, found = _compile(given, dtype_of(given.dtype), fields)
    seconds = time.perf_counter() - began
    typer.echo(f"{number} kernels compiled for {found} in {seconds:.0f} s", err=True)


def _compile(given: Given, dtype: str, fields: dict[str, Any]) -> tuple[int, str]:
    """Compiles kernels; returns their number, and the architecture that they are for."""
    from pagedkv import BatchGenerator, PagedKVCache
    from pagedkv.hf.model import cache_config

    found, chip = _card(given.arch)
    from pagedkv.kernels.triton.card import absent_card

    shape = _without_weights(given.model, dtype)
    with absent_card(found, chip):
        pages = PagedKVCache(cache_config(shape, TOKENS, **fields), device="cpu", backend="triton")
        with BatchGenerator(shape, cache=pages) as generator:
            number = generator.warm_up(given.workers)
    return number, f"sm_{found}" if isinstance(found, int) else found


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
    """Makes a model whose weights are never written, because such memory takes no room."""
    import torch
    from transformers.initialization import no_init_weights

    from .loading import class_of, config_of

    config = config_of(name)
    wanted = config.dtype or torch.float32 if dtype == "auto" else getattr(torch, dtype)
    with no_init_weights():
        model: PreTrainedModel = class_of(name).from_config(config, dtype=wanted)
    return model.eval()
