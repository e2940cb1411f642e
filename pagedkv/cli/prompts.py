"""Prompts of a batch job: arguments, rows of a file, standard input."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pagedkv.names import meant

from .causes import EMPTY, ENCODING, KIND
from .errors import UsageError
from .rows import is_read, refuse_without_columns, rows_of, strict_json
from .template import FILLED, Template
from .text_files import UNDECODED, text_of, undecoded

# Options that a row may have: types, least value, a bound above all values, the same in words.
OPTIONS: dict[str, tuple[Any, int, float, str]] = {
    "max_new_tokens": (int, 1, 2**62, "a positive integer below 2**62"),
    "temperature": ((int, float), 0, sys.float_info.max, "a number from 0 on"),
    "seed": (int, 0, 2**62, "an integer from 0 on, below 2**62"),
}
COLUMNS = ("prompt", "messages")  # the first that a row has is its prompt


@dataclass
class Prompt:
    """One prompt of a job.

    Attributes:
        content: text, or a list of chat messages; anything in a row with an error.
        options: the `OPTIONS` its row gave.
        others: the other columns of its row, handed through to the output.
        ids: `[n]`, set by `encode`.
        cause: why it is a bad prompt, one of `causes`; None for a good one.
        error: the same in words, for its row.
        cut: tokens that were cut off, because the model does not take as many.
        name: the column that it was in; `prompt` for a template; None if rows leave it out.
        at: how many of `others` stand before that column.
        place: where the row is, for messages.
    """

    content: Any
    options: dict[str, Any] = field(default_factory=dict)
    others: dict[str, Any] = field(default_factory=dict)
    ids: list[int] = field(default_factory=list)
    cause: str | None = None
    error: str | None = field(default=None, compare=False)
    cut: int | None = None
    name: str | None = field(default=COLUMNS[0], compare=False)
    at: int = field(default=sys.maxsize, compare=False)
    place: str = field(default="", compare=False)

    def refuse(self, cause: str, error: str) -> None:
        """Marks the prompt as bad: its row gets an error in place of an answer."""
        self.cause, self.error = cause, error

    @property
    def columns(self) -> dict[str, Any]:
        """The columns of its row, as rows of the output have them."""
        found = [*self.others.items()]
        if self.name is not None:
            found.insert(self.at, (self.name, self.content))
        return dict(found)


def read(
    arguments: Sequence[str],
    file: str | None,
    column: str | None = None,
    encoding: str | None = None,
    template: Template | None = None,
    options: Collection[str] = OPTIONS,
) -> list[Prompt]:
    """Reads prompts from arguments and a file; `-`, or neither of them, means standard input.

    Args:
        column: name of the field, or of a table's column, that holds the prompts; without one
            `prompt`, or else `messages`.
        encoding: how a text file is encoded; without one UTF-8, or UTF-16 with a byte order mark.
        template: makes prompts of several columns, if no single column holds them.
        options: the `OPTIONS` that a row may have.

    Raises:
        UsageError: there is no good prompt, or an option is wrong. Bad prompts beside good ones
            only get an `error`.
    """
    found = [_from_argument(text, i) for i, text in enumerate(arguments)]
    if file is None and not found and sys.stdin and not sys.stdin.isatty():
        file = "-"
    if column is not None and file is None:
        raise UsageError("--column: expected with --file, whose rows have it")
    if encoding is not None and file is None:
        raise UsageError("--encoding: expected with --file, whose text is in it")
    if template is not None and (file is None or arguments or column is not None):
        raise UsageError(
            "--template: expected with --file, whose columns it names, and no other prompts"
        )
    if file is not None:
        names = template.names if template else [column] if column else COLUMNS
        given = rows_of(file, names, options, encoding)
        if template:
            rows, names = template.filled(given), [FILLED]
        else:
            rows = [(place, _as_row(row, place, column)) for place, row in given]
            _require_column(rows, names)
        found += [_from_row(row, place, names, encoding, options) for place, row in rows]
    if not found and file in (None, "-"):
        raise UsageError("no prompts: give them as arguments, with --file, or on standard input")
    if not found:
        raise UsageError(f"--file: there are no prompts in {file}")
    require_any(found)
    return found


def bad_of(prompts: Iterable[Prompt]) -> list[tuple[str, str]]:
    """Returns the cause and the place of each bad prompt."""
    return [(prompt.cause, prompt.place) for prompt in prompts if prompt.cause]


def require_any(prompts: Sequence[Prompt]) -> None:
    """Raises UsageError if all prompts are bad, and says what is wrong with the first."""
    if all(prompt.cause for prompt in prompts):
        raise UsageError(f"{prompts[0].place}: {prompts[0].error}")


def _from_argument(text: str, index: int) -> Prompt:
    if not text:
        raise UsageError(f"prompt {index}: expected a text, got none")
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise UsageError(f"prompt {index}: expected text in UTF-8, got {text!r}")
    if is_read(text) and os.path.isfile(text):
        raise UsageError(f"prompt {index}: {text} is a file; --file {text} takes its prompts")
    return Prompt(text, place=f"prompt {index}")


def _as_row(row: Any, place: str, column: str | None) -> dict[str, Any]:
    if isinstance(row, dict):
        return row
    if column is not None:
        refuse_without_columns("--column", place)
    return {COLUMNS[0]: row}


def _require_column(rows: list[tuple[str, dict[str, Any]]], names: Sequence[str]) -> None:
    """Raises if no row has a column with a prompt."""
    if not rows or any(name in row for _, row in rows for name in names):
        return
    place, row = rows[0]
    if {"custom_id", "body"} <= row.keys():
        raise UsageError(
            f"{place}: is a line of OpenAI's batch format; this makes rows of these lines: "
            "jq -c '{custom_id, messages: .body.messages, max_new_tokens: .body.max_tokens}'"
        )
    near = meant(names[0], row, before="--column ")
    raise UsageError(
        f"{place}: {_expected(names[0])} the columns {', '.join(row) or 'none'}"[:300]
        + (near or "; --column NAME says which has the prompts")
    )


def _from_row(
    row: dict[str, Any],
    place: str,
    names: Sequence[str],
    encoding: str | None,
    allowed: Collection[str],
) -> Prompt:
    text = json.dumps(row, ensure_ascii=False)
    byte = UNDECODED.search(text)
    if byte:
        row = json.loads(UNDECODED.sub("\ufffd", text))
    name = next((each for each in names if each in row), names[0])
    columns, is_there = ", ".join(row), name in row
    given = {each: row.pop(each) for each in allowed if each in row and each != name}
    at = [*row].index(name) if is_there else sys.maxsize
    content = row.pop(name, None)
    name = COLUMNS[0] if name == FILLED else name
    options = {each: value for each, value in given.items() if value is not None}
    for each, value in options.items():
        options[each] = _checked(each, value, place)
    prompt = Prompt(content, options, row, name=name, at=at, place=place)
    if byte:
        prompt.refuse(ENCODING, undecoded(byte, encoding))
    elif not is_there:
        prompt.refuse(EMPTY, f"{_expected(name)} the columns {columns or 'none'}"[:300])
    elif content is None or (isinstance(content, str) and not content.strip()):
        prompt.refuse(EMPTY, f"{_expected(name)} {content!r}")
    elif isinstance(content, list):
        if wrong := _what_is_wrong(content):
            prompt.refuse(KIND, wrong)
    elif not isinstance(content, str):
        prompt.refuse(KIND, f"{_expected(name)} {content!r:.200}")
    return prompt


def _expected(name: str) -> str:
    return f"expected a text or chat messages in {name!r}, got"


def _checked(name: str, value: Any, place: str) -> Any:
    """Checks the value of a row's option; tables with gaps have integers as floats."""
    kind, least, below, expected = OPTIONS[name]
    if kind is int and isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, kind) or not least <= value < below:
        raise UsageError(f"{place}: {name}: expected {expected}, got {value!r:.80}")
    return value


