"""Rows of JSON arrays and of tables: which column has the prompts, what the others are, places."""

import datetime
import decimal
import json
import os
import sys
from threading import Thread

import pytest

from pagedkv.cli.errors import UsageError
from pagedkv.cli.prompts import Prompt, read
from pagedkv.cli.template import Template

CHAT = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


@pytest.fixture
def parquet(tmp_path):
    """Writes columns to a Parquet file."""
    arrow = pytest.importorskip("pyarrow")
    from pyarrow.parquet import write_table

    def write(**columns) -> str:
        write_table(arrow.table(columns), tmp_path / "p.parquet", row_group_size=2)
        return str(tmp_path / "p.parquet")

    return write


def refusal(file: str, column: str | None = None) -> str:
    with pytest.raises(UsageError) as caught:
        read([], file, column)
    assert len(str(caught.value)) < 500
    return str(caught.value)


# ------------------------------------------------------------------ which column


@pytest.mark.parametrize("name", ["p.csv", "p.jsonl", "p.json", "p.parquet"])
def test_a_column_is_chosen_by_its_name_and_the_others_are_handed_through(written, parquet, name):
    row = {"id": "7", "question": "a", "prompt": "b"}
    if name == "p.csv":
        file = written(name, "id,question,prompt\n7,a,b\n")
    elif name == "p.parquet":
        file = parquet(**{key: [value] for key, value in row.items()})
    else:
        file = written(name, json.dumps(row if name == "p.jsonl" else [row]))
    assert read([], file) == [Prompt("b", {}, {"id": "7", "question": "a"})]
    assert read([], file, "question") == [Prompt("a", {}, {"id": "7", "prompt": "b"})]
    place = {"p.csv": ":2", "p.jsonl": ":1"}.get(name, ", row 1")
    assert refusal(file, "questions") == (
        f"{file}{place}: expected a text or chat messages in 'questions', "
        "got the columns id, question, prompt; did you mean --column question?"
    )
    assert "prompt; --column NAME says which has the prompts" in refusal(file, "xyz")


def test_columns_of_rows_stay_in_the_order_of_the_file(written):
    file = written("p.csv", "id,text,seed,note\n7,a,,x\n")
    (prompt,) = read([], file, "text")
    assert [*prompt.columns.items()] == [("id", "7"), ("text", "a"), ("note", "x")]
    file = written("p.csv", "prompt,id\na,7\n")
    (prompt,) = read([], file, template=Template("{id}: {prompt}"))
    assert [*prompt.columns.items()] == [("prompt", "7: a"), ("id", "7")]


def test_messages_are_a_prompt_where_there_is_no_other(written):
    rows = [{"messages": CHAT, "prompt": "c"}, {"messages": CHAT, "id": 1}]
    file = written("p.jsonl", "\n".join(map(json.dumps, rows)))
    assert read([], file) == [Prompt("c", {}, {"messages": CHAT}), Prompt(CHAT, {}, {"id": 1})]
    assert read([], file, "messages")[0] == Prompt(CHAT, {}, {"prompt": "c"})


def test_a_column_is_refused_where_there_are_none(written):
    said = refusal(written("p.txt", "a\n"), "prompt")
    assert "p.txt:1 has none; files with columns are .csv, .tsv" in said
    assert "p.json, row 2 has none" in refusal(written("p.json", '[{"x": "a"}, "b"]'), "x")
    with pytest.raises(UsageError, match="--column: expected with --file"):
        read(["a"], None, "prompt")


# ------------------------------------------------------------------ JSON arrays


def test_an_array_has_texts_objects_or_chats(written):
    file = written("p.json", "\ufeff" + json.dumps(["a", {"prompt": "b", "seed": 1, "x": 2}, CHAT]))
    assert read([], file) == [Prompt("a"), Prompt("b", {"seed": 1}, {"x": 2}), Prompt(CHAT)]


