"""Where prompts come from, and what of them cannot be used."""

import gzip
import io
import json
import os
import subprocess
import sys
from threading import Thread

import pytest

from pagedkv.cli.encode import Encoder
from pagedkv.cli.errors import UsageError
from pagedkv.cli.prompts import Prompt, read, read_prefix
from pagedkv.cli.rows import UNREAD


class Letters:
    """A tokenizer that gives back the text it was given."""

    chat_template = "yes"

    def __call__(self, texts):
        return {"input_ids": list(texts)}

    def apply_chat_template(self, messages, **options):
        goes_on = messages[-1]["role"] == "assistant"
        assert options == {
            "continue_final_message" if goes_on else "add_generation_prompt": True,
            "tokenize": True,
            "return_dict": False,
        }
        if any(m["role"] == "tool" for m in messages):
            raise RuntimeError("no tools here")
        return [(m["role"], m["content"]) for m in messages]


@pytest.fixture
def piped(monkeypatch):
    def pipe(content: bytes) -> None:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content), "ascii"))

    return pipe


def contents(prompts) -> list:
    return [prompt.content for prompt in prompts]


# ------------------------------------------------------------------ text


def test_arguments_come_before_the_lines_of_a_file(written):
    file = written("prompts.txt", "three\nfour\n")
    assert contents(read(["one", "two"], file)) == ["one", "two", "three", "four"]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("a\n\n  \n\nb", ["a", "b"]),
        ("a\r\n\r\nb\r\n", ["a", "b"]),
        ("a\r\rb\r", ["a", "b"]),
        ("one\u2028still one\x85and\x0b\x0cso on\none\rtoo\n", None),
        (b"\xef\xbb\xbfa\nb\n", ["a", "b"]),
        (" a \n\tb\t\n", [" a ", "\tb\t"]),
    ],
    ids=["empty lines", "CRLF", "CR", "other separators", "BOM", "spaces"],
)
def test_every_line_that_says_something_is_a_prompt(written, content, expected):
    if expected is None:
        expected = content.rstrip("\n").split("\n")
        assert len(expected) == 2
    assert contents(read([], written("prompts.txt", content))) == expected


def test_json_in_a_text_file_is_text(written):
    assert contents(read([], written("prompts.txt", '{"prompt": "a"}\n'))) == ['{"prompt": "a"}']


@pytest.mark.parametrize("file", [None, "-"])
def test_standard_input_is_utf_8_whatever_the_locale_says(piped, file):
    piped("\ufeffä\r\n字\n".encode())
    assert contents(read([], file)) == ["ä", "字"]


def test_standard_input_may_be_json_lines(piped):
    piped(b'\xef\xbb\xbf{"prompt": "a", "seed": 3}\n')
    assert read([], "-") == [Prompt("a", {"seed": 3})]


def test_standard_input_is_left_alone_where_prompts_are_given(piped):
    piped(b"other\n")
    assert contents(read(["a"], None)) == ["a"]


@pytest.mark.parametrize("stdin", [b"", b"\n \n", None])
def test_no_prompts_at_all_is_said(piped, monkeypatch, stdin):
    if stdin is None:  # closed, as a service may start it
        monkeypatch.setattr(sys, "stdin", None)
        with pytest.raises(UsageError, match="--file: cannot read standard input, it is closed"):
            read(["a"], "-")
    else:
        piped(stdin)
    with pytest.raises(UsageError, match="no prompts"):
        read([], None)


def test_files_that_cannot_be_read_are_named(written, tmp_path):
    for option, reader in (("--file", lambda file: read([], file)), ("--prefix", read_prefix)):
        with pytest.raises(UsageError, match=rf"{option}: cannot read .*nothing"):
            reader(str(tmp_path / "nothing"))
        with pytest.raises(UsageError, match=f"{option}: cannot read"):
            reader(str(tmp_path))
    with pytest.raises(UsageError, match=r"--prefix: cannot read .*UTF-8, got the byte 0xe9"):
        read_prefix(written("latin.txt", b"caf\xe9\n"))


@pytest.mark.parametrize("content", [b"PAR1\xff\x15", b"a\0b\0", b"\xff\xfea"])
@pytest.mark.parametrize("name", ["p.txt", "p.jsonl", "p.json", "p.csv", "p.tsv", "prompts"])
def test_a_binary_file_is_refused_whatever_its_name(written, name, content):
    with pytest.raises(UsageError, match=r"expected text in UTF-(8|16), got |expected a JSON "):
        read([], written(name, content))


