"""Options of the commands that run a job over many prompts."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from .options import CACHE, DTYPES_SAID
from .plan import KV_HELP
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
        help="Prompts: a .txt has one a line; .jsonl, .json, .csv, .tsv and .parquet have them in "
        f"a column. For generate, columns {', '.join(OPTIONS)} set these options of their row. "
        "'-' is standard input.",
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
        help="A prompt made of columns, for example '{subject}: {text}\\nLabel:'; "
        "\\n is a new line, {{ and }} are braces.",
    ),
]
Encoding = Annotated[
    str | None,
    PROMPTS(
        metavar="NAME",
        help="The encoding of the file, for example cp1252. [dim]Default: UTF-8, or UTF-16 if a "
        "byte order mark says so.[/dim]",
    ),
]
Empty = Annotated[
    str,
    PROMPTS(
        metavar="HOW",
        help="What an empty prompt gets in the output: a row with an error, or no row.",
    ),
]
TooLong = Annotated[
    str,
    PROMPTS(
        metavar="HOW",
        help="What a prompt gets that is longer than the model takes: error or skip as with "
        "--empty; left or right cut its text on that side until it fits.",
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
        help="A folder or an id on the hub with the tokenizer, if the model's folder has none.",
    ),
]
Raw = Annotated[
    bool,
    PROMPTS(
        "--raw",
        metavar="",
        help="Pass prompts to the model as they are, without its chat template.",
    ),
]
ChatTemplateKwargs = Annotated[
    str | None,
    PROMPTS(
        metavar="JSON",
        help="Variables of the chat template, for example '{\"enable_thinking\": false}'.",
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
        help="Keep streamed layers in host memory up to this size; the rest is read from disk.",
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
        help="Room of the cache, in tokens of all prompts and answers together. "
        "[dim]Default: what the job needs.[/dim]",
    ),
]
KVFormat = Annotated[
    str,
    MEMORY(
        metavar="FORMAT",
        help=KV_HELP,
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
        help="Keep prefixes of prompts in this folder, where later jobs find them.",
    ),
]
PrefixStoreSize = Annotated[
    str | None,
    MEMORY(
        metavar="SIZE",
        help="The most that its files may take; the least recently used are deleted. "
        "[dim]Default: 10GiB.[/dim]",
    ),
]
PackWeights = Annotated[
    bool | None,
    MEMORY(
        "--pack-weights/--no-pack-weights",
        metavar="",
        help="On a CPU: keep a second copy of the weights that is quicker to multiply with. "
        "[dim]Default: where memory is free, and none of it is planned.[/dim]",
    ),
]
DType = Annotated[
    str,
    MEMORY(metavar="DTYPE", help=f"What the model computes in: {DTYPES_SAID}."),
]
Device = Annotated[
    str,
    MEMORY(metavar="DEVICE", help="For example cpu, cuda or cuda:1."),
]
ExpertParallel = Annotated[
    bool,
    MEMORY(
        "--expert-parallel",
        metavar="",
        help="Under torchrun: give each process whole experts, not a part of every one.",
    ),
]
Out = Annotated[
    Path | None,
    OUTPUT(
        "--out",
        "-o",
        metavar="FILE",
        help="Write JSON lines, each row as soon as it is finished; the same command again goes on "
        "where it stopped. With .parquet, .arrow or .csv a table is made of them at the end.",
    ),
]
ShardName = Annotated[
    str | None,
    OUTPUT(
        metavar="I/N",
        help="Run one of N parts of the prompts, 0/N is the first, into a file of its own; slurm "
        "takes the part of this task of a job array.",
    ),
]
Answer = Annotated[
    str, OUTPUT(metavar="NAME", help="The column that answers are written to; needs --out.")
]
Tokens = Annotated[
    bool,
    OUTPUT(
        "--tokens", metavar="", help="Write the ids of an answer's tokens as well; needs --out."
    ),
]
Logprobs = Annotated[
    bool,
    OUTPUT(
        "--logprobs",
        metavar="",
        help="Write the log-probability of every token as well; needs --out.",
    ),
]
Explain = Annotated[
    bool,
    OUTPUT(
        "--explain",
        metavar="",
        help="Say in the end of which prompts the most was computed, and why it was not found.",
    ),
]
Trace = Annotated[
    Path | None,
    OUTPUT(metavar="FILE", help="Record what happens to every page, for `pagedkv trace`."),
]
