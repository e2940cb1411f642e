"""Rows of a file: lines of text, JSON lines, a JSON array, a table in CSV or Parquet.

A file's name says its kind. A file of another kind is refused, if possible with the command that
converts it: if it were read as text, its quotes and bytes would become prompts.
"""

from __future__ import annotations

import base64
import csv
import io
import json
import math
import os
import re
import shlex
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any, NoReturn

from .errors import UsageError
from .text_files import UNDECODED, exact_text_of, near_to, said_by, text_of, undecoded

TEXT = ("", ".txt")
JSON_LINES = (".jsonl", ".ndjson")
READ = ".txt (a prompt a line), .jsonl, .json, .csv, .tsv or .parquet"
# File types that are not read, and the command that turns each into one that is.
FRAME = (
    'python -c "import pandas, sys; print(pandas.{0}(sys.argv[1])'
    ".to_json(orient='records', lines=True))\" {{0}} > {{1}}.jsonl"
)
UNREAD = {
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


def is_read(file: str) -> bool:
    """Whether a name has the ending of a file with rows, or of a file that can be converted."""
    suffix = Path(file).suffix.lower()
    return suffix in (".txt", *JSON_LINES, ".json", ".csv", ".tsv", ".parquet", *UNREAD)


def is_table(file: str | None) -> bool:
    """Whether a file keeps the types of its columns."""
    return file is not None and Path(file).suffix.lower() == ".parquet"


def rows_of(
    file: str, columns: Collection[str], numbers: Collection[str], encoding: str | None = None
) -> Iterator[tuple[str, Any]]:
    """The rows of a file, each with its place: a text, chat messages, or fields by name.

    A pipe is text or JSON lines, by its first character.

    Args:
        columns: names that the column of prompts may have; by them a CSV's delimiter is found.
        numbers: columns whose cells in a CSV are numbers; all others are text.
        encoding: how a text file is encoded; see `text_of`.

    Raises:
        UsageError: the file cannot be read, or is of another kind; it names the place.
    """
    path = Path(file)
    suffix = path.suffix.lower()
    is_pipe = file == "-" or (suffix not in JSON_LINES and os.path.exists(path) and path.is_fifo())
    if is_table(file):
        if encoding is not None:
            raise UsageError(f"--encoding: expected with a file of text, got {file}")
        return _records(file, columns)
    if suffix in (".csv", ".tsv"):
        text = exact_text_of(file, "--file", encoding)  # a cell may have line ends of its own
        return _cells(file, text, columns, numbers, encoding)
    if suffix not in (*TEXT, *JSON_LINES, ".json") and not is_pipe:
        _refuse(path)
    text = text_of(file, "--file", encoding)
    begin = text.lstrip()[:1]
    if suffix in JSON_LINES or (begin == "{" and (is_pipe or suffix == ".json")):
        return _objects(file, text)
    return _items(file, text) if suffix == ".json" else _lines(file, text)


def _refuse(path: Path) -> NoReturn:
    names = (shlex.quote(str(each)) for each in (path, path.with_suffix("")))
    made = UNREAD.get(path.suffix.lower(), "").format(*names)
    way = f"this makes one: {made}" if made else "rename it to what it is"
    raise UsageError(f"--file: expected {READ}, got {path}; {way}")


def refuse_without_columns(option: str, place: str) -> NoReturn:
    """Raises for a row that has no columns."""
    raise UsageError(
        f"{option}: expected a file of rows with columns, {place} has none; files with columns "
        "are .csv, .tsv (with tabs between them), .jsonl, .json or .parquet, by their names"
    )


# ------------------------------------------------------------------ text and JSON


def _lines(file: str, text: str) -> Iterator[tuple[str, str]]:
    # Not splitlines(): a line separator inside a prompt does not end it. Old programs write no \n.
    for number, line in enumerate(text.split("\n" if "\n" in text else "\r"), start=1):
        if line.strip():
            yield f"{file}:{number}", line


def _objects(file: str, text: str) -> Iterator[tuple[str, dict[str, Any]]]:
    for place, line in _lines(file, text):
        row = _value_of(line, place, "a JSON object")
        if not isinstance(row, dict):
            raise UsageError(f"{place}: expected an object with a 'prompt', got {row!r:.200}")
        yield place, row


def _items(file: str, text: str) -> Iterator[tuple[str, Any]]:
    items = _value_of(text, file, "a JSON array") if text.strip() else []
    if not isinstance(items, list):
        raise UsageError(f"{file}: expected an array of texts or of objects, got {items!r:.200}")
    yield from ((f"{file}, row {number}", item) for number, item in enumerate(items, start=1))


def _value_of(text: str, place: str, expected: str) -> Any:
    try:
        value = strict_json(text, lambda said: None if said == "NaN" else _refuse_number(said))
        # A lone surrogate, half a character, could not be written.
        json.dumps(value, ensure_ascii=False).encode(errors="surrogateescape")
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{place}: expected {expected}, got {error}") from error
    return value


def strict_json(text: str, constant: Callable[[str], Any] | None = None) -> Any:
    """The value of a JSON text.

    Args:
        constant: reads NaN and infinities, which JSON does not have; without it they are errors.

    Raises:
        ValueError: it is no JSON, or has a name twice, or a number that is not finite.
    """
    try:
        return json.loads(
            text,
            object_pairs_hook=_object,
            parse_constant=constant or _refuse_number,
            parse_float=_float,
        )
    except RecursionError:
        raise ValueError("too many brackets within each other") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError(f"{_twice([name for name, _ in pairs])!r} twice")
    return found


def _twice(names: list[str]) -> str:
    return next(name for name in names if names.count(name) > 1)


def _float(text: str) -> float:
    return number if math.isfinite(number := float(text)) else _refuse_number(text)


def _refuse_number(text: str) -> NoReturn:
    raise ValueError(f"{text}, which is no finite number")


# ------------------------------------------------------------------ tables


def _cells(
    file: str,
    text: str,
    columns: Collection[str],
    numbers: Collection[str],
    encoding: str | None,
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Rows of a CSV with a header; columns without a name are left out.

    So are empty lines, and lines with only delimiters, which spreadsheets leave behind.
    """
    csv.field_size_limit(2**31 - 1)
    delimiter = "\t" if file.lower().endswith(".tsv") else _delimiter(text, columns)
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True)
    names: list[str] = []
    line = 1
    try:
        for cells in reader:
            place, line = f"{file}:{line}", reader.line_num + 1
            if not any(cells) and not (names and len(cells) == len(names) == 1):
                continue
            if not names:
                names = [name.strip() for name in cells]
                _require_distinct([name for name in names if name], place)
                if byte := UNDECODED.search("".join(names)):
                    raise UsageError(f"{place}: {undecoded(byte, encoding)}")
                continue
            if len(cells) > len(names):
                raise UsageError(
                    f"{place}: expected {len(names)} cells, as the header has, got {len(cells)}; "
                    f"a cell with {delimiter!r} in it needs quotes around it"
                )
            row: dict[str, Any] = {name: cell for name, cell in zip(names, cells) if name}
            yield place, row | {name: _number(row[name]) for name in numbers if name in row}
    except csv.Error as error:
        raise UsageError(f"{file}:{line}: expected a row of cells, got {error}") from error


def _delimiter(text: str, columns: Collection[str]) -> str:
    """Finds the delimiter of a CSV: split by it, the header has the column of the prompts."""
    header = re.split("[\r\n]", text.lstrip("\r\n"), maxsplit=1)[0]
    found = {each: next(csv.reader([header], delimiter=each), []) for each in ",;\t"}
    fits = [each for each, names in found.items() if {name.strip() for name in names} & {*columns}]
    return fits[0] if fits else max(found, key=lambda each: len(found[each]))


def _number(cell: str) -> Any:
    try:
        return strict_json(cell) if cell.strip() else None
    except ValueError:
        return cell


def _records(file: str, columns: Collection[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    parquet = parquet_of("--file", file)
    try:
        with parquet.ParquetFile(file) as table:
            _require_distinct(table.schema_arrow.names, file)
            for each in table.schema_arrow:
                if each.name in columns and "binary" in str(each.type):
                    raise UsageError(
                        f"{file}: expected text in the column {each.name!r}, got {each.type}"
                    )
            records = (row for batch in table.iter_batches() for row in batch.to_pylist())
            for number, row in enumerate(records, start=1):
                yield f"{file}, row {number}", in_json(row)
    except (OSError, ValueError, OverflowError) as error:  # Arrow's own, and dates out of range
        near = near_to(file, error) if isinstance(error, OSError) else ""
        raise UsageError(f"--file: cannot read {file}: {said_by(error)}{near}") from error


def parquet_of(option: str, file: object) -> Any:
    """The module that reads and writes Parquet."""
    try:
        import pyarrow.parquet
    except ModuleNotFoundError:
        raise UsageError(
            f"{option}: {file} needs pyarrow: pip install 'pagedkv[parquet]'"
        ) from None
    return pyarrow.parquet


def in_json(value: Any) -> Any:
    """Makes JSON of a value: dates and decimals as text, bytes in base64, NaN as null."""
    if isinstance(value, dict):
        return {str(name): in_json(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [in_json(each) for each in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return value if value is None or isinstance(value, (str, int)) else str(value)


def as_text(value: Any) -> str | None:
    """Text as it is, anything else as JSON; None stays none."""
    if value is None or isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False)


def _require_distinct(names: list[str], place: str) -> None:
    if len(set(names)) < len(names):
        raise UsageError(f"{place}: expected columns of different names, got {_twice(names)} twice")
