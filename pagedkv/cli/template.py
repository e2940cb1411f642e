r"""Prompts that a template makes of a table's columns: `--template 'Text: {text}\nLabel:'`."""

from __future__ import annotations

import re
from collections.abc import Iterable
from string import Formatter
from typing import Any

from pagedkv.names import meant

from .errors import UsageError
from .rows import as_text, refuse_without_columns

FILLED = "--template"  # the column of filled templates, until they are prompts
ESCAPES = {r"\n": "\n", r"\t": "\t", r"\\": "\\"}  # a shell's single quotes leave them as they are


class Template:
    r"""A text with names of columns in braces, as `str.format` reads it; `{{` is a brace.

    Args:
        text: as a shell hands it over: `\n` is a new line, `\t` a tab, `\\` a backslash.

    Attributes:
        names: the names of the columns, in their order.

    Raises:
        UsageError: it cannot be read, or names no column.
    """

    def __init__(self, text: str) -> None:
        self.text = re.sub(r"\\[nt\\]", lambda found: ESCAPES[found[0]], text)
        try:
            self._parts = [*Formatter().parse(self.text)]
        except ValueError as error:
            said = str(error).removesuffix(" in format string")
            raise UsageError(f"--template: {said}; {{{{ and }}}} are braces") from error
        for _, name, form, conversion in self._parts:
            if name == "" or form or conversion:
                end = f"!{conversion}" if conversion else ""
                end += f":{form}" if form else ""
                raise UsageError(
                    f"--template: expected the name of a column in braces, got {{{name}{end}}}; "
                    "{{ and }} are braces"
                )
        self.names = [name for _, name, _, _ in self._parts if name]
        if not self.names:
            raise UsageError("--template: expected columns in braces, such as {text}, got none")

    def filled(self, rows: Iterable[tuple[str, Any]]) -> list[tuple[str, dict[str, Any]]]:
        """Returns rows with their places; a row that has all columns gets its prompt as `FILLED`.

        Raises:
            UsageError: some column is in no row.
        """
        rows = [*rows]
        for place, row in rows:
            if not isinstance(row, dict):
                refuse_without_columns("--template", place)
        for name in self.names if rows else ():
            if not any(name in row for _, row in rows):
                place, row = rows[0]
                raise UsageError(
                    f"--template: {place} has no column {name!r}, its columns are "
                    f"{', '.join(row) or 'none'}{meant(name, row)}"
                )
        return [(place, row | self._fill(row)) for place, row in rows]

    def _fill(self, row: dict[str, Any]) -> dict[str, str]:
        if any(name not in row for name in self.names):
            return {}
        parts = (text + (as_text(name and row[name]) or "") for text, name, _, _ in self._parts)
        return {FILLED: "".join(parts)}
