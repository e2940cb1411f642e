"""Where a batch job's prompts come from: arguments, a text file, JSON lines, standard input.

A table is refused by its file name, with the command that turns it into JSON lines: read as text,
its header and its quotes would be prompts.
"""

from __future__ import annotations

import json
import math
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

# Options that a row may have: types, least value, a bound above all values, and all of it in words.
OPTIONS: dict[str, tuple[Any, int, float, str]] = {
    "max_new_tokens": (int, 1, 2**62, "a positive integer below 2**62"),
    "temperature": ((int, float), 0, sys.float_info.max, "a number from 0 on"),
    "seed": (int, 0, 2**62, "an integer from 0 on, below 2**62"),
}

JSON_LINES = (".jsonl", ".ndjson")
# File types that are not read, and the command that turns each into one that is.
SCRIPT = 'python -c "import {0}; [print(json.dumps(row)) for row in {1}]" {{0}} > {{1}}.jsonl'
TABLE = "csv.DictReader(open(sys.argv[1], newline='', encoding='utf-8-sig'){0})"
FRAME = (
    'python -c "import pandas, sys; print(pandas.{0}(sys.argv[1])'
    ".to_json(orient='records', lines=True))\" {{0}} > {{1}}.jsonl"
)
UNREAD = {
    ".csv": SCRIPT.format("csv, json, sys", TABLE.format("")),
    ".tsv": SCRIPT.format("csv, json, sys", TABLE.format(", delimiter='\\t'")),
    ".json": SCRIPT.format("json, sys", "json.load(open(sys.argv[1], encoding='utf-8-sig'))"),
    ".parquet": FRAME.format("read_parquet"),
    ".arrow": FRAME.format("read_feather"),
    ".feather": FRAME.format("read_feather"),
    ".xlsx": FRAME.format("read_excel"),
    ".xls": FRAME.format("read_excel"),
    ".gz": "gzip -dk {0}",
    ".bz2": "bzip2 -dk {0}",
    ".xz": "xz -dk {0}",
    ".zst": "zstd -d {0}",
    ".zip": "unzip {0}",
}


class UsageError(Exception):
    """What the caller gave cannot be used; the command ends with code 2."""


@dataclass
class Prompt:
    """One prompt of a job.

    Attributes:
        content: text, or a list of chat messages.
        options: the `OPTIONS` its row gave.
        others: what else was in its row, handed through to the output.
        ids: `[n]`, set by `encode`.
    """

    content: Any
    options: dict[str, Any] = field(default_factory=dict)
    others: dict[str, Any] = field(default_factory=dict)
    ids: list[int] = field(default_factory=list)


def read(arguments: Sequence[str], file: str | None) -> list[Prompt]:
    """Prompts from the command line and from a file; `-`, or nothing at all, is standard input.

    A `.jsonl` file has an object with a `prompt` in each line, any other file one prompt a line; a
    pipe is either, by its first character.
    """
    found = [Prompt(text) for text in arguments]
    for i, text in enumerate(arguments):
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise UsageError(f"prompt {i}: expected text in UTF-8, got {text!r}")
    if file is None and not found and sys.stdin and not sys.stdin.isatty():
        file = "-"
    if file is not None:
        found += _from_lines(file)
    if not found:
        where = "" if file in (None, "-") else f" in {file}"
        raise UsageError(
            f"no prompts{where}: give them as arguments, with --file, or on standard input"
        )
    return found


def _from_lines(file: str) -> Iterator[Prompt]:
    path = Path(file)
    suffix = path.suffix.lower()
    if suffix in UNREAD:
        names = (shlex.quote(str(each)) for each in (path, path.with_suffix("")))
        raise UsageError(
            f"--file: expected .jsonl (an object with a 'prompt' in each line) or text (.txt, a "
            f"prompt a line), got {file}; this makes one: {UNREAD[suffix].format(*names)}"
        )
    text = _text_of(file, "--file")
    is_pipe = file == "-" or path.is_fifo()
    as_json = suffix in JSON_LINES or (is_pipe and text.lstrip().startswith("{"))
    # Not splitlines(): a line separator inside a prompt does not end it.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield _from_json(line, f"{file}:{number}") if as_json else Prompt(line)


