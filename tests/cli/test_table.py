"""The table of a finished job: what is in it, when it is written, what is left in its place."""

import csv
import json
import os

import pytest

pytest.importorskip("filelock")

from pagedkv.cli.table import rows_beside, write_table
from pagedkv.cli.usage import UsageError

CHAT = [{"role": "user", "content": "字"}]
ROWS = [
    {"key": "k", "id": 2, "prompt": "b\nc", "index": 1, "sample": 0, "tokens": [5], "text": "y"},
    {"key": "k", "prompt": CHAT, "index": 0, "sample": 1, "tokens": [], "text": None},
    {
        "key": "k",
        "prompt": "a",
        "index": 0,
        "sample": 0,
        "tokens": [3, 4],
        "text": "x,",
        "error": 1,
    },
]
ROWS[1] |= {"made_with": {"seed": 1}, "empty": {}, "id": "two"}
NAMES = ["prompt", "index", "sample", "tokens", "text", "error", "id", "empty"]


def test_a_csv_has_rows_in_the_order_of_their_prompts_and_what_is_no_text_as_json(tmp_path):
    out = tmp_path / "out.csv"
    assert write_table(out, ROWS) == 3
    with out.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == [*NAMES[:6], "empty", "id"] or sorted(rows[0]) == sorted(NAMES)
    assert [row["text"] for row in rows] == ["x,", "", "y"]
    assert [row["tokens"] for row in rows] == ["[3, 4]", "[]", "[5]"]
    assert rows[2]["prompt"] == "b\nc"
    assert json.loads(rows[1]["prompt"]) == CHAT
    assert rows[1]["prompt"].count("字") == 1


def test_a_parquet_table_has_types_and_text_where_there_is_no_one_type(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    out = tmp_path / "out.Parquet"
    assert write_table(out, ROWS) == 3
    table = parquet.read_table(out)
    assert sorted(table.column_names) == sorted(NAMES)
    first, second, third = table.to_pylist()
    assert first == {
        "prompt": "a", "index": 0, "sample": 0, "tokens": [3, 4], "text": "x,", "error": 1,
        "id": None, "empty": None,
    }  # fmt: skip
    assert (second["tokens"], second["text"]) == ([], None)
    assert (json.loads(second["prompt"]), second["id"], second["empty"]) == (CHAT, "two", "{}")
    assert (third["prompt"], third["id"]) == ("b\nc", "2")
    write_table(out, [{**ROWS[0], "prompt": CHAT, "id": 10**30}])
    (row,) = parquet.read_table(out).to_pylist()
    assert row["prompt"] == CHAT  # of one type
    assert row["id"] in (str(10**30), 10**30)


@pytest.mark.parametrize("name", ["out.csv", "out.parquet"])
def test_a_table_takes_the_place_of_the_one_before_whole_or_not_at_all(tmp_path, monkeypatch, name):
    if name.endswith("parquet"):
        pytest.importorskip("pyarrow")
    out = tmp_path / name
    write_table(out, ROWS)
    before = out.read_bytes()

    def full(number: int) -> None:
        raise OSError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space"):
            write_table(out, ROWS[:1])
    assert out.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert write_table(out, ROWS[:1]) == 1
    assert out.read_bytes() != before


def test_rows_of_a_table_are_beside_it_and_all_others_are_the_output(tmp_path):
    for name in ("out.jsonl", "out", "out.txt", "out.ndjson"):
        assert rows_beside(tmp_path / name) == tmp_path / name
    assert rows_beside(tmp_path / "out.csv") == tmp_path / "out.csv.jsonl"


@pytest.mark.parametrize("name", ["out.json", "out.tsv", "out.XLSX", "out.jsonl.gz"])
def test_a_kind_that_is_not_written_is_refused_by_name(tmp_path, name):
    with pytest.raises(
        UsageError, match=rf"--out: expected .jsonl, .parquet or .csv, got .*{name}"
    ):
        rows_beside(tmp_path / name)


def test_a_table_that_is_not_of_a_job_is_not_written_over(tmp_path):
    table = tmp_path / "prompts.csv"
    table.write_text("prompt\na\n")
    with pytest.raises(
        UsageError, match=r"is there already, and prompts\.csv\.jsonl, with its rows"
    ):
        rows_beside(table)
    (tmp_path / "prompts.csv.jsonl").touch()
    assert rows_beside(table) == tmp_path / "prompts.csv.jsonl"


def test_a_link_to_a_table_stays_a_link(tmp_path):
    link = tmp_path / "link.csv"
    link.symlink_to("table.csv")
    write_table(link, ROWS)
    assert link.is_symlink()
    assert (tmp_path / "table.csv").read_bytes() == link.read_bytes() != b""
