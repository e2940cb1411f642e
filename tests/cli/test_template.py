"""`--template`: prompts made of the columns of a table."""

import json

import pytest

from pagedkv.cli.errors import UsageError
from pagedkv.cli.prompts import read
from pagedkv.cli.template import Template
from tests.cli.conftest import SHORT


def filled(text: str, row: dict) -> str:
    ((_, found),) = Template(text).filled([("t.csv:2", row)])
    prompt = found.pop("--template")
    assert found == row  # every column is handed on
    return prompt


@pytest.mark.parametrize(
    ("text", "prompt"),
    [
        (r"Subject: {subject}\n{text}\nLabel:", "Subject: s\n{t}\\n\nLabel:"),
        (r"{text}{text}", r"{t}\n{t}\n"),
        (r'{{"mood": "{subject}"}}', '{"mood": "s"}'),
        (r"{my column}\t{a.b}", "1\t[2]"),
        (r"C:\\new\x {gone}{flag}{n}", r"C:\new\x true1.5"),
    ],
)
def test_a_template_is_filled_with_cells_as_they_are(text, prompt):
    # Alone finds: escapes that reach into cells, braces of cells, attributes in place of names.
    cells = {"subject": "s", "text": r"{t}\n", "my column": 1, "a.b": [2], "gone": None}
    assert filled(text, cells | {"flag": True, "n": 1.5}) == prompt


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{text", "expected '}' before end of string; {{ and }} are braces"),
        ("text}", "Single '}' encountered; {{ and }} are braces"),
        ("{}", "expected the name of a column in braces, got {}; {{ and }}"),
        ("{n:.2f}", "got {n:.2f}"),
        ("{n!r}", "got {n!r}"),
        ("Label:", "expected columns in braces, such as {text}, got none"),
    ],
)
def test_a_template_that_cannot_be_read_is_refused(text, said):
    # Alone finds: a mistake of Python's own, without the option's name, or a form that is dropped.
    with pytest.raises(UsageError) as refused:
        Template(text)
    assert str(refused.value).startswith("--template: ")
    assert said in str(refused.value)


def test_a_name_that_is_no_column_is_refused_with_the_columns_that_there_are(written):
    # Alone finds: a misspelt name that fills every prompt with nothing.
    file = written("t.csv", "id;subject;text\n1;a;b\n")
    with pytest.raises(UsageError) as refused:
        read([], file, template=Template("{subjet}: {text}"))
    assert str(refused.value) == (
        f"--template: {file}:2 has no column 'subjet', its columns are id, subject, text; did you "
        "mean subject?"
    )
    with pytest.raises(UsageError, match=r"a file of rows with columns, .*txt:1 has"):
        read([], written("t.txt", "a\n"), template=Template("{text}"))


def test_a_row_that_lacks_a_column_or_fills_nothing_is_a_bad_one(written):
    # Alone finds: one row's gap that ends the job, or fills its prompt with a part.
    file = written("t.jsonl", '{"a": "b", "c": "d"}\n{"a": "b"}\n{"a": "", "c": null}\n')
    first, *bad = read([], file, template=Template("{a}{c}"))
    assert (first.content, first.cause) == ("bd", None)
    assert [each.cause for each in bad] == ["empty", "empty"]
    assert bad[0].error == "expected a text or chat messages in 'prompt', got the columns a"


def test_a_table_of_a_tables_answers_has_the_filled_prompt(generate, tmp_path):
    # Alone finds: prompts that are lost, where the other columns come from the file of the table.
    parquet, pyarrow = (pytest.importorskip(name) for name in ("pyarrow.parquet", "pyarrow"))
    file, out = tmp_path / "t.parquet", tmp_path / "out.parquet"
    columns = {"prompt": ["b", "c"], "n": pyarrow.array([1, None], pyarrow.int16())}
    parquet.write_table(pyarrow.table(columns), file)
    generate("-f", file, "--template", "a{prompt}", "-o", out)
    table = parquet.read_table(out)
    assert table["prompt"].to_pylist() == ["ab", "ac"]
    assert table.schema.field("n").type == pyarrow.int16()


@pytest.mark.parametrize("given", [("a", None, None), ([], None, None), ([], "FILE", "text")])
def test_a_template_is_for_one_file_alone(written, given, monkeypatch):
    # Alone finds: arguments that pass unfilled beside it, or a --column that is dropped.
    monkeypatch.setattr("sys.stdin", None)
    arguments, file, column = given
    file = file and written("t.csv", "text\na\n")
    with pytest.raises(UsageError, match="--template: expected with --file"):
        read(arguments, file, column, template=Template("{text}"))


def test_generate_answers_filled_templates_and_keeps_the_options_of_a_row(
    generate, tmp_path, written, rows
):
    # Alone finds: a template that is encoded unfilled, or takes a row's own options away.
    lines = [{"a": "bc", "b": "d", "max_new_tokens": 3, "id": 7}, {"a": "e", "b": ""}]
    file = written("t.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
    out = tmp_path / "out.jsonl"
    generate("-f", file, "--template", "a{a}f{b}", "--tokens", "-o", out)
    first, second = sorted(rows(out), key=lambda row: row["index"])
    assert (first["prompt"], first["a"], first["b"], first["id"]) == ("abcfd", "bc", "d", 7)
    assert first["answer"].strip() == generate("abcfd", "-n", 3).stdout.strip()
    assert (second["prompt"], len(second["tokens"])) == ("aef", 6)

    refused = generate("-f", file, "--template", "a{a}g{b}", "--tokens", "-o", out, code=2).stderr
    assert 'template: "a{a}f{b}" there, "a{a}g{b}" here' in refused


def test_a_filled_template_is_the_users_message_and_raw_gives_it_as_it_is(
    pagedkv, chat_model, written
):
    # Alone finds: a template that passes the model's own by, or a prefix that it takes away.
    file, prefix = written("t.csv", "a,b\nb,c\n"), written("prefix.txt", "d")
    common = ("generate", chat_model, *SHORT)
    asked = (*common, "-f", file, "--template", "{b}{a}", "--prefix", prefix)
    assert pagedkv(*asked).stdout == pagedkv(*common, "cb", "--prefix", prefix).stdout
    assert pagedkv(*asked, "--raw").stdout == pagedkv(*common, "--raw", "dcb").stdout
    assert pagedkv(*asked).stdout != pagedkv(*asked, "--raw").stdout