def _text_of(file: str, option: str) -> str:
    """The text of a file, without a byte order mark and the returns of Windows' line ends."""
    if file == "-" and sys.stdin is None:
        raise UsageError(f"{option}: cannot read standard input, it is closed")
    try:
        data = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
        text = data.decode("utf-8-sig")
        if "\0" in text:
            raise ValueError(f"a zero byte at position {data.index(0)}")
    except (OSError, ValueError) as error:
        kind = "" if isinstance(error, OSError) else "expected text in UTF-8, got "
        raise UsageError(f"{option}: cannot read {file}: {kind}{error}") from error
    return text.replace("\r\n", "\n")


def strict_json(text: str) -> Any:
    """The value of a JSON text.

    Raises:
        ValueError: it is none, or says something twice, or a number that is none in JSON.
    """
    try:
        return json.loads(
            text, object_pairs_hook=_object, parse_constant=_refuse_number, parse_float=_float
        )
    except RecursionError:
        raise ValueError("too many brackets within each other") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"{twice!r} twice")
    return found


def _float(text: str) -> float:
    return number if math.isfinite(number := float(text)) else _refuse_number(text)


def _refuse_number(text: str) -> NoReturn:
    raise ValueError(f"{text}, which is no finite number")


def _from_json(line: str, place: str) -> Prompt:
    try:
        row = strict_json(line)
        json.dumps(row, ensure_ascii=False).encode()  # half a character could not be written again
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{place}: expected a JSON object, got {error}") from error
    if not isinstance(row, dict) or not isinstance(row.get("prompt"), (str, list)):
        got = f"the keys {', '.join(row) or 'none'}" if isinstance(row, dict) else f"{row!r}"
        raise UsageError(
            f"{place}: expected an object with a 'prompt', a text or chat messages, got {got:.200}"
        )
    content = row.pop("prompt")
    if isinstance(content, list):
        _require_messages(content, place)
    given = {name: row.pop(name) for name in OPTIONS if name in row}
    options = {name: value for name, value in given.items() if value is not None}
    for name, value in options.items():
        kind, least, below, expected = OPTIONS[name]
        if isinstance(value, bool) or not isinstance(value, kind) or not least <= value < below:
            raise UsageError(f"{place}: {name}: expected {expected}, got {value!r:.80}")
    return Prompt(content, options, row)


def read_prefix(file: str | None) -> Any:
    """The prefix of every prompt: the text of a file, or the chat messages of a `.json` file."""
    if file is None:
        return None
    text = _text_of(file, "--prefix")
    if Path(file).suffix.lower() != ".json":
        return text
    try:
        messages = strict_json(text)
    except ValueError as error:
        raise UsageError(f"--prefix: cannot read {file}: {error}") from error
    _require_messages(messages, file)
    return messages


def encode(prompts: list[Prompt], prefix: Any, tokenizer: Any, raw: bool) -> None:
    """Sets the ids of every prompt, through the chat template where there is one."""
    chat = not raw and getattr(tokenizer, "chat_template", None) is not None
    if not chat and (isinstance(prefix, list) or any(isinstance(p.content, list) for p in prompts)):
        raise UsageError("chat messages need a model with a chat template, and not --raw")
    if not chat:
        rows = tokenizer([(prefix or "") + prompt.content for prompt in prompts])["input_ids"]
    else:
        rows = [_template(tokenizer, prefix, p.content, i) for i, p in enumerate(prompts)]
    for prompt, ids in zip(prompts, rows):
        prompt.ids = ids


def _template(tokenizer: Any, prefix: Any, content: Any, index: int) -> list[int]:
    before = [{"role": "system", "content": prefix}] if isinstance(prefix, str) else prefix or []
    messages = content if isinstance(content, list) else [{"role": "user", "content": content}]
    try:
        return tokenizer.apply_chat_template(
            [*before, *messages], add_generation_prompt=True, tokenize=True, return_dict=False
        )
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