def test_json_lines_under_the_name_of_json_are_read_as_such(written):
    file = written("p.json", '\n{"prompt": "a"}\n\n{"prompt": "b", "id": 1}\n')
    assert read([], file) == [Prompt("a"), Prompt("b", {}, {"id": 1})]
    assert "p.json:2: expected a JSON object" in refusal(written("p.json", '{"prompt": "a"}\n{'))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "no prompts in"),
        ("[]", "no prompts in"),
        ("a\nb\n", "p.json: expected a JSON array, got Expecting value"),
        ('"a"', "p.json: expected an array of texts or of objects, got 'a'"),
        ("[3]", "p.json, row 1: expected a text or chat messages in 'prompt', got 3"),
        ('[["b"], 3]', "p.json, row 1: expected chat messages"),
        ('[{"role": "user", "content": "b"}]', "row 1: expected a text or chat messages in 'pro"),
        ('["a", -Infinity]', "-Infinity, which is no finite number"),
        (r'["\ud83d"]', "p.json: expected a JSON array, got"),
        ('[{"prompt": "a", "seed": -1}]', "p.json, row 1: seed: expected an integer"),
    ],
)
def test_what_of_an_array_cannot_be_used_is_said_with_its_place(written, content, says):
    assert says in refusal(written("p.json", content))


# ------------------------------------------------------------------ CSV


@pytest.mark.parametrize("delimiter", [",", ";", "\t"])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_a_csv_is_read_whatever_a_spreadsheet_makes_of_it(written, delimiter, end, mark):
    lines = ["id,prompt,note", '1,"One, two;\tthree\n""four"" é",x', "", ",,", "2,five, ", "3,six"]
    text = mark + end.join(line if '"' in line else line.replace(",", delimiter) for line in lines)
    text = text.replace('1,"', f'1{delimiter}"').replace('",x', f'"{delimiter}x')
    assert read([], written("p.csv", text)) == [
        Prompt('One, two;\tthree\n"four" é', {}, {"id": "1", "note": "x"}),
        Prompt("five", {}, {"id": "2", "note": " "}),
        Prompt("six", {}, {"id": "3"}),
    ]


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_line_ends_within_a_cell_stay_as_they_are(written, end):
    cells = ["a\r\nb", "a\nb", "a\rb"]
    rows = ["prompt,note", *(f'"{cell}","{cell}"' for cell in cells)]
    found = read([], written("p.csv", end.join(rows)))
    assert found == [Prompt(cell, {}, {"note": cell}) for cell in cells]


def test_a_header_with_commas_in_its_names_is_told_by_the_column_of_the_prompts(written):
    file = written("p.csv", "a,b,c;Prompt \n1,2;hello, you\n")
    assert read([], file, "Prompt") == [Prompt("hello, you", {}, {"a,b,c": "1,2"})]


def test_a_tsv_stands_between_tabs_alone(written):
    file = written("p.TSV", 'prompt;x\tid\n"a\tb"\t1\n')
    assert read([], file, "prompt;x") == [Prompt("a\tb", {}, {"id": "1"})]


def test_columns_without_a_name_are_left_out(written):
    file = written("p.csv", ",prompt,,x,\n0,a,b,1,\n")
    assert read([], file) == [Prompt("a", {}, {"x": "1"})]


def test_options_of_a_row_are_numbers_and_all_else_is_text(written):
    text = "prompt,max_new_tokens,temperature,seed,id\n1,32,0.5,7,08\ntrue,,, ,\nc,16.0,0,1,x\n"
    assert read([], written("p.csv", text)) == [
        Prompt("1", {"max_new_tokens": 32, "temperature": 0.5, "seed": 7}, {"id": "08"}),
        Prompt("true", {}, {"id": ""}),
        Prompt("c", {"max_new_tokens": 16, "temperature": 0, "seed": 1}, {"id": "x"}),
    ]


def test_a_cell_may_be_long(written):
    text = "x" * 1_000_000
    assert read([], written("p.csv", f"prompt\n{text}\n"))[0].content == text


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("", "no prompts in"),
        ("id,prompt\n", "no prompts in"),
        ("id,prompt\n\n,\n", "no prompts in"),
        ("id,prompt\n1,\n2,\n", ":2: expected a text or chat messages in 'prompt', got ''"),
        ("id,prompt\n1\n", ":2: expected a text or chat messages in 'prompt', got the columns id;"),
        ("id,prompt\n1,a, b\n", ":2: expected 2 cells, as the header has, got 3; a cell with ','"),
        ('id,prompt\n1,"a\n2,b\n', ":2: expected a row of cells, got unexpected end of data"),
        ('id,prompt\n1,"a"b\n', ":2: expected a row of cells, got ',' expected after '\"'"),
        (
            "id;question\n1;a\n",
            ":2: expected a text or chat messages in 'prompt', got the columns ",
        ),
        ("prompt,x,x\na,1,2\n", ":1: expected columns of different names, got x twice"),
        ("prompt,seed\na,abc\n", ":2: seed: expected an integer from 0 on"),
        ("prompt,temperature\na,NaN\n", ":2: temperature: expected a number from 0 on"),
        (b"prompt\ncaf\xe9\n", ":2: expected text in UTF-8, got the byte 0xe9; --encoding says"),
    ],
)
def test_what_of_a_csv_cannot_be_used_is_said_with_its_line(written, content, says):
    assert says in refusal(written("p.csv", content))