def test_an_empty_file_is_named(written):
    for content in ("", "\ufeff", "\n \r\n"):
        with pytest.raises(UsageError, match=r"no prompts in .*prompts\.txt"):
            read([], written("prompts.txt", content))


def test_a_file_without_an_ending_is_text(written):
    for name in ("prompts", "csv", ".csv"):
        assert contents(read([], written(name, "a,b\nc\n"))) == ["a,b", "c"]


@pytest.mark.skipif(sys.platform == "win32", reason="named pipes of Unix")
@pytest.mark.parametrize("content", ["a\nb\n", '{"prompt": "a"}\n{"prompt": "b"}\n'])
def test_a_named_pipe_is_read_as_standard_input_is(tmp_path, content):
    os.mkfifo(tmp_path / "pipe")
    writer = Thread(target=(tmp_path / "pipe").write_text, args=(content,))
    writer.start()
    assert contents(read([], str(tmp_path / "pipe"))) == ["a", "b"]
    writer.join()


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="devices of Linux")
def test_a_device_that_never_ends_is_refused(tmp_path, monkeypatch):
    """A fault here reads until memory is full."""
    (tmp_path / "prompts.jsonl").symlink_to("/dev/full")
    for file in ("/dev/zero", str(tmp_path / "prompts.jsonl")):
        with pytest.raises(UsageError, match=f"--file: expected a file or a pipe, got {file}, a d"):
            read([], file)
    with pytest.raises(UsageError, match="--prefix: expected a file or a pipe, got /dev/zero"):
        read_prefix("/dev/zero")
    with open("/dev/zero") as endless:
        monkeypatch.setattr(sys, "stdin", endless)
        with pytest.raises(UsageError, match=r"--file: expected .*, got standard input, a device"):
            read([], None)
    with pytest.raises(UsageError, match="there are no prompts in /dev/null"):
        read([], os.devnull)


# ------------------------------------------------------------------ other kinds


@pytest.mark.parametrize("suffix", [*UNREAD, ".XLSX"])
def test_a_file_of_another_kind_is_refused_with_the_command_that_helps_before_it_is_opened(suffix):
    with pytest.raises(UsageError) as caught:
        read(["a"], f"my prompts{suffix}")
    says = str(caught.value)
    assert "expected .txt (a prompt a line), .jsonl, .json, .csv, .tsv or .parquet, " in says
    assert f"got my prompts{suffix}; this makes one: " in says
    assert f"'my prompts{suffix}'" in says
    assert "\n" not in says


@pytest.mark.parametrize("name", ["p.docx", "p.csv2", "prompts.md", "v1.2"])
def test_an_unknown_ending_is_refused_by_name(written, name):
    with pytest.raises(UsageError, match=rf"\.parquet, got .*/{name}; rename it to what it is"):
        read([], written(name, "a\n"))


def test_the_command_that_a_file_is_refused_with_makes_json_lines_of_it(written, tmp_path):
    packed = written("my rows.jsonl.gz", gzip.compress(b'{"id": "1", "prompt": "a"}\n'))
    with pytest.raises(UsageError) as caught:
        read([], packed)
    _, command = str(caught.value).split("this makes one: ")
    subprocess.run(command, shell=True, check=True)
    assert read([], str(tmp_path / "my rows.jsonl")) == [Prompt("a", {}, {"id": "1"})]


