"""The table of a finished job: what is in it, when it is written, what is left in its place."""

import csv
import functools
import json
import os

import pytest

from pagedkv.cli.answers import types_of
from pagedkv.cli.errors import UsageError
from pagedkv.cli.prompts import Prompt, read
from pagedkv.cli.table import rows_beside, write_table

CHAT = [{"role": "user", "content": "字"}]
TYPES = types_of("answer", cut=False, tokens=True, logprobs=True)
PROMPTS = [
    Prompt("a", {}, {"tags": []}),
    Prompt("b\nc", {}, {"id": 2, "tags": []}),
    Prompt(CHAT, {}, {"id": "two", "empty": {}}),
]
OTHERS = {"finish_reason": "stop", "cached_tokens": 0, "error": None, "key": "k"}
ROWS = [
    {"id": 2, "prompt": "b\nc", "index": 1, "sample": 0, "tokens": [5], "answer": "y", **OTHERS},
    {"prompt": CHAT, "index": 2, "sample": 0, "tokens": [], "answer": None, **OTHERS},
    {"prompt": "a", "index": 0, "sample": 1, "tokens": [3, 4], "answer": "x,", **OTHERS},
]
ROWS[1] |= {"made_with": {"seed": 1}, "empty": {}, "id": "two", "error_cause": "empty"}
NAMES = ["tags", "prompt", "id", "empty", *TYPES]


def write(out, rows=ROWS, prompts=PROMPTS, types=TYPES, source=None):
    return write_table(out, rows, types, prompts, source)


def test_a_csv_has_rows_in_the_order_of_their_prompts_and_what_is_no_text_as_json(tmp_path):
    out = tmp_path / "out.csv"
    assert write(out) == 3
    # By its byte order mark a spreadsheet knows what it is in.
    assert out.read_bytes().startswith(b"\xef\xbb\xbf")
    with out.open(newline="", encoding="utf-8-sig") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == NAMES
    assert [row["answer"] for row in rows] == ["x,", "y", ""]
    assert [row["tokens"] for row in rows] == ["[3, 4]", "[5]", "[]"]
    assert rows[1]["prompt"] == "b\nc"
    assert json.loads(rows[2]["prompt"]) == CHAT
    assert rows[2]["prompt"].count("字") == 1


def test_a_csv_keeps_every_text_in_its_cell(tmp_path):
    """A return ends a row for whoever reads it, unless there are quotes around it."""
    texts = ["a\rb", "\r", "a\r\n", "\n", 'say "a"', ",", " a ", "\u2028\x85\x0c", "'", "a;\tb"]
    rows = [{"index": i, "sample": 0, "answer": text} for i, text in enumerate(texts)]
    rows = [{"prompt": row["answer"], **row} for row in rows]
    out = tmp_path / "out.csv"
    write(out, rows, [Prompt(text) for text in texts])
    with out.open(newline="", encoding="utf-8-sig") as file:
        found = [(row["prompt"], row["answer"]) for row in csv.DictReader(file)]
    assert found == [(text, text) for text in texts]
    assert out.read_bytes().count(b"\r\n") == 2  # in the cells that have one


@pytest.fixture
def parquet():
    return pytest.importorskip("pyarrow.parquet")


def test_own_columns_of_a_parquet_table_have_types_whatever_is_in_them(tmp_path, parquet):
    assert write(tmp_path / "out.Parquet") == 3
    table = parquet.read_table(tmp_path / "out.Parquet")
    assert table.column_names == NAMES
    assert {name: str(table.schema.field(name).type) for name in TYPES} == {
        "index": "int64",
        "sample": "int64",
        "answer": "string",
        "finish_reason": "string",
        "cached_tokens": "int64",
        "error": "string",
        "tokens": "list<element: int32>",
        "logprobs": "list<element: float>",
    }
    assert table["tokens"].to_pylist() == [[3, 4], [5], []]
    assert table["answer"].to_pylist() == ["x,", "y", None]


def test_columns_of_prompts_are_text_where_there_is_no_one_type(tmp_path, parquet):
    write(tmp_path / "out.parquet")
    table = parquet.read_table(tmp_path / "out.parquet")
    assert {str(table.schema.field(name).type) for name in NAMES[:4]} == {"string"}
    assert table["prompt"].to_pylist()[:2] == ["a", "b\nc"]
    assert json.loads(table["prompt"].to_pylist()[2]) == CHAT
    assert table["id"].to_pylist() == [None, "2", "two"]
    assert table["tags"].to_pylist() == ["[]", "[]", None]
    prompts = [Prompt(CHAT, {}, {"id": 10**30, "n": 3})]
    write(tmp_path / "b.parquet", [ROWS[0] | {"index": 0}], prompts)
    (row,) = parquet.read_table(tmp_path / "b.parquet").to_pylist()
    assert (row["prompt"], row["n"]) == (CHAT, 3)  # of one type
    assert row["id"] in (str(10**30), 10**30)


