"""Prompts of a batch job: arguments, rows of a file, standard input; and their token ids."""

from __future__ import annotations

import os
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from .rows import is_read, rows_of, strict_json, text_of
from .template import FILLED, Template
from .usage import UsageError, meant

# Options that a row may have: types, least value, a bound above all values, and all of it in words.
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
        content: text, or a list of chat messages.
        options: the `OPTIONS` its row gave.
        others: what else was in its row, handed through to the output.
        ids: `[n]`, set by `encode`.
        name: of the column that it was in.
    """

    content: Any
    options: dict[str, Any] = field(default_factory=dict)
    others: dict[str, Any] = field(default_factory=dict)
    ids: list[int] = field(default_factory=list)
    name: str = field(default=COLUMNS[0], compare=False)


def read(
    arguments: Sequence[str],
    file: str | None,
    column: str | None = None,
    template: Template | None = None,
    options: Collection[str] = OPTIONS,
) -> list[Prompt]:
    """Prompts from the command line and from a file; `-`, or nothing at all, is standard input.

    Args:
        column: name of the field, or of a table's column, that holds the prompts; without one
            `prompt`, or else `messages`.
        template: makes the prompts of other columns, in place of one that holds them.
        options: the `OPTIONS` that a row may have.
    """
    found = [_from_argument(text, i) for i, text in enumerate(arguments)]
    if file is None and not found and sys.stdin and not sys.stdin.isatty():
        file = "-"
    if column is not None and file is None:
        raise UsageError("--column: expected with --file, whose rows have it")
    if template is not None and (file is None or arguments or column is not None):
        raise UsageError(
            "--template: expected with --file, whose columns it names, and no other prompts"
        )
    if file is not None:
        names = [column] if column else COLUMNS
        rows = rows_of(file, template.names if template else names, options)
        if template:
            rows, column = template.filled(rows), FILLED
        found += [_from_row(row, place, column, options) for place, row in rows]
    if not found and file in (None, "-"):
        raise UsageError("no prompts: give them as arguments, with --file, or on standard input")
    if not found:
        raise UsageError(f"--file: there are no prompts in {file}")
    return found


def _from_argument(text: str, index: int) -> Prompt:
    if not text:
        raise UsageError(f"prompt {index}: expected a text, got none")
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise UsageError(f"prompt {index}: expected text in UTF-8, got {text!r}")
    if is_read(text) and os.path.isfile(text):
        raise UsageError(f"prompt {index}: {text} is a file; --file {text} takes its prompts")
    return Prompt(text)


def _from_row(row: Any, place: str, column: str | None, allowed: Collection[str]) -> Prompt:
    if not isinstance(row, dict):
        if column is not None:
            raise UsageError(f"--column: expected a file of rows with columns, {place} has none")
        row = {"prompt": row}
    name = next((each for each in ([column] if column else COLUMNS) if each in row), None)
    if name is None:
        _refuse_columns(row, place, column)
    content = row.pop(name)
    if not isinstance(content, (str, list)) or content == "":
        raise UsageError(
            f"{place}: expected a {name!r}, a text or chat messages, got {content!r:.200}"
        )
    if isinstance(content, list):
        _require_messages(content, place)
    given = {each: row.pop(each) for each in allowed if each in row}
    options = {each: value for each, value in given.items() if value is not None}
    for each, value in options.items():
        options[each] = _checked(each, value, place)
    return Prompt(content, options, row, name=COLUMNS[0] if name == FILLED else name)


def _refuse_columns(row: dict[str, Any], place: str, column: str | None) -> NoReturn:
    if {"custom_id", "body"} <= row.keys():
        raise UsageError(
            f"{place}: is a line of OpenAI's batch format; this makes rows of these lines: "
            "jq -c '{custom_id, messages: .body.messages, max_new_tokens: .body.max_tokens}'"
        )
    near = meant(column or COLUMNS[0], row, "--column ")
    raise UsageError(
        f"{place}: expected a {column or COLUMNS[0]!r}, a text or chat messages, got the columns "
        f"{', '.join(row) or 'none'}"[:300]
        + (near or "; --column NAME says which has the prompts")
    )


def _checked(name: str, value: Any, place: str) -> Any:
    """The value of an option, in tables with gaps a float, where it is an integer too."""
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
    if Path(file).suffix.lower() != ".json":
        return text
    try:
        messages = strict_json(text)
    except ValueError as error:
        raise UsageError(f"--prefix: cannot read {file}: {error}") from error
    _require_messages(messages, file)
    return messages


def encode(
    prompts: Mapping[int, Prompt],
    prefix: Any,
    tokenizer: Any,
    raw: bool,
    template: Mapping[str, Any] | None = None,
) -> None:
    """Sets the ids of prompts, given by index, through the chat template where there is one.

    Args:
        template: what it is told.
    """
    template = template or {}
    chat = not raw and getattr(tokenizer, "chat_template", None) is not None
    contents = [prompt.content for prompt in prompts.values()]
    if not chat and any(isinstance(each, list) for each in [prefix, *contents]):
        raise UsageError("chat messages need a model with a chat template, and not --raw")
    if not chat and template:
        raise UsageError(
            "--chat-template-kwargs: expected a model with a chat template, it has none"
        )
    if not chat:
        rows = tokenizer([(prefix or "") + content for content in contents])["input_ids"]
    else:
        _require_known(tokenizer, template)
        rows = [_template(tokenizer, prefix, p.content, template, i) for i, p in prompts.items()]
    for prompt, ids in zip(prompts.values(), rows):
        prompt.ids = ids


def _require_known(tokenizer: Any, template: Mapping[str, Any]) -> None:
    from pagedkv.batch.chats import NAME, require_known, told  # which bring torch along

    try:
        require_known(tokenizer, told(template))
    except (TypeError, ValueError) as error:
        raise UsageError(str(error).replace(NAME, "--chat-template-kwargs", 1)) from error


def _template(
    tokenizer: Any, prefix: Any, content: Any, template: Mapping[str, Any], index: int
) -> list[int]:
    from pagedkv.batch.chats import chat_ids  # which brings torch along

    before = [{"role": "system", "content": prefix}] if isinstance(prefix, str) else prefix or []
    messages = content if isinstance(content, list) else [{"role": "user", "content": content}]
    try:
        return chat_ids(tokenizer, [*before, *messages], template)
    except Exception as error:  # a template may refuse an order of roles in any way it likes
        raise UsageError(f"prompt {index}: the chat template refuses it: {error}") from error


def _require_messages(messages: Any, place: str) -> None:
    shape = isinstance(messages, list) and all(
        isinstance(m, dict) and {"role", "content"} <= m.keys() for m in messages
    )
    if not shape or not messages:
        raise UsageError(f"{place}: expected chat messages, objects with 'role' and 'content'")
    contents = [m["content"] for m in messages if isinstance(m["content"], list)]
    parts = [part for content in contents for part in content if isinstance(part, dict)]
    for kind in (str(part.get("type")) for part in parts):
        if any(seen in kind for seen in ("image", "video", "audio")):  # a template drops it
            raise UsageError(
                f"{place}: expected messages of text, got {kind!r}; BatchGenerator takes images"
            )