def read_prefix(file: str | None, piped: bool = False) -> Any:
    """The prefix of every prompt: the text of a file, or the chat messages of a `.json` file.

    Args:
        piped: whether standard input has the prompts.
    """
    if file is None:
        return None
    if file == "-" and piped:
        raise UsageError("--prefix: expected a file, standard input has the prompts")
    text = text_of(file, "--prefix")
    if byte := UNDECODED.search(text):
        said = undecoded(byte).partition(";")[0]
        raise UsageError(f"--prefix: cannot read {file}: {said}")
    if Path(file).suffix.lower() != ".json":
        return text
    try:
        messages = strict_json(text)
    except ValueError as error:
        raise UsageError(f"--prefix: cannot read {file}: {error}") from error
    if wrong := _what_is_wrong(messages):
        raise UsageError(f"{file}: {wrong}")
    return messages


def _what_is_wrong(messages: Any) -> str | None:
    """Says why a value is no list of chat messages of text; None if it is one."""
    shape = isinstance(messages, list) and all(
        isinstance(m, dict) and {"role", "content"} <= m.keys() for m in messages
    )
    if not shape or not messages:
        return "expected chat messages, objects with 'role' and 'content'"
    contents = [m["content"] for m in messages if isinstance(m["content"], list)]
    parts = [part for content in contents for part in content if isinstance(part, dict)]
    for kind in (str(part.get("type")) for part in parts):
        if any(seen in kind for seen in ("image", "video", "audio")):  # a template would drop it
            return f"expected messages of text, got {kind!r}; BatchGenerator takes images and audio"
    return None
