"""Options of the commands that run a job over many prompts."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from .options import CACHE, DTYPES_SAID
from .prompts import OPTIONS

# An option of each panel of the help.
PROMPTS, SAMPLING, LABELS, MEMORY, OUTPUT = (
    partial(typer.Option, rich_help_panel=name)
    for name in ("Prompts", "Sampling", "Labels", "Memory", "Output")
)

Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="A folder, or the id of a model on the hub.")
]
Files = Annotated[
    list[str] | None,
    PROMPTS(
        "--file",
        "-f",
        metavar="FILE",
        help="Prompts: .txt has one a line; .jsonl, .json, .csv, .tsv and .parquet have them "
        f"in a column; for generate, {', '.join(OPTIONS)} may be in others. '-': standard input.",
    ),
]
Column = Annotated[
    str | None,
    PROMPTS(
        metavar="NAME",
        help="The column that holds the prompts. [dim]Default: prompt, or else messages.[/dim]",
    ),
]
TemplateText = Annotated[
    str | None,
    PROMPTS(
        "--template",
        metavar="TEXT",
        help="A prompt made of columns, for example 'Subject: {subject}\\n{text}\\nLabel:'; "
        "\\n is a new line, {{ and }} are braces.",
    ),
]
Encoding = Annotated[
    str | None,
    PROMPTS(
        metavar="NAME",
        help="What the text of the file is in, for example cp1252. [dim]Default: UTF-8, or UTF-16 "
        "with a byte order mark.[/dim]",
    ),
]
Empty = Annotated[
    str,
    PROMPTS(
        metavar="error|skip",
        help="What a row with an empty prompt gets: an error, or no row at all in the output.",
    ),
]
TooLong = Annotated[
    str,
    PROMPTS(
        metavar="error|skip|left|right",
        help="The same for a prompt that is longer than the model takes; left and right cut as "
        "much of its text off there as is needed.",
    ),
]
Prefix = Annotated[
    str | None,
    PROMPTS(
        metavar="FILE", help="A text, or chat messages in .json, that goes before every prompt."
    ),
]
Tokenizer = Annotated[
    str | None,
    PROMPTS(
        metavar="NAME",
        help="A folder or an id on the hub with the tokenizer, if it does not lie in the model's.",
    ),
]
Raw = Annotated[
    bool,
    PROMPTS("--raw", help="Pass prompts to the model as they are, without its chat template."),
]
ChatTemplateKwargs = Annotated[
    str | None,
    PROMPTS(
        metavar="JSON",
        help="What the chat template is told, for example '{\"enable_thinking\": false}'.",
    ),
]
DeviceMemory = Annotated[
    str | None,
    MEMORY(
        metavar="SIZE",
        help="Use no more than this, for example 8GiB; layers that do not fit are streamed.",
    ),
]
HostMemory = Annotated[
    str | None,
    MEMORY(
        metavar="SIZE",
        help="Keep as much of the streamed layers in host memory, and read the rest from disk.",
    ),
]
ExpertSlots = Annotated[
    int | None,
    MEMORY(
        min=0,
        metavar="N",
        help="Experts of a streamed layer that stay in memory; others are read once they are "
        "routed to. 0 reads whole layers. [dim]Default: what is sooner.[/dim]",
    ),
]
MaxTokens = Annotated[
    int | None,
    MEMORY(
        min=1,
        metavar="N",
        help="Room of the cache, in tokens of all rows together. "
        "[dim]Default: what the job needs.[/dim]",
    ),
]
KVFormat = Annotated[
    str,
    MEMORY(
        metavar="FORMAT",
        help="How keys and values are stored: dense (as computed), fp8, int8 or int4; two with "
        "a comma between them are for keys and for values.",
    ),
]
PageSize = Annotated[
    int | None,
    MEMORY(min=1, metavar="N", help="Tokens in a page. [dim]Default: 16, or 32 with int4.[/dim]"),
]
Cache = Annotated[
    list[str] | None,
    MEMORY(
        metavar="NAME=VALUE",
        help=f"A field of the cache, for when memory runs short: {', '.join(CACHE)}.",
    ),
]
StepTokens = Annotated[
    int | None,
    MEMORY(
        min=1,
        metavar="N",
        help="The most tokens computed in one step. [dim]Default: 1024.[/dim]",
    ),
]
PrefixStoreFolder = Annotated[
    Path | None,
    MEMORY(
        metavar="FOLDER",
        help="Prefixes of prompts that outlast the job: found there, and left there.",
    ),
]
PrefixStoreSize = Annotated[
    str | None,
    MEMORY(
        metavar="SIZE",
        help="The most bytes of its files; the least recently used go. [dim]Default: 10GiB.[/dim]",
    ),
]
PackWeights = Annotated[
    bool,
    MEMORY(
        "--pack-weights",
        help="On a CPU: pack weights for its products, which is quicker and takes as much "
        "memory again.",
    ),
]
DType = Annotated[
    str,
    MEMORY(metavar="DTYPE", help=f"What it computes in: {DTYPES_SAID}."),
]
Device = Annotated[
    str,
    MEMORY(metavar="DEVICE", help="For example cpu, cuda or cuda:1."),
]
ExpertParallel = Annotated[
    bool,
    MEMORY("--expert-parallel", help="Under torchrun: share out whole experts."),
]
Out = Annotated[
    Path | None,
    OUTPUT(
        "--out",
        "-o",
        metavar="FILE",
        help="Rows as JSON lines, each as soon as it is finished; the same command again "
        "goes on where it stopped. With .parquet, .arrow or .csv a table is made of them "
        "at the end.",
    ),
]
ShardName = Annotated[
    str | None,
    OUTPUT(
        metavar="I/N",
        help="Run one of N shards of the prompts, the first is 0/N, into a file of its own; "
        "slurm: the one of this task in a job array.",
    ),
]
Answer = Annotated[
    str, OUTPUT(metavar="NAME", help="The column that answers are written to; needs --out.")
]
Tokens = Annotated[
    bool, OUTPUT("--tokens", help="Write the ids of an answer's tokens as well; needs --out.")
]
Logprobs = Annotated[
    bool,
    OUTPUT("--logprobs", help="Write the log-probability of every token as well; needs --out."),
]
Trace = Annotated[
    Path | None,
    OUTPUT(metavar="FILE", help="Record what happens to every page, for `pagedkv trace`."),
]
