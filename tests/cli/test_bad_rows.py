"""Rows whose prompt is none: each has an error, the others are answered, nothing is tried again."""

import csv
import json
import sys

import pytest

from pagedkv.cli import job
from pagedkv.cli.errors import UsageError
from pagedkv.cli.prompts import read
from tests.cli.conftest import SHORT

LONG = "d" * 300  # the model takes 256 tokens


def causes(file: str, **options) -> list[str | None]:
    return [prompt.cause for prompt in read([], file, **options)]


def by_index(rows: list[dict]) -> dict[int, dict]:
    return {row["index"]: row for row in rows}


# ------------------------------------------------------------------ what is none


def test_cells_that_are_no_prompts_are_told_apart_from_those_beside_them(written):
    lines = [
        {"prompt": "a"},
        {"prompt": ""},
        {"prompt": None},
        {"id": 1},
        {"prompt": " \n"},
        {"prompt": 3},
        {"prompt": {"x": 1}},
        {"prompt": []},
        {"prompt": [{"role": "user"}]},
        {"prompt": [{"role": "user", "content": "a"}]},
    ]
    expected = [None, *["empty"] * 4, *["kind"] * 4, None]
    assert causes(written("p.json", json.dumps(lines))) == expected
    assert causes(written("p.jsonl", "\n".join(map(json.dumps, lines)))) == expected
    assert causes(written("p.jsonl", '{"prompt": NaN}\n{"prompt": "a", "x": NaN}')) == [
        "empty",
        None,
    ]
    assert causes(written("p.json", '["a", 3, null, ""]')) == [None, "kind", "empty", "empty"]


def test_cells_of_a_csv_may_be_empty_where_its_lines_are_not(written):
    assert causes(written("p.csv", 'id,prompt\n1,a\n2,\n3," "\n\n,\n4\n')) == [
        None, "empty", "empty", "empty",
    ]  # fmt: skip
    # As pandas writes an empty cell of a table with one column.
    assert causes(written("p.csv", 'prompt\na\n""\n\nb\n')) == [None, "empty", None]


def test_cells_of_parquet_may_be_null(tmp_path):
    arrow = pytest.importorskip("pyarrow")
    from pyarrow.parquet import write_table

    write_table(arrow.table({"prompt": ["a", None, ""]}), tmp_path / "p.parquet")
    assert causes(str(tmp_path / "p.parquet")) == [None, "empty", "empty"]


def test_a_row_that_cannot_be_decoded_is_told_with_its_byte(written):
    for name, text in (
        ("p.csv", "prompt,note\na,b\ncaf\xe9,b\na,caf\xe9\n"),
        ("p.jsonl", '{"prompt": "a"}\n{"prompt": "caf\xe9"}\n{"prompt": "a", "x": ["\xe9"]}\n'),
        ("p.txt", "a\ncaf\xe9\n\xe9\n"),
    ):
        file = written(name, text.encode("latin-1"))
        assert causes(file) == [None, "encoding", "encoding"]
        assert "expected text in UTF-8, got the byte 0xe9" in read([], file)[1].error
        assert read([], file)[1].content == "caf\ufffd"
        assert causes(file, encoding="latin-1") == [None, None, None]
        assert read([], file, encoding="latin-1")[1].content == "caf\xe9"


# ------------------------------------------------------------------ encodings


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be"])
@pytest.mark.parametrize("name", ["p.csv", "p.txt", "p.jsonl"])
def test_utf_16_is_read_where_a_byte_order_mark_says_so(written, name, encoding):
    text = {"p.csv": "prompt\n字é\n", "p.txt": "字é\n", "p.jsonl": '{"prompt": "字é"}'}[name]
    mark = "" if encoding == "utf-16" else "\ufeff"
    file = written(name, (mark + text.replace("\n", "\r\n")).encode(encoding))
    assert [prompt.content for prompt in read([], file)] == ["字é"]
    assert [prompt.content for prompt in read([], file, encoding=encoding)] == ["字é"]


def test_an_encoding_is_refused_where_it_is_none_or_nothing_is_in_it(generate, written, tmp_path):
    file = written("p.txt", "a\n")
    for name in ("cp1253x", "base64", "undefined"):
        said = generate("-f", file, "--encoding", name, code=2).stderr
        assert f"--encoding: expected the name of one, such as cp1252 or utf-16, got '{name}'" in (
            " ".join(said.split())
        )
    with pytest.raises(UsageError, match="--encoding: expected with --file"):
        read(["a"], None, encoding="cp1252")
    with pytest.raises(UsageError, match=r"--encoding: .* text, got x\.parquet"):
        read([], "x.parquet", encoding="cp1252")


