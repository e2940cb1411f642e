"""`pagedkv generate`: its options, and what they make a job of.

Texts go to standard output, everything else to standard error.
"""

from __future__ import annotations

from typing import Annotated

import typer

from .answers import ANSWER, answer_name, policy_of, require_room
from .causes import told
from .command import console, running
from .job_options import (
    MEMORY,
    SAMPLING,
    Answer,
    Cache,
    ChatTemplateKwargs,
    Column,
    Device,
    DeviceMemory,
    DType,
    Empty,
    Encoding,
    ExpertParallel,
    ExpertSlots,
    Files,
    HostMemory,
    KVFormat,
    Logprobs,
    MaxTokens,
    Model,
    Out,
    PackWeights,
    PageSize,
    Prefix,
    PrefixStoreFolder,
    PrefixStoreSize,
    Raw,
    ShardName,
    StepTokens,
    TemplateText,
    Tokenizer,
    Tokens,
    TooLong,
    Trace,
)
from .options import (
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
from .rows import encoding_of, is_table
from .screen import Screen
from .shard import shard_of
from .template import Template


def generate(
    model: Model,
    prompts: Annotated[
        list[str] | None,
        typer.Argument(metavar="PROMPTS", help="One prompt each; or give --file, or a pipe."),
    ] = None,
    files: Files = None,
    column: Column = None,
    template: TemplateText = None,
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
    device_memory: DeviceMemory = None,
    host_memory: HostMemory = None,
    expert_slots: ExpertSlots = None,
    max_tokens: MaxTokens = None,
    kv_format: KVFormat = "dense",
    page_size: PageSize = None,
    cache: Cache = None,
    step_tokens: StepTokens = None,
    prefix_store: PrefixStoreFolder = None,
    prefix_store_size: PrefixStoreSize = None,
    pack_weights: PackWeights = False,
    dtype: DType = "auto",
    device: Device = "auto",
    expert_parallel: ExpertParallel = False,
    out: Out = None,
    shard: ShardName = None,
    answer: Answer = ANSWER,
    tokens: Tokens = False,
    logprobs: Logprobs = False,
    trace: Trace = None,
) -> None:
    """Generate answers to many prompts at once, as text on standard output or as rows in a file.

    For example:

    pagedkv generate MODEL "Why is the sky blue?" "Why does ice float?"

    pagedkv generate MODEL --file prompts.csv --column question --out answers.jsonl
    """
    with running() as command:
        launch = command.launch
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
        wording = None if template is None else Template(template)
        chat = template_of(chat_template_kwargs, raw)
        pages = cache_of(cache or [])
        memory = memory_of(device_memory, host_memory, max_tokens, cache, draft, expert_slots)
        number_type = dtype_of(dtype)
        launch.require_served(prefix_store, host_memory, device, expert_parallel, pages)
        store = store_of(prefix_store, prefix_store_size)
        with Screen(console) as screen:
            screen.doing("reading the prompts")
            before = launch.first(lambda: read_prefix(prefix, piped))
            found = launch.first(lambda: read(prompts or [], file, column, text_in, wording)) or []
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
                template=chat,
                wording=template,
                answer=answer,
                tokens=tokens,
                skipped=skipped,
                side=side,
                tokenizer=tokenizer,
                source=file if is_table(file) and not prompts else None,
            )
            command.code = carry_out(job, out, device, screen, launch)
