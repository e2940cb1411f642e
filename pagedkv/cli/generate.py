"""`pagedkv generate`: its options, and what they make a job of.

Texts go to standard output, everything else to standard error.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from .answers import ANSWER, answer_name, policy_of, require_room
from .causes import told
from .ending import Ending
from .launch import Launch, follows
from .options import (
    CACHE,
    DTYPES_SAID,
    cache_of,
    dtype_of,
    kv_formats_of,
    memory_of,
    one_of,
    options_of,
    require_outputs,
    sampling_of,
    store_of,
    template_of,
)
from .prompts import bad_of, read, read_prefix
from .report import INTERRUPTED, TERMINATED
from .row_options import (
    MEMORY,
    OUTPUT,
    SAMPLING,
    Answer,
    ChatTemplateKwargs,
    Column,
    Empty,
    Encoding,
    Files,
    Logprobs,
    Prefix,
    Raw,
    Tokenizer,
    Tokens,
    TooLong,
)
from .rows import encoding_of, is_table
from .screen import Screen
from .shard import shard_of
from .usage import UsageError

console = Console(
    stderr=True, highlight=False, markup=False, emoji=False, soft_wrap=True, quiet=follows()
)


def generate(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A folder, or the id of a model on the hub.")
    ],
    prompts: Annotated[
        list[str] | None,
        typer.Argument(metavar="PROMPTS", help="One prompt each; or give --file, or a pipe."),
    ] = None,
    files: Files = None,
    column: Column = None,
    encoding: Encoding = None,
    empty: Empty = "error",
    too_long: TooLong = "error",
    prefix: Prefix = None,
    tokenizer: Tokenizer = None,
    raw: Raw = False,
    chat_template_kwargs: ChatTemplateKwargs = None,
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
    expert_slots: Annotated[
        int | None,
        MEMORY(
            min=0,
            metavar="N",
            help="Experts of a streamed layer that stay in memory; others are read once they are "
            "routed to. 0 reads whole layers. [dim]Default: what is sooner.[/dim]",
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
    pack_weights: Annotated[
        bool,
        MEMORY(
            "--pack-weights",
            help="On a CPU: pack weights for its products, which is quicker and takes as much "
            "memory again.",
        ),
    ] = False,
    dtype: Annotated[
        str,
        MEMORY(metavar="DTYPE", help=f"What it computes in: {DTYPES_SAID}."),
    ] = "auto",
    device: Annotated[
        str,
        MEMORY(metavar="DEVICE", help="For example cpu, cuda or cuda:1."),
    ] = "auto",
    expert_parallel: Annotated[
        bool,
        MEMORY("--expert-parallel", help="Under torchrun: share out whole experts."),
    ] = False,
    out: Annotated[
        Path | None,
        OUTPUT(
            "--out",
            "-o",
            metavar="FILE",
            help="Answers as JSON lines, each as soon as it is finished; the same command again "
            "goes on where it stopped. With .parquet, .arrow or .csv a table is made of them at "
            "the end.",
        ),
    ] = None,
    shard: Annotated[
        str | None,
        OUTPUT(
            metavar="I/N",
            help="Answer one of N shards of the prompts, the first is 0/N, into a file of its own; "
            "slurm: the one of this task in a job array.",
        ),
    ] = None,
    answer: Answer = ANSWER,
    tokens: Tokens = False,
    logprobs: Logprobs = False,
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
    with Ending() as ending, Launch() as launch:
        try:
            launch.meet()
            formats = kv_formats_of(kv_format)
            file = one_of("--file", files or [])
            piped = file == "-" or not (file or prompts)
            part = None if shard is None else shard_of(shard, out)
            if part:
                out, trace = (path and part.named(path) for path in (out, trace))
            asked = {"--answer": answer != ANSWER, "--tokens": tokens, "--logprobs": logprobs}
            launch.first(lambda: require_outputs(out, asked, trace))
            skipped, side = policy_of(empty, too_long)
            answer_name(answer)
            text_in = None if encoding is None else encoding_of(encoding)
            chosen = {
                "max_new_tokens": max_new_tokens,
                **sampling_of(temperature, top_p, samples, stop),
                **options_of(options or []),
            }
            template = template_of(chat_template_kwargs, raw)
            pages = cache_of(cache or [])
            memory = memory_of(device_memory, host_memory, max_tokens, cache, draft, expert_slots)
            number_type = dtype_of(dtype)
            launch.require_served(prefix_store, host_memory, device, expert_parallel, pages)
            store = store_of(prefix_store, prefix_store_size)
            with Screen(console) as screen:
                screen.doing("reading the prompts")
                before = launch.first(lambda: read_prefix(prefix, piped))
                found = launch.first(lambda: read(prompts or [], file, column, text_in)) or []
                if out:
                    launch.first(lambda: require_room(answer, found))
                for line in told(bad_of(found), len(found), skipped):
                    console.print(line)
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
                        "trace": trace if launch.is_first else None,
                        "prefix_store": store,
                        "pack_weights": pack_weights,
                    },
                    cache=pages,
                    memory=memory,
                    draft=draft,
                    shard=part,
                    expert_parallel=expert_parallel,
                    template=template,
                    answer=answer,
                    tokens=tokens,
                    skipped=skipped,
                    side=side,
                    tokenizer=tokenizer,
                    source=file if is_table(file) and not prompts else None,
                )
                code = carry_out(job, out, device, screen, launch)
                code = launch.ended(code, ending.terminated)
        except UsageError as error:
            console.print(f"pagedkv: {error}", style="red")
            code = error.code
        except KeyboardInterrupt:
            code = INTERRUPTED
    code = TERMINATED if ending.terminated and code == INTERRUPTED else code
    launch.leave(code)
    raise typer.Exit(code)