@pytest.mark.parametrize("name", ["p.csv", "p.jsonl", "p.parquet", "p.xlsx", "p.txt"])
def test_a_file_given_as_a_prompt_is_asked_back(written, monkeypatch, tmp_path, name):
    written(name, "a\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError, match=f"prompt 1: {name} is a file; --file {name} takes its"):
        read(["a", name], None)
    assert contents(read(["What is in other.csv?", "other.csv"], None))[1] == "other.csv"


def test_a_prompt_longer_than_any_name_may_end_as_one():
    text = "word " * 1000 + "notes.txt"
    assert contents(read([text], None)) == [text]


@pytest.mark.parametrize("suffix", ["", ".csv", ".parquet", ".jsonl"])
def test_a_name_longer_than_any_is_refused(suffix):
    with pytest.raises(UsageError, match="--file: cannot read x"):
        read([], "x" * 300 + suffix)


def test_a_name_spelt_nearly_like_a_file_is_asked_back(written, tmp_path):
    written("prompts.csv", "prompt\na\n")
    with pytest.raises(UsageError, match=r"No such file .*; did you mean prompts\.csv\?"):
        read([], str(tmp_path / "promts.csv"))


def test_an_argument_that_is_no_text_is_refused():
    with pytest.raises(UsageError, match="prompt 1: expected text in UTF-8"):
        read(["fine", b"caf\xe9".decode("utf-8", "surrogateescape")], None)


# ------------------------------------------------------------------ JSON lines


def test_rows_keep_their_options_and_hand_the_rest_through(written):
    first = {"id": 7, "prompt": "a", "max_new_tokens": 3, "temperature": 0, "seed": 0, "x": [1]}
    second = {"prompt": "b\u2028c", "max_new_tokens": None, "temperature": 0.5}
    lines = [json.dumps(first), "", json.dumps(second, ensure_ascii=False)]
    found = read([], written("prompts.jsonl", "\r\n".join(lines)))
    options = {"max_new_tokens": 3, "temperature": 0, "seed": 0}
    assert found[0] == Prompt("a", options, {"id": 7, "x": [1]})
    assert found[1] == Prompt("b\u2028c", {"temperature": 0.5})


@pytest.mark.parametrize("name", ["p.JSONL", "p.Jsonl", "p.ndjson"])
def test_json_lines_are_known_by_their_name_in_any_case(written, name):
    assert read([], written(name, '{"prompt": "a", "seed": 1}\n')) == [Prompt("a", {"seed": 1})]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("not json", "expected a JSON object"),
        ('{"prompt": "a"} {}', "expected a JSON object"),
        ("[" * 100_000, "expected a JSON object"),
        (r'{"prompt": "\ud83d"}', "expected a JSON object"),
        (r'{"prompt": "a", "note": "\ud83d"}', "expected a JSON object"),
        ('"a"', "with a 'prompt'"),
        ('{"prompt": "a", "max_new_tokens": "9"}', "max_new_tokens: expected a positive integer"),
        ('{"prompt": "a", "max_new_tokens": 0}', "max_new_tokens: expected a positive integer"),
        ('{"prompt": "a", "max_new_tokens": true}', "max_new_tokens: expected a positive integer"),
        ('{"prompt": "a", "temperature": -1}', "temperature: expected a number"),
        ('{"prompt": "a", "temperature": Infinity}', "Infinity, which is no finite number"),
        ('{"prompt": "a", "temperature": 1e400}', "1e400, which is no finite number"),
        ('{"prompt": "a", "note": [-1e400]}', "-1e400, which is no finite number"),
        ('{"prompt": "a", "prompt": "b"}', "'prompt' twice"),
        ('{"prompt": "a", "note": {"x": 1, "x": 1}}', "'x' twice"),
        ('{"prompt": "a", "seed": 1' + "0" * 5000 + "}", "expected a JSON object"),
        ('{"prompt": "a", "seed": 4611686018427387904}', "seed: expected an integer"),
        ('{"prompt": "a", "temperature": 1' + "0" * 400 + "}", "temperature: expected a number"),
        ('{"prompt": "a", "seed": 1.5}', "seed: expected an integer"),
        ('{"prompt": "a", "seed": -1}', "seed: expected an integer"),
    ],
)
def test_a_line_that_cannot_be_used_is_named_with_its_place(written, line, says):
    file = written("prompts.jsonl", f'{{"prompt": "a"}}\n\n{line}\n')
    with pytest.raises(UsageError) as caught:
        read([], file)
    assert f"{file}:3: " in str(caught.value)
    assert says in str(caught.value)
    assert len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ('{"text": "a"}', "got the columns text; --column NAME says which has the prompts"),
        ('{"prompt": 3}', "expected a text or chat messages in 'prompt', got 3"),
        ('{"prompt": null}', "expected a text or chat messages in 'prompt', got None"),
        ('{"prompt": ""}', "expected a text or chat messages in 'prompt', got ''"),
        ('{"prompt": []}', "chat messages"),
        ('{"prompt": ["a"]}', "chat messages"),
        ('{"prompt": [{"role": "user"}]}', "chat messages"),
        (
            '{"prompt": [{"role": "user", "content": [{"type": "image", "url": "cat.png"}]}]}',
            "expected messages of text, got 'image'; BatchGenerator takes images and audio",
        ),
        ('{"question": "a", "id": 1}', "expected a text or chat messages in 'prompt', got the col"),
        ('{"question": "a", "id": 1}', "got the columns question, id; --column NAME"),
        ('{"Prompt": "a", "id": 1}', "did you mean --column Prompt?"),
        ('{"custom_id": "1", "body": {"messages": []}}', "OpenAI's batch format; this makes rows"),
        ("{}", "got the columns none"),
        ('{"messages": "a", "prompt": 3}', "expected a text or chat messages in 'prompt'"),
    ],
)
def test_a_file_of_lines_that_are_no_prompts_is_refused_with_the_first(written, line, says):
    file = written("prompts.jsonl", f"\n{line}\n{line}\n")
    with pytest.raises(UsageError) as caught:
        read([], file)
    assert f"{file}:2: " in str(caught.value)
    assert says in str(caught.value)
    assert len(str(caught.value)) < 400


