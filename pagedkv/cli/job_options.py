"""Options of the commands that run a job over many prompts."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import typer

from .answers import ANSWER
from .option import Option
from .options import CACHE, DTYPES_SAID
from .plan import KV_HELP
from .prompts import OPTIONS

# An option of each panel of the help.
PROMPTS, MEMORY, OUTPUT = (
    partial(typer.Option, rich_help_panel=name) for name in ("Prompts", "Memory", "Output")
)

# Which prompts a job has, and how they are made.
PROMPT_OPTIONS = (
    Option(
        "files",
        list[str] | None,
        PROMPTS(
            "--file",
            "-f",
            metavar="FILE",
            help="Prompts: a .txt has one a line; .jsonl, .json, .csv, .tsv and .parquet have them "
            f"in a column. For generate, columns {', '.join(OPTIONS)} set these options of their "
            "row. '-' is standard input.",
        ),
    ),
    Option(
        "column",
        str | None,
        PROMPTS(
            metavar="NAME",
            help="The column that holds the prompts. [dim]Default: prompt, or else messages.[/dim]",
        ),
    ),
    Option(
        "template",
        str | None,
        PROMPTS(
            "--template",
            metavar="TEXT",
            help="A prompt made of columns, for example '{subject}: {text}\\nLabel:'; "
            "\\n is a new line, {{ and }} are braces.",
        ),
    ),
    Option(
        "encoding",
        str | None,
        PROMPTS(
            metavar="NAME",
            help="The encoding of the file, for example cp1252. [dim]Default: UTF-8, or UTF-16 if "
            "a byte order mark says so.[/dim]",
        ),
    ),
    Option(
        "empty",
        str,
        PROMPTS(
            metavar="HOW",
            help="What an empty prompt gets in the output: a row with an error, or no row.",
        ),
        "error",
    ),
    Option(
        "too_long",
        str,
        PROMPTS(
            metavar="HOW",
            help="What a prompt gets that is longer than the model takes: error or skip as with "
            "--empty; left or right cut its text on that side until it fits.",
        ),
        "error",
    ),
    Option(
        "prefix",
        str | None,
        PROMPTS(
            metavar="FILE", help="A text, or chat messages in .json, that goes before every prompt."
        ),
    ),
    Option(
        "tokenizer",
        str | None,
        PROMPTS(
            metavar="NAME",
            help="A folder or an id on the hub with the tokenizer, if the model's folder has none.",
        ),
    ),
    Option(
        "raw",
        bool,
        PROMPTS(
            "--raw",
            metavar="",
            help="Pass prompts to the model as they are, without its chat template.",
        ),
        False,
    ),
    Option(
        "chat_template_kwargs",
        str | None,
        PROMPTS(
            metavar="JSON",
            help="Variables of the chat template, for example '{\"enable_thinking\": false}'.",
        ),
    ),
)
# What a job computes in, and how much room it has.
MEMORY_OPTIONS = (
    Option(
        "device_memory",
        str | None,
        MEMORY(
            metavar="SIZE",
            help="Use no more than this, for example 8GiB; layers that do not fit are streamed.",
        ),
    ),
    Option(
        "host_memory",
        str | None,
        MEMORY(
            metavar="SIZE",
            help="Keep streamed layers in host memory up to this size; the rest is read from disk.",
        ),
    ),
    Option(
        "expert_slots",
        int | None,
        MEMORY(
            min=0,
            metavar="N",
            help="Experts of a streamed layer that stay in memory; others are read once they are "
            "routed to. 0 reads whole layers. [dim]Default: what is sooner.[/dim]",
        ),
    ),
    Option(
        "max_tokens",
        int | None,
        MEMORY(
            min=1,
            metavar="N",
            help="Room of the cache, in tokens of all prompts and answers together. "
            "[dim]Default: what the job needs.[/dim]",
        ),
    ),
    Option(
        "kv_format",
        str,
        MEMORY(
            metavar="FORMAT",
            help=KV_HELP,
        ),
        "dense",
    ),
    Option(
        "page_size",
        int | None,
        MEMORY(
            min=1, metavar="N", help="Tokens in a page. [dim]Default: 16, or 32 with int4.[/dim]"
        ),
    ),
    Option(
        "cache",
        list[str] | None,
        MEMORY(
            metavar="NAME=VALUE",
            help=f"A field of the cache, for when memory runs short: {', '.join(CACHE)}.",
        ),
    ),
    Option(
        "step_tokens",
        int | None,
        MEMORY(
            min=1,
            metavar="N",
            help="The most tokens computed in one step. [dim]Default: 1024.[/dim]",
        ),
    ),
    Option(
        "prefix_store",
        Path | None,
        MEMORY(
            metavar="FOLDER",
            help="Keep prefixes of prompts in this folder, where later jobs find them.",
        ),
    ),
    Option(
        "prefix_store_size",
        str | None,
        MEMORY(
            metavar="SIZE",
            help="The most that its files may take; the least recently used are deleted. "
            "[dim]Default: 10GiB.[/dim]",
        ),
    ),
    Option(
        "pack_weights",
        bool | None,
        MEMORY(
            "--pack-weights/--no-pack-weights",
            metavar="",
            help="On a CPU: keep a second copy of the weights that is quicker to multiply with. "
            "[dim]Default: where memory is free, and none of it is planned.[/dim]",
        ),
    ),
    Option(
        "weight_format",
        str | None,
        MEMORY(
            metavar="int8",
            help="On a CPU: multiply with a second copy of the weights of 8 bits each, for answers "
            "that are only near the model's.",
        ),
    ),
    Option(
        "dtype",
        str,
        MEMORY(metavar="DTYPE", help=f"What the model computes in: {DTYPES_SAID}."),
        "auto",
    ),
    Option(
        "device", str, MEMORY(metavar="DEVICE", help="For example cpu, cuda or cuda:1."), "auto"
    ),
    Option(
        "expert_parallel",
        bool,
        MEMORY(
            "--expert-parallel",
            metavar="",
            help="Under torchrun: give each process whole experts, not a part of every one.",
        ),
        False,
    ),
)
# What a job writes.
OUTPUT_OPTIONS = (
    Option(
        "out",
        Path | None,
        OUTPUT(
            "--out",
            "-o",
            metavar="FILE",
            help="Write JSON lines, each row as soon as it is finished; the same command again "
            "goes on where it stopped. With .parquet, .arrow or .csv a table is made of them at "
            "the end.",
        ),
    ),
    Option(
        "shard",
        str | None,
        OUTPUT(
            metavar="I/N",
            help="Run one of N parts of the prompts, 0/N is the first, into a file of its own; "
            "slurm takes the part of this task of a job array.",
        ),
    ),
    Option(
        "answer",
        str,
        OUTPUT(metavar="NAME", help="The column that answers are written to; needs --out."),
        ANSWER,
    ),
    Option(
        "tokens",
        bool,
        OUTPUT(
            "--tokens", metavar="", help="Write the ids of an answer's tokens as well; needs --out."
        ),
        False,
    ),
    Option(
        "logprobs",
        bool,
        OUTPUT(
            "--logprobs",
            metavar="",
            help="Write the log-probability of every token as well; needs --out.",
        ),
        False,
    ),
    Option(
        "explain",
        bool,
        OUTPUT(
            "--explain",
            metavar="",
            help="Say in the end of which prompts the most was computed, and why it was not found.",
        ),
        False,
    ),
    Option(
        "trace",
        Path | None,
        OUTPUT(metavar="FILE", help="Record what happens to every page, for `pagedkv trace`."),
    ),
)
