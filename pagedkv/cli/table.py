"""The table that a finished job's rows make: Parquet, Arrow or CSV, written once and whole.

While a job runs, its rows are JSON lines: unlike a table, they survive a kill and can be continued.
They stay beside the table, so that the job can be run again with more prompts.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, TextIO

from .answers import OWN
from .errors import UsageError
from .output import replacing
from .prompts import Prompt
from .rows import as_text, parquet_of

TYPED = (".parquet", ".arrow", ".feather")  # the last two are names of one format
SUFFIXES = (*TYPED, ".csv")
DEEPEST = 32  # levels of a cell; what is deeper becomes text, because Arrow reads no such Parquet
NOT_WRITTEN = (".tsv", ".json", ".xlsx", ".xls", ".gz", ".zip", ".zst")


def rows_beside(out: Path) -> Path:
    """The file of JSON lines of an output: itself, or for a table one beside it.

    Raises:
        UsageError: such a table is not written, or the name is taken by another file.
    """
    suffix = out.suffix.lower()
    if suffix in NOT_WRITTEN:
        raise UsageError(f"--out: expected .jsonl, .parquet, .arrow or .csv, got {out}")
    if suffix not in SUFFIXES:
        return out
    if suffix in TYPED:
        parquet_of("--out", out)
    # Readers of a folder of tables skip files whose names begin with a `_`.
    rows = out.with_name(f"_{out.name}.jsonl")
    if out.exists() and not rows.exists():
        raise UsageError(
            f"--out: {out} is there already, and {rows.name}, with its rows, is not; give another "
            "file"
        )
    return rows


def write_table(
    out: Path,
    rows: Iterable[dict[str, Any]],
    types: dict[str, str],
    prompts: Sequence[Prompt],
    source: str | None = None,
) -> int:
    """Writes rows in the order of their prompts, whole or not at all; returns how many.

    Args:
        types: the job's own columns, as `types_of` has them; the others are the prompts'.
        prompts: all of the job.
        source: the Parquet file that all prompts come from, if they do.
    """
    rows = sorted(rows, key=lambda row: (row["index"], row["sample"]))
    with replacing(Path(os.path.realpath(out))) as fresh:  # a link stays a link
        if (suffix := out.suffix.lower()) in TYPED:
            table = _table(rows, types, prompts, source)
            if suffix == ".parquet":
                parquet_of("--out", out).write_table(table, fresh)
            else:
                _write_arrow(fresh, table)
        else:
            _write_csv(fresh, [*_names(prompts, types), *types], rows)
    return len(rows)


def _names(prompts: Sequence[Prompt], types: Collection[str]) -> list[str]:
    """The columns of prompts that a table has beside a job's own."""
    found = dict.fromkeys(name for each in prompts for name in each.columns)
    return [name for name in found if name not in types and name not in OWN]


def _write_csv(path: Path, names: list[str], rows: list[dict[str, Any]]) -> None:
    # Without the byte order mark, spreadsheets would assume another encoding.
    with path.open("w", encoding="utf-8-sig", newline="") as file:
        # Readers end a row at a return; Python's writer quotes one only with this terminator.
        writer = csv.writer(_Lines(file), lineterminator="\r\n")
        writer.writerow(names)
        writer.writerows([as_text(row.get(name)) for name in names] for row in rows)


class _Lines(NamedTuple):
    """Takes rows that end as Windows' lines do, and writes their ends without the return."""

    file: TextIO

    def write(self, row: str) -> None:
        self.file.write(row.removesuffix("\r\n") + "\n")


def _write_arrow(path: Path, table: Any) -> None:
    import pyarrow

    with pyarrow.ipc.new_file(str(path), table.schema) as file:
        file.write_table(table)


def _table(
    rows: list[dict[str, Any]],
    types: dict[str, str],
    prompts: Sequence[Prompt],
    source: str | None,
) -> Any:
    """An Arrow table of the prompts' columns and of a job's own."""
    import pyarrow

    places = pyarrow.array([row["index"] for row in rows], pyarrow.int64())
    names, given = _names(prompts, types), {}
    if source is not None:
        filled = {each.name for each in prompts if each.name in each.others}  # by templates
        with parquet_of("--file", source).ParquetFile(source) as file:
            kept = [name for name in file.schema_arrow.names if name in names]
            found = file.read(columns=kept)
        if len(found) != len(prompts):
            raise ValueError(f"{source} has changed since")
        given = {name: found[name] for name in kept if name not in filled}
    for name in names:
        if name not in given:
            # Inferred from all prompts, so that shards of a job have the same types.
            given[name] = _column([each.columns.get(name) for each in prompts])
    columns = {name: column.take(places) for name, column in given.items()}
    own = {
        name: pyarrow.array([row.get(name) for row in rows], _type(said))
        for name, said in types.items()
    }
    return pyarrow.table(columns | own)


def _type(said: str) -> Any:
    import pyarrow

    inner = said.removeprefix("list<").removesuffix(">")
    found = pyarrow.type_for_alias(inner)
    return found if inner == said else pyarrow.list_(found)


def _column(values: list[Any]) -> Any:
    """Makes an Arrow array; an array of texts if the values are not of one type."""
    import pyarrow

    with suppress(pyarrow.ArrowException, OverflowError):
        array = pyarrow.array(values)
        if _says_all(array.type):
            return array
    return pyarrow.array([as_text(value) for value in values], pyarrow.string())


def _says_all(kind: Any, levels: int = DEEPEST) -> bool:
    """Whether a type has no unknown part, and no more levels than these.

    Other rows would give an unknown part another type.
    """
    import pyarrow

    is_empty = pyarrow.types.is_struct(kind) and not kind.num_fields  # Parquet has no such struct
    if is_empty or pyarrow.types.is_null(kind) or not levels:
        return False
    return all(_says_all(kind.field(i).type, levels - 1) for i in range(kind.num_fields))
