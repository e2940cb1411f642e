"""Options of `pagedkv generate` that say what its rows are: prompts that come, columns that go."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from .prompts import OPTIONS

# An option of each panel of the help.
PROMPTS, SAMPLING, MEMORY, OUTPUT = (
    partial(typer.Option, rich_help_panel=name)
    for name in ("Prompts", "Sampling", "Memory", "Output")
)

Files = Annotated[
    list[str] | None,
    PROMPTS(
        "--file",
        "-f",
        metavar="FILE",
        help="Prompts: .txt has one a line; .jsonl, .json, .csv, .tsv and .parquet have them "
        f"in a column, and may have {', '.join(OPTIONS)} in others. '-': standard input.",
    ),
]
Column = Annotated[
    str | None,
    PROMPTS(
        metavar="NAME",
        help="The column that holds the prompts. [dim]Default: prompt, or else messages.[/dim]",
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
        help="What a row with an empty prompt gets: an error in place of an answer, or no row at "
        "all in the output.",
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
