"""`pagedkv score`: labels, or what the model says of texts, for every row of a table."""

from __future__ import annotations

from typing import Annotated

import typer

from .answers import policy_of
from .causes import told
from .command import console, running
from .job_options import (
    LABELS,
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
    Trace,
)
from .options import (
    cache_of,
    dtype_of,
    kv_formats_of,
    memory_of,
    one_of,
    require_outputs,
    store_of,
    template_of,
)
from .prompts import Prompt, bad_of, read, read_prefix
from .rows import encoding_of, is_table
from .scoring import LABEL, Scoring, choices_of
from .screen import Screen
from .shard import shard_of
from .template import Template
from .usage import UsageError


def score(
    model: Model,
    prompts: Annotated[
        list[str] | None,
        typer.Argument(metavar="TEXTS", help="One text each; or give --file, or a pipe."),
    ] = None,
    files: Files = None,
    column: Column = None,
    template: TemplateText = None,
    encoding: Encoding = None,
    empty: Empty = "error",
    prefix: Prefix = None,
    tokenizer: Tokenizer = None,
    raw: Raw = False,
    chat_template_kwargs: ChatTemplateKwargs = None,
    choices: Annotated[
        str | None,
        LABELS(
            metavar="A,B,C",
            help="What may come behind a prompt: the likeliest is its label. @FILE has one a line. "
            "[dim]Without: the log-probability and the perplexity of the texts themselves.[/dim]",
        ),
    ] = None,
    normalize: Annotated[
        bool,
        LABELS(
            "--normalize",
            help="Compare choices by the mean log-probability of a token, for choices of different "
            "length. [dim]Default: by the sum.[/dim]",
        ),
    ] = False,
    label: Annotated[
        str, LABELS(metavar="NAME", help="The column that labels are written to.")
    ] = LABEL,
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
    trace: Trace = None,
) -> None:
    r"""Label the rows of a table, or say how likely a model finds texts.

    Rows go to a file, or as JSON lines to standard output. For example:

    pagedkv score MODEL --file tickets.csv --template 'Ticket: {text}\nTopic:'
    --choices billing,login,other --out labels.parquet

    pagedkv score MODEL "Snow is white." "Green snow whites."
    """
    with running() as command:
        launch = command.launch
        formats = kv_formats_of(kv_format)
        file = one_of("--file", files or [])
        piped = file == "-" or not (file or prompts)
        part = None if shard is None else shard_of(shard, out)
        if part:
            out, trace = (path and part.named(path) for path in (out, trace))
        launch.first(lambda: require_outputs(out, {}, trace))
        skipped, _ = policy_of(empty, "error")
        text_in = None if encoding is None else encoding_of(encoding)
        wording = None if template is None else Template(template)
        asked = launch.share(launch.first(lambda: choices_of(choices))) or ()
        if choices is None and (normalize or label != LABEL):
            option = "--normalize" if normalize else "--label"
            raise UsageError(f"{option}: expected with --choices")
        chat = template_of(chat_template_kwargs, raw)
        pages = cache_of(cache or [])
        memory = memory_of(device_memory, host_memory, max_tokens, cache, None, expert_slots)
        number_type = dtype_of(dtype)
        launch.require_served(prefix_store, host_memory, device, expert_parallel, pages)
        store = store_of(prefix_store, prefix_store_size)
        scoring = Scoring(asked, normalize, label)

        def found() -> tuple[object, list[Prompt]]:
            before = read_prefix(prefix, piped)
            texts = read(prompts or [], file, column, text_in, wording, options=())
            if wording:
                for text in texts:
                    text.name = None  # the columns that it is made of say it
            scoring.require_room(texts)
            if not asked:
                _require_texts(before, texts)
            return before, texts

        with Screen(console) as screen:
            screen.doing("reading the prompts")
            before, texts = launch.first(found) or (None, [])
            for line in told(bad_of(texts), len(texts), skipped):
                console.print(line)
            from .request import Job
            from .resume import carry_out

            job = Job(
                model=model,
                prompts=texts,
                prefix=before,
                raw=raw or not asked,
                samples=1,
                options={},
                seed=None,
                logprobs=False,
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
                shard=part,
                expert_parallel=expert_parallel,
                template=chat,
                wording=template,
                scoring=scoring,
                skipped=skipped,
                tokenizer=tokenizer,
                source=file if is_table(file) and not prompts else None,
            )
            command.code = carry_out(job, out, device, screen, launch)


def _require_texts(prefix: object, prompts: list[Prompt]) -> None:
    """Raises where there are chat messages, which can only be scored behind."""
    if isinstance(prefix, list):
        raise UsageError("--prefix: expected a text without --choices, got chat messages")
    for i, prompt in enumerate(prompts):
        if not prompt.cause and not isinstance(prompt.content, str):
            raise UsageError(
                f"prompt {i}: expected a text without --choices, got chat messages; choices are "
                "scored as answers to them"
            )
