"""The table that a finished job's rows make: Parquet or CSV, written once and whole.

While a job runs its rows are JSON lines, which a kill cannot break; a table could not be gone on
with. They stay beside it, so that the job can be run again with more prompts.
"""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from .output import replacing
from .rows import parquet_of
from .usage import UsageError

SUFFIXES = (".parquet", ".csv")
NOT_WRITTEN = (".tsv", ".json", ".arrow", ".feather", ".xlsx", ".xls", ".gz", ".zip", ".zst")
OWN = ("key", "made_with")  # what only going on with the rows needs


def rows_beside(out: Path) -> Path:
    """The file of JSON lines of an output: itself, or for a table one beside it.

    Raises:
        UsageError: such a table is not written, or the name is taken by another file.
    """
    suffix = out.suffix.lower()
    if suffix in NOT_WRITTEN:
        raise UsageError(f"--out: expected .jsonl, .parquet or .csv, got {out}")
    if suffix not in SUFFIXES:
        return out
    if suffix == ".parquet":
        parquet_of("--out", out)
    rows = out.with_name(f"{out.name}.jsonl")
    if out.exists() and not rows.exists():
        raise UsageError(
            f"--out: {out} is there already, and {rows.name}, with its rows, is not; give another "
            "file"
        )
    return rows


def write_table(out: Path, rows: Iterable[dict[str, Any]]) -> int:
    """Writes rows in the order of their prompts, whole or not at all; returns how many."""
    rows = sorted(rows, key=lambda row: (row["index"], row["sample"]))
    names = [name for name in dict.fromkeys(n for row in rows for n in row) if name not in OWN]
    with replacing(Path(os.path.realpath(out))) as fresh:  # a link stays a link
        (_write_parquet if out.suffix.lower() == ".parquet" else _write_csv)(fresh, names, rows)
    return len(rows)


def _write_csv(path: Path, names: list[str], rows: list[dict[str, Any]]) -> None:
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(names)
        writer.writerows([_as_text(row.get(name)) for name in names] for row in rows)


def _write_parquet(path: Path, names: list[str], rows: list[dict[str, Any]]) -> None:
    import pyarrow

    columns = {name: _column([row.get(name) for row in rows]) for name in names}
    parquet_of("--out", path).write_table(pyarrow.table(columns), path)


def _column(values: list[Any]) -> Any:
    """An Arrow array; of values that are not of one type an array of texts."""
    import pyarrow

    with suppress(pyarrow.ArrowException, OverflowError):
        array = pyarrow.array(values)
        if "struct<>" not in str(array.type):  # which Parquet does not have
            return array
    return pyarrow.array([_as_text(value) for value in values], pyarrow.string())


def _as_text(value: Any) -> str | None:
    """Text as it is, anything else as JSON; None stays none."""
    if value is None or isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False)