# ------------------------------------------------------------------ a job with such rows


@pytest.fixture
def tickets(written):
    return written("t.csv", f"id,text\n1,abc\n2,\n3,{LONG}\n4,bcd\n5,\n")


def test_the_others_are_answered_and_a_finished_job_is_not_computed_again(
    generate, tickets, tmp_path, rows, monkeypatch
):
    out, column = tmp_path / "out.jsonl", ("-f", tickets, "--column", "text")
    said = generate(*column, "-o", out, code=3).stderr
    assert f"2 of 5 prompts are empty, the first in {tickets}:3" in said
    assert f"1 of 5 prompts is longer than the model takes: {tickets}:4" in said
    assert said.endswith(
        "3 of 5 prompts have an error in place of an answer (2 empty, 1 longer than the model "
        "takes); they are not tried again\n"
    )
    found = by_index(rows(out))
    assert [bool(found[i]["error"]) for i in range(5)] == [False, True, True, False, True]
    assert found[1] | {"key": ""} == {
        "key": "", "id": "2", "text": "", "index": 1, "sample": 0, "answer": None,
        "finish_reason": "error", "cached_tokens": 0, "error_cause": "empty",
        "error": "expected a text or chat messages in 'text', got ''",
    }  # fmt: skip
    assert found[2]["error"] == "prompt: the model takes 256 tokens, got 300"

    before = out.read_bytes()
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "pagedkv.cli.generate_run", None)  # nothing is left to run
        again = generate(*column, "-o", out, code=3).stderr
    assert "has 5 of 5 prompts already" in again
    assert "3 of 5 prompts have an error" in again
    assert out.read_bytes() == before


def test_texts_of_such_rows_are_their_errors_in_their_places(generate, tickets):
    said = generate("-f", tickets, "--column", "text", code=3).stdout
    ends = [text.splitlines()[-1] for text in said.split("\n\n")]
    assert [end == "[error]" for end in ends] == [False, True, True, False, True]
    skipped = generate(
        "-f", tickets, "--column", "text", "--empty", "skip", "--too-long", "skip"
    ).stdout
    assert skipped == generate("abc", "bcd").stdout


def test_what_is_skipped_has_no_row_and_no_error(generate, tickets, tmp_path, rows):
    out = tmp_path / "out.csv"
    skip = ("-f", tickets, "--column", "text", "-o", out, "--empty", "skip", "--too-long", "skip")
    assert "2 of 5 prompts are empty" in generate(*skip).stderr
    assert [row["index"] for row in rows(tmp_path / "_out.csv.jsonl")] == [0, 3]
    with out.open(encoding="utf-8-sig", newline="") as file:
        assert [row["id"] for row in csv.DictReader(file)] == ["1", "4"]
    generate(*skip)
    # Another policy goes on with the same file.
    generate(*skip[:-4], code=3)
    assert sorted(by_index(rows(tmp_path / "_out.csv.jsonl"))) == [0, 1, 2, 3, 4]
    generate(*skip)
    assert [row["index"] for row in rows(tmp_path / "_out.csv.jsonl")] == [0, 3]


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_text_that_is_too_long_is_cut_where_it_is_asked_for(
    generate, written, tmp_path, rows, side
):
    text = "".join(chr(ord("a") + i % 26) for i in range(300))
    file, out = written("p.jsonl", json.dumps({"prompt": text, "id": 1})), tmp_path / "out.jsonl"
    generate("-f", file, "-o", out, code=2)  # it is the only one
    assert not out.exists()
    said = generate("-f", file, "-o", out, "--too-long", side).stderr
    assert f"1 of 1 prompts is longer than the model takes; cut on the {side}" in said
    (row,) = rows(out)
    kept = text[-250:] if side == "left" else text[:250]  # six are left to the answer
    assert row["answer"] == generate(kept).stdout.strip()
    assert (row["prompt"], row["cut"], row["error"]) == (text, 50, None)

    other = {"left": "right", "right": "left"}[side]
    said = generate("-f", file, "-o", out, "--too-long", other, code=2).stderr
    assert f"line 1 of {out} was cut with --too-long {side}; give that again" in said
    assert generate("-f", file, "-o", out, "--too-long", side).exit_code == 0