@pytest.mark.parametrize("levels", [20, 60, 900])
def test_a_table_can_be_read_again_however_deep_its_cells_are(tmp_path, parquet, levels):
    cell = functools.reduce(lambda inner, _: [{"a": inner}], range(levels // 2), 1)
    write(tmp_path / "out.parquet", [ROWS[0] | {"index": 0}], [Prompt("a", {}, {"cell": cell})])
    (row,) = parquet.read_table(tmp_path / "out.parquet").to_pylist()
    assert cell in (row["cell"], json.loads(row["cell"]) if levels > 20 else None)


def test_columns_of_a_parquet_file_keep_their_types(tmp_path, parquet):
    import pyarrow

    given = pyarrow.table(
        {
            "when": pyarrow.array([1, None, 3], pyarrow.timestamp("us", "UTC")),
            "text": pyarrow.array(["a", None, "c"], pyarrow.large_string()),
            "price": pyarrow.array([None, 1, 2], pyarrow.decimal128(9, 2)),
            "raw": pyarrow.array([b"\xff", None, b""]),
            "seed": [1, 2, 3],
            "index": [7, 8, 9],
        }
    )
    parquet.write_table(given, tmp_path / "p.parquet")
    prompts = read([], str(tmp_path / "p.parquet"), "text")
    rows = [OTHERS | {"index": i, "sample": 0, "answer": f"to {i}"} for i in (2, 0)]
    write(tmp_path / "out.parquet", rows, prompts, source=tmp_path / "p.parquet")
    table = parquet.read_table(tmp_path / "out.parquet")
    kept = ["when", "text", "price", "raw"]
    assert table.column_names == [*kept, *TYPES]
    assert table.select(kept).equals(given.select(kept).take([0, 2]))
    assert table["index"].to_pylist() == [0, 2]

    parquet.write_table(given.slice(1), tmp_path / "p.parquet")
    with pytest.raises(ValueError, match=r"p\.parquet has changed since"):
        write(tmp_path / "out.parquet", rows, prompts, source=tmp_path / "p.parquet")


READERS = {
    "datasets": "import datasets; print(datasets.load_dataset('parquet', data_files=sys.argv[1] + "
    "'/*.parquet', split='train', cache_dir=sys.argv[1] + '-cache').num_rows)",
    "polars": "import polars; print(polars.read_parquet(sys.argv[1] + '/*.parquet').height)",
    "duckdb": "import duckdb; print(duckdb.sql(f\"from '{sys.argv[1]}/*.parquet'\").shape[0])",
    "pandas": "import pandas; print(len(pandas.read_parquet(sys.argv[1])))",
}


@pytest.fixture
def parts(tmp_path, parquet):
    """A folder with two parts of one job: one without an error or an id, one with both."""
    folder = tmp_path / "parts"
    folder.mkdir()
    for i in range(2):
        row = OTHERS | {"index": i, "sample": 0, "answer": None, "logprobs": [[], [-1.5]][i]}
        row["error"] = [None, "too long"][i]
        prompts = [Prompt("a", {}, {"id": None}), Prompt("b", {}, {"id": 3, "note": "x"})]
        write(folder / f"{i}.parquet", [row], prompts)
    return folder


def test_parts_of_a_job_read_as_one_table(parts, parquet):
    (parts / "_0.parquet.jsonl").write_text("{}")  # which stay beside it
    table = parquet.read_table(parts)
    assert table["error"].to_pylist() == [None, "too long"]
    assert table["id"].to_pylist() == [None, 3]
    assert table.schema.equals(parquet.read_schema(parts / "0.parquet"))


@pytest.mark.parametrize("package", READERS)
def test_other_packages_read_parts_of_a_job_as_one_table(parts, fresh_python, package):
    pytest.importorskip(package)
    assert fresh_python("-c", f"import sys; {READERS[package]}", str(parts)).split()[-1] == "2"


@pytest.mark.parametrize("name", ["out.arrow", "out.feather"])
def test_an_arrow_file_has_what_a_parquet_file_has(tmp_path, parquet, name):
    from pyarrow import feather

    write(tmp_path / name)
    write(tmp_path / "out.parquet")
    assert feather.read_table(tmp_path / name).equals(parquet.read_table(tmp_path / "out.parquet"))


@pytest.mark.parametrize("name", ["out.csv", "out.parquet", "out.arrow"])
def test_a_table_takes_the_place_of_the_one_before_whole_or_not_at_all(tmp_path, monkeypatch, name):
    out = tmp_path / name
    write(out)
    before = out.read_bytes()

    def full(number: int) -> None:
        raise OSError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space"):
            write(out, ROWS[:1])
    assert out.read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == [name]
    assert write(out, ROWS[:1]) == 1
    assert out.read_bytes() != before


def test_rows_of_a_table_are_beside_it_and_all_others_are_the_output(tmp_path):
    for name in ("out.jsonl", "out", "out.txt", "out.ndjson"):
        assert rows_beside(tmp_path / name) == tmp_path / name
    assert rows_beside(tmp_path / "out.csv") == tmp_path / "_out.csv.jsonl"


@pytest.mark.parametrize("name", ["out.json", "out.tsv", "out.XLSX", "out.jsonl.gz"])
def test_a_kind_that_is_not_written_is_refused_by_name(tmp_path, name):
    with pytest.raises(
        UsageError, match=rf"--out: expected .jsonl, .parquet, .arrow or .csv, got .*{name}"
    ):
        rows_beside(tmp_path / name)


def test_a_table_that_is_not_of_a_job_is_not_written_over(tmp_path):
    table = tmp_path / "prompts.csv"
    table.write_text("prompt\na\n")
    with pytest.raises(
        UsageError, match=r"is there already, and _prompts\.csv\.jsonl, with its rows"
    ):
        rows_beside(table)
    (tmp_path / "_prompts.csv.jsonl").touch()
    assert rows_beside(table) == tmp_path / "_prompts.csv.jsonl"


def test_a_link_to_a_table_stays_a_link(tmp_path):
    link = tmp_path / "link.csv"
    link.symlink_to("table.csv")
    write(link)
    assert link.is_symlink()
    assert (tmp_path / "table.csv").read_bytes() == link.read_bytes() != b""