@pytest.mark.skipif(sys.platform == "win32", reason="named pipes of Unix")
@pytest.mark.parametrize(
    ("name", "content"),
    [("pipe.csv", "x;prompt\n1;a\n"), ("pipe.jsonl", '{"prompt": "a"}'), ("pipe.fifo", "a\n")],
)
def test_a_named_pipe_may_say_what_it_carries(tmp_path, name, content):
    os.mkfifo(tmp_path / name)
    writer = Thread(target=(tmp_path / name).write_text, args=(content,))
    writer.start()
    assert [prompt.content for prompt in read([], str(tmp_path / name))] == ["a"]
    writer.join()


# ------------------------------------------------------------------ Parquet


def test_columns_of_parquet_become_what_json_has(parquet):
    file = parquet(
        prompt=["a", "b", "c"],
        max_new_tokens=[3.0, None, 5.0],  # what a gap makes of integers
        when=[datetime.date(2024, 5, 1), None, datetime.date(2024, 5, 3)],
        price=[decimal.Decimal("1.50"), None, None],
        score=[0.5, float("nan"), float("inf")],
        raw=[b"\x00\xff", b"", None],
        tags=[["x"], [], None],
        of=[{"x": 1}, {"x": 2}, {"x": None}],
        good=[True, False, None],
    )
    first, second, third = read([], file)
    assert [first.content, second.content, third.content] == ["a", "b", "c"]
    assert [p.options for p in (first, second, third)] == [
        {"max_new_tokens": 3},
        {},
        {"max_new_tokens": 5},
    ]
    assert first.others == {
        "when": "2024-05-01", "price": "1.50", "score": 0.5, "raw": "AP8=", "tags": ["x"],
        "of": {"x": 1}, "good": True,
    }  # fmt: skip
    assert (second.others["score"], third.others["score"], third.others["tags"]) == (None,) * 3
    json.dumps([first.others, second.others, third.others], allow_nan=False)


def test_chat_messages_of_parquet_are_a_prompt(parquet):
    assert read([], parquet(messages=[CHAT], id=[3])) == [Prompt(CHAT, {}, {"id": 3})]


def test_what_of_parquet_cannot_be_used_is_said_with_its_row(parquet, written):
    assert refusal(parquet(prompt=[None, "", None])).endswith(
        "p.parquet, row 1: expected a text or chat messages in 'prompt', got None"
    )
    assert "no prompts in" in refusal(parquet(prompt=[]))
    for content in (b"", b"prompt\na\n", b"PAR1 and no more", b"PAR1\xff\xff\xff\xffPAR1"):
        assert "--file: cannot read" in refusal(written("p.parquet", content))


def test_bytes_of_parquet_are_no_prompts(parquet):
    assert refusal(parquet(prompt=[b"a"])).endswith(
        "p.parquet: expected text in the column 'prompt', got binary"
    )
    assert "column 'question', got binary" in refusal(parquet(question=[b"a"]), "question")
    assert read([], parquet(prompt=["a"], raw=[b"a"]))[0].others == {"raw": "YQ=="}


def test_a_date_that_python_has_not_is_said(parquet):
    import pyarrow

    when = pyarrow.array([2**62], pyarrow.timestamp("us"))
    assert "--file: cannot read" in refusal(parquet(prompt=["a"], when=when))


def test_a_parquet_file_that_is_not_there_is_asked_back(parquet):
    file = parquet(prompt=["a"])
    assert "did you mean p.parquet?" in refusal(file.replace("p.parquet", "q.parquet"))


@pytest.mark.parametrize("package", ["pyarrow", "pyarrow.parquet"])
def test_a_missing_package_is_named_with_what_installs_it(written, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    assert refusal(written("p.parquet", b"")).endswith(
        "p.parquet needs pyarrow: pip install 'pagedkv[parquet]'"
    )