# ------------------------------------------------------------------ prefixes and templates


def test_a_prefix_is_text_or_chat_messages(written):
    messages = [{"role": "system", "content": "be brief"}]
    assert read_prefix(None) is None
    assert read_prefix(written("a.txt", "\ufeffbe\r\nbrief\n")) == "be\nbrief\n"
    assert read_prefix(written("a.json", "\ufeff" + json.dumps(messages))) == messages
    assert read_prefix(written("b.JSON", json.dumps(messages))) == messages


@pytest.mark.parametrize("content", ["", "no", "{}", "[]", '["a"]', '[{"role": "user"}]'])
def test_a_json_prefix_holds_chat_messages(written, content):
    with pytest.raises(UsageError, match=r"a\.json"):
        read_prefix(written("a.json", content))


def encoded(prompts, prefix=None, raw=False, tokenizer=None, template=None):
    encoder = Encoder(prefix, tokenizer or Letters(), raw, template or {})
    encoder.encode(dict(enumerate(prompts)))
    return [prompt.ids for prompt in prompts]


def test_prompts_go_through_the_template_where_there_is_one():
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    turns = [("user", "a"), ("assistant", "b")]
    assert encoded([Prompt("c"), Prompt(chat)]) == [[("user", "c")], turns]
    assert encoded([Prompt(chat)], "hi") == [[("system", "hi"), *turns]]
    assert encoded([Prompt("c")], chat) == [[*turns, ("user", "c")]]


def test_without_a_template_a_prefix_stands_before_the_text():
    assert encoded([Prompt("a"), Prompt("b")], "x ", raw=True) == ["x a", "x b"]
    bare = Letters()
    bare.chat_template = None
    assert encoded([Prompt("a")], tokenizer=bare) == ["a"]


def test_chat_messages_need_a_template():
    chat = [{"role": "user", "content": "a"}]
    with pytest.raises(UsageError, match="chat template"):
        encoded([Prompt("a"), Prompt(chat)], raw=True)
    with pytest.raises(UsageError, match="chat template"):
        encoded([Prompt("a")], chat, raw=True)


def test_what_a_template_refuses_is_an_error_of_its_row():
    found = [Prompt("a"), Prompt([{"role": "tool", "content": "b"}])]
    assert encoded(found) == [[("user", "a")], []]
    assert [prompt.cause for prompt in found] == [None, "template"]
    assert found[1].error == "the chat template refuses it: no tools here"


@pytest.mark.parametrize("content", ["c", [{"role": "user", "content": "c"}]])
def test_a_template_is_told_what_was_said_of_it_and_names_it_does_not_know_are_refused(content):
    class Speaks(Letters):
        chat_template = "{{ enable_thinking }}{{ tools }}"

        def apply_chat_template(self, messages, tools=None, **options):
            return [tools, options["enable_thinking"]]

    speaks, said = Speaks(), {"enable_thinking": False, "tools": [{}]}
    assert encoded([Prompt(content)], tokenizer=speaks, template=said) == [[[{}], False]]
    for wrong, why in (({"thinkng": 1}, "thinkng"), ({"tools": 3}, "expected a list")):
        with pytest.raises(UsageError, match=rf"^--chat-template-kwargs: .*{why}"):
            encoded([Prompt(content)], tokenizer=speaks, template=wrong)
    speaks.chat_template = None
    with pytest.raises(UsageError, match=r"^--chat-template-kwargs: .*a chat template"):
        encoded([Prompt("c")], tokenizer=speaks, template=said)
