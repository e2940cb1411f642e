"""The part that `generate` and `score` share: begin, check options, run a job, and end.

First the processes meet; then options are checked, prompts are read, and a job is made of both.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import typer
from rich.console import Console

from . import options
from .answers import policy_of
from .causes import told
from .errors import UsageError
from .option import Given
from .prompts import OPTIONS, Prompt, bad_of, read, read_prefix
from .report import DONE, INTERRUPTED, TERMINATED
from .rows import is_table
from .screen import Screen
from .shard import shard_of
from .signals import Ending
from .template import Template
from .text_files import encoding_of
from .torchrun import Launch, follows

# Options that become fields of a job unchanged, if the command has them.
AS_GIVEN = {
    "answer", "draft", "expert_parallel", "explain", "logprobs", "model", "raw", "samples", "seed",
    "tokenizer", "tokens",
}  # fmt: skip

console = Console(
    stderr=True, highlight=False, markup=False, emoji=False, soft_wrap=True, quiet=follows()
)


@dataclass
class Command:
    """A command that runs.

    Attributes:
        launch: the processes that run it together.
        code: its exit code.
    """

    launch: Launch
    code: int = DONE


@contextmanager
def running() -> Iterator[Command]:
    """A region that ends the command, with its exit code; it prints a mistake of the user."""
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


def start(
    given: Given,
    launch: Launch,
    check: Callable[[Any, list[Prompt]], None],
    needs_out: dict[str, bool] | None = None,
    row_options: Collection[str] = OPTIONS,
    **own: Any,
) -> int:
    """Runs the job that a command was given, as far as it is not done; returns the exit code.

    Args:
        launch: the processes that run it together.
        check: called with the prefix and the prompts; raises if the command cannot take them.
        needs_out: options whose results only rows of a file hold, and whether each was given.
        row_options: options that a row may have.
        own: fields of the job that are the command's own.

    Raises:
        UsageError: it cannot be run; nothing was computed.
    """
    file = options.one_of("--file", given.file or [])
    arguments = given.prompts or []
    piped = file == "-" or not (file or arguments)
    part = None if given.shard is None else shard_of(given.shard, given.out)
    out, trace = (part.named(path) if part and path else path for path in (given.out, given.trace))
    launch.first(lambda: options.require_outputs(out, needs_out or {}, trace))
    skipped, side = policy_of(given.empty, given.too_long)
    encoding = None if given.encoding is None else encoding_of(given.encoding)
    wording = None if given.template is None else Template(given.template)
    sizes = {
        "max_tokens": given.max_tokens,
        "page_size": given.page_size or "auto",
        "kv_format": options.kv_formats_of(given.kv_format),
        "step_tokens": given.step_tokens,
        "trace": trace if launch.is_first else None,
        "pack_weights": options.packing_of(given.pack_weights, given.weight_format),
    }
    pages = options.cache_of(given.cache or [])
    asked = {name: value for name, value in vars(given).items() if name in AS_GIVEN}
    asked |= {"dtype": options.dtype_of(given.dtype), "memory": options.memory_of(given)}
    asked["template"] = options.template_of(given.chat_template_kwargs, given.raw)
    launch.require_served(given, pages)
    sizes["prefix_store"] = options.store_of(given.prefix_store, given.prefix_store_size)

    def found() -> tuple[Any, list[Prompt]]:
        before = read_prefix(given.prefix, piped)
        prompts = read(arguments, file, given.column, encoding, wording, row_options)
        check(before, prompts)
        return before, prompts

    with Screen(console) as screen:
        screen.doing("reading the prompts")
        before, prompts = launch.first(found) or (None, [])
        for line in told(bad_of(prompts), len(prompts), skipped):
            console.print(line)
        from .job_spec import Job
        from .resume import carry_out

        job = Job(
            prompts=prompts,
            prefix=before,
            sizes=sizes,
            cache=pages,
            shard=part,
            wording=given.template,
            skipped=skipped,
            side=side,
            source=file if is_table(file) and not arguments else None,
            **{**asked, **own},
        )
        return carry_out(job, out, given.device, screen, launch)
