"""The columns of answers that a job writes, and their types in a table.

Types are fixed. If they were inferred, a column without values in one part of a job would have the
type `null`, and the parts could not be read as one table.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from .causes import LONG
from .encode import SIDES
from .errors import UsageError
from .prompts import Prompt
from .rows import in_json

ANSWER = "answer"
TYPES = {
    "index": "int64",
    "sample": "int64",
    ANSWER: "string",
    "finish_reason": "string",
    "cached_tokens": "int64",
    "error": "string",
    "cut": "int64",
    "tokens": "list<int32>",
    "logprobs": "list<float>",
}
# The command needs these in rows to go on with a file; tables leave them out.
KEY, MADE, CAUSE, SIDE = "key", "made_with", "error_cause", "cut_from"
OWN = (KEY, MADE, CAUSE, SIDE)


def types_of(answer: str, cut: bool, tokens: bool, logprobs: bool) -> dict[str, str]:
    """The types of a job's own columns by their names, in their order.

    Args:
        answer: the name of the column with the text.
        cut: whether prompts that are too long are cut; `tokens`, `logprobs`: whether to write them.
    """
    asked = {"cut": cut, "tokens": tokens, "logprobs": logprobs}
    return {
        answer if name == ANSWER else name: said
        for name, said in TYPES.items()
        if asked.get(name, True)
    }


def answer_name(name: str) -> str:
    """The name that --answer gives the column of answers."""
    taken = [each for each in (*TYPES, *OWN) if each != ANSWER]
    if not name or name in taken:
        raise UsageError(f"--answer: expected a name other than {', '.join(taken)}, got {name!r}")
    return name


def require_room(answer: str, prompts: Iterable[Prompt]) -> None:
    """Raises if answers would take the place of a column of the prompts."""
    if any(answer in prompt.columns for prompt in prompts):
        raise UsageError(
            f"--answer: the prompts have a column {answer!r} already; --answer NAME calls the "
            "answers something else"
        )


def left_out(types: Iterable[str], prompts: Iterable[Prompt]) -> list[str]:
    """Returns the prompts' columns that rows leave out: a job's own column has the same name."""
    found = {name for prompt in prompts for name in prompt.columns}
    return [name for name in (*types, *OWN) if name in found]


def row_of(types: dict[str, str], prompt: Prompt, values: dict[str, Any]) -> dict[str, Any]:
    """A row of the output: the columns of a prompt, and then a job's own."""
    row = prompt.columns
    for name in (*types, *OWN):
        row.pop(name, None)
    row |= {name: in_json(values.get(name)) for name in types}
    hidden = {CAUSE: prompt.cause, SIDE: prompt.cut and values.get(SIDE)}
    return row | {name: value for name, value in hidden.items() if value}


def refused_row(types: dict[str, str], prompt: Prompt, index: int, sample: int) -> dict[str, Any]:
    """The row of a bad prompt: it has an error in place of an answer."""
    values = {"index": index, "sample": sample, "finish_reason": "error", "cached_tokens": 0}
    return row_of(types, prompt, {**values, "error": prompt.error})


def policy_of(empty: str, too_long: str) -> tuple[frozenset[str], str | None]:
    """Returns the causes that --empty and --too-long skip, and the side that is cut, if one is."""
    for option, given, known in (
        ("--empty", empty, ("error", "skip")),
        ("--too-long", too_long, ("error", "skip", *SIDES)),
    ):
        if given not in known:
            raise UsageError(f"{option}: expected {', '.join(known)}, got {given}")
    skipped = {"empty": empty, LONG: too_long}
    causes = frozenset(cause for cause, given in skipped.items() if given == "skip")
    return causes, too_long if too_long in SIDES else None
