"""Where a batch job's prompts come from: arguments, a text file, JSON lines, standard input."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

OPTIONS = ("max_new_tokens", "temperature", "seed")  # what a row may say for itself


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

    A `.jsonl` file has an object with a `prompt` in each line, any other file one prompt a line.
    """
    found = [Prompt(text) for text in arguments]
    if file is None and not found and not sys.stdin.isatty():
        file = "-"
    if file is not None:
        found += _from_lines(file)
    if not found:
        raise UsageError("no prompts: give them as arguments, with --file, or on standard input")
    return found


def _from_lines(file: str) -> Iterator[Prompt]:
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"--file: cannot read {file}: {error}") from error
    as_json = file.endswith(".jsonl") or (file == "-" and text.lstrip().startswith("{"))
    # Not splitlines(): a line separator inside a prompt does not end it.
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield _from_json(line, f"{file}:{number}") if as_json else Prompt(line.rstrip("\r"))


def _from_json(line: str, place: str) -> Prompt:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise UsageError(f"{place}: expected a JSON object, got {error}") from error
    if not isinstance(row, dict) or not isinstance(row.get("prompt"), (str, list)):
        raise UsageError(f"{place}: expected an object with a 'prompt', a text or chat messages")
    content = row.pop("prompt")
    if isinstance(content, list):
        _require_messages(content, place)
    return Prompt(content, {name: row.pop(name) for name in OPTIONS if name in row}, row)


def read_prefix(file: str | None) -> Any:
    """What precedes every prompt: the text of a file, or the chat messages of a `.json` file."""
    if file is None:
        return None
    try:
        text = Path(file).read_text(encoding="utf-8")
        if not file.endswith(".json"):
            return text
        messages = json.loads(text)
    except (OSError, ValueError) as error:
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
        rows = [_template(tokenizer, prefix, prompt.content) for prompt in prompts]
    for prompt, ids in zip(prompts, rows):
        prompt.ids = ids


def _template(tokenizer: Any, prefix: Any, content: Any) -> list[int]:
    before = [{"role": "system", "content": prefix}] if isinstance(prefix, str) else prefix or []
    messages = content if isinstance(content, list) else [{"role": "user", "content": content}]
    try:
        return tokenizer.apply_chat_template(
            [*before, *messages], add_generation_prompt=True, tokenize=True, return_dict=False
        )
    except Exception as error:  # a template may refuse an order of roles in any way it likes
        raise UsageError(f"prompt: the model's chat template refuses it: {error}") from error


def _require_messages(messages: Any, place: str) -> None:
    shape = isinstance(messages, list) and all(
        isinstance(m, dict) and {"role", "content"} <= m.keys() for m in messages
    )
    if not shape or not messages:
        raise UsageError(f"{place}: expected chat messages, objects with 'role' and 'content'")
