"""Options of the commands that run a job over many prompts."""

from __future__ import annotations

from pathlib import Path

from .answers import ANSWER
from .option import Panel
from .options import CACHE, DTYPES_SAID
from .plan import KV_HELP, PAGE_SIZE_HELP
from .prompts import OPTIONS

PROMPTS, MEMORY, OUTPUT = map(Panel, ("Prompts", "Memory", "Output"))

# Which prompts a job has, and how they are made.
PROMPT_OPTIONS = (
    PROMPTS(
        "--file -f FILE",
        list[str] | None,
        "Prompts: a .txt has one a line; .jsonl, .json, .csv, .tsv and .parquet have them "
        f"in a column. For generate, columns {', '.join(OPTIONS)} set these options of their "
        "row. '-' is standard input.",
    ),
    PROMPTS(
        "--column NAME",
        str | None,
        "The column that holds the prompts. [dim]Default: prompt, or else messages.[/dim]",
    ),
    PROMPTS(
        "--template TEXT",
        str | None,
        "A prompt made of columns, for example '{subject}: {text}\\nLabel:'; "
        "\\n is a new line, {{ and }} are braces.",
    ),
    PROMPTS(
        "--encoding NAME",
        str | None,
        "The encoding of the file, for example cp1252. [dim]Default: UTF-8, or UTF-16 if "
        "a byte order mark says so.[/dim]",
    ),
    PROMPTS(
        "--empty HOW",
        str,
        "What an empty prompt gets in the output: a row with an error, or no row.",
        "error",
    ),
    PROMPTS(
        "--too-long HOW",
        str,
        "What a prompt gets that is longer than the model takes: error or skip as with "
        "--empty; left or right cut its text on that side until it fits.",
        "error",
    ),
    PROMPTS(
        "--prefix FILE",
        str | None,
        "A text, or chat messages in .json, that goes before every prompt.",
    ),
    PROMPTS(
        "--tokenizer NAME",
        str | None,
        "A folder or an id on the hub with the tokenizer, if the model's folder has none.",
    ),
    PROMPTS("--raw", bool, "Pass prompts to the model as they are, without its chat template."),
    PROMPTS(
        "--chat-template-kwargs JSON",
        str | None,
        "Variables of the chat template, for example '{\"enable_thinking\": false}'.",
    ),
)
# What a job computes in, and how much room it has.
MEMORY_OPTIONS = (
    MEMORY(
        "--device-memory SIZE",
        str | None,
        "Use no more than this, for example 8GiB; layers that do not fit are streamed.",
    ),
    MEMORY(
        "--host-memory SIZE",
        str | None,
        "Keep streamed layers in host memory up to this size; the rest is read from disk.",
    ),
    MEMORY(
        "--expert-slots N",
        int | None,
        "Experts of a streamed layer that stay in memory; others are read once they are "
        "routed to. 0 reads whole layers. [dim]Default: what is sooner.[/dim]",
        min=0,
    ),
    MEMORY(
        "--max-tokens N",
        int | None,
        "Room of the cache, in tokens of all prompts and answers together. "
        "[dim]Default: what the job needs.[/dim]",
        min=1,
    ),
    MEMORY("--kv-format FORMAT", str, KV_HELP, "dense"),
    MEMORY("--page-size N", int | None, PAGE_SIZE_HELP, min=1),
    MEMORY(
        "--cache NAME=VALUE",
        list[str] | None,
        f"A field of the cache, for when memory runs short: {', '.join(CACHE)}.",
    ),
    MEMORY(
        "--step-tokens N",
        int | None,
        "The most tokens computed in one step. [dim]Default: 1024; on a card up to 8192.[/dim]",
        min=1,
    ),
    MEMORY(
        "--prefix-store FOLDER",
        Path | None,
        "Keep prefixes of prompts in this folder, where later jobs find them.",
    ),
    MEMORY(
        "--prefix-store-size SIZE",
        str | None,
        "The most that its files may take; the least recently used are deleted. "
        "[dim]Default: 10GiB.[/dim]",
    ),
    MEMORY(
        "--pack-weights/--no-pack-weights",
        bool | None,
        "On a CPU: keep a second copy of the weights that is quicker to multiply with. "
        "[dim]Default: where memory is free, and none of it is planned.[/dim]",
    ),
    MEMORY(
        "--weight-format int8",
        str | None,
        "On a CPU: multiply with a second copy of the weights of 8 bits each, for answers "
        "that are only near the model's.",
    ),
    MEMORY("--dtype DTYPE", str, f"What the model computes in: {DTYPES_SAID}.", "auto"),
    MEMORY("--device DEVICE", str, "For example cpu, cuda or cuda:1.", "auto"),
    MEMORY(
        "--expert-parallel",
        bool,
        "Under torchrun: give each process whole experts, not a part of every one.",
    ),
)
# What a job writes.
OUTPUT_OPTIONS = (
    OUTPUT(
        "--out -o FILE",
        Path | None,
        "Write JSON lines, each row as soon as it is finished; the same command again "
        "goes on where it stopped. With .parquet, .arrow or .csv a table is made of them at "
        "the end.",
    ),
    OUTPUT(
        "--shard I/N",
        str | None,
        "Run one of N parts of the prompts, 0/N is the first, into a file of its own; "
        "slurm takes the part of this task of a job array.",
    ),
    OUTPUT("--answer NAME", str, "The column that answers are written to; needs --out.", ANSWER),
    OUTPUT("--tokens", bool, "Write the ids of an answer's tokens as well; needs --out."),
    OUTPUT("--logprobs", bool, "Write the log-probability of every token as well; needs --out."),
    OUTPUT(
        "--explain",
        bool,
        "At the end, name the prompts that took most computing, and why nothing was found.",
    ),
    OUTPUT("--trace FILE", Path | None, "Record what happens to every page, for `pagedkv trace`."),
)