def test_a_chat_is_cut_within_its_last_message(pagedkv, chat_model, written, tmp_path, rows):
    chat = [{"role": "user", "content": "ab"}, {"role": "user", "content": "c" * 200 + "d" * 200}]
    lines = [{"prompt": chat}, {"prompt": [*chat[::-1]]}, {"prompt": "e"}]
    file, out = written("p.jsonl", "\n".join(map(json.dumps, lines))), tmp_path / "out.jsonl"
    job = ("generate", chat_model, *SHORT, "-f", file, "-o", out, "--too-long", "left")
    result = pagedkv(*job)
    assert result.exit_code == 3
    assert "1 of 3 prompts is longer than the model takes; cut on the left" in result.stderr
    assert "1 of 3 prompts is longer than the model takes, and cannot be cut" in result.stderr
    found = by_index(rows(out))
    whole = len("uab" + "u" + "q") + 400
    assert (found[0]["cut"], found[1]["error_cause"]) == (whole - 250, "uncut")
    assert pagedkv(
        "generate", chat_model, *SHORT, "--raw", "uabu" + "c" * 45 + "d" * 200 + "q"
    ).stdout == (f"{found[0]['answer']}\n")


def test_rows_that_a_template_refuses_are_errors_of_their_rows(
    pagedkv, chat_model, written, tmp_path, rows
):
    tool = {"prompt": [{"role": "tool", "content": "a"}]}
    file = written("p.jsonl", json.dumps(tool) + '\n{"prompt": "b"}')
    result = pagedkv("generate", chat_model, *SHORT, "-f", file, "-o", tmp_path / "out.jsonl")
    assert result.exit_code == 3
    found = by_index(rows(tmp_path / "out.jsonl"))
    assert found[0]["error"] == "the chat template refuses it: no tools here"
    assert found[1]["error"] is None


def test_a_cell_that_was_mended_is_answered(generate, written, tmp_path, rows):
    out = tmp_path / "out.jsonl"
    job = ("--column", "text", "-o", out)
    generate("-f", written("t.csv", "id,text\n1,abc\n2,\n"), *job, code=3)
    generate("-f", written("t.csv", "id,text\n1,abc\n2,bcd\n"), *job)
    assert [row["error"] for row in rows(out)] == [None, None]


def test_each_shard_has_the_errors_of_its_rows(generate, tickets, tmp_path, rows):
    job = ("-f", tickets, "--column", "text", "-o", tmp_path / "out.jsonl")
    codes = []
    for shard in ("0/2", "1/2"):
        result = generate(*job, "--shard", shard, code=None)
        codes.append(result.exit_code)
    found = [row for path in sorted(tmp_path.glob("out-*")) for row in rows(path)]
    assert sorted(row["index"] for row in found) == [0, 1, 2, 3, 4]
    assert set(codes) <= {0, 3}
    assert 3 in codes


def test_every_sample_of_such_a_prompt_has_the_error(generate, tickets, tmp_path, rows):
    out = tmp_path / "out.jsonl"
    generate("-f", tickets, "--column", "text", "-o", out, "-k", 2, "--seed", 1, code=3)
    assert [(r["index"], r["sample"]) for r in rows(out) if r["index"] == 1] == [(1, 0), (1, 1)]


def test_what_can_be_mended_by_trying_again_is_tried_again(generate, tickets, tmp_path, rows):
    short = ("-f", tickets, "--column", "text", "-o", tmp_path / "b.jsonl")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(job.BatchGenerator, "stream", stopped)
        assert "stopped" in generate(*short, code=1).stderr
    assert sorted(by_index(rows(tmp_path / "b.jsonl"))) == [1, 2, 4]
    generate(*short, code=3)
    assert sorted(by_index(rows(tmp_path / "b.jsonl"))) == [0, 1, 2, 3, 4]


def stopped(*arguments, **options):
    raise RuntimeError("no memory")
    yield  # which makes it a stream


@pytest.mark.parametrize(
    ("option", "says"),
    [
        (("--empty", "left"), "--empty: expected error, skip, got left"),
        (("--too-long", "cut"), "--too-long: expected error, skip, left, right, got cut"),
    ],
)
def test_a_policy_that_is_none_is_refused_by_name(generate, option, says):
    assert says in generate("abc", *option, code=2).stderr
