"""`pagedkv score`: labels and perplexities of a table, as `BatchGenerator.score` has them."""

import csv
import json
import math

import pytest
import torch
import transformers

from pagedkv import BatchGenerator
from pagedkv.batch.results import Score
from pagedkv.cli import job
from pagedkv.cli.answers import row_of
from pagedkv.cli.errors import UsageError
from pagedkv.cli.prompts import Prompt
from pagedkv.cli.score_run import Labelled
from pagedkv.cli.scoring import Scoring, behind, choices_of
from tests.cli.conftest import LETTERS
from tests.hf.tiny import tiny

CHOICES = ["b", "cde", "字"]
TABLE = "id,kind,text\n1,a,bcd\n2,b,defg\n3,c,bcd\n"
TEMPLATE = "a{kind}: {text}"
TEXTS = ["aa: bcd", "ab: defg", "ac: bcd"]


@pytest.fixture
def score(pagedkv, model):
    def score(*arguments, code: int = 0, model=model, **options):
        result = pagedkv("score", model, "--page-size", 4, *arguments, **options)
        assert result.exit_code == code, result.output
        return result

    return score


@pytest.fixture
def table(written):
    return written("t.csv", TABLE)


@pytest.fixture(scope="session")
def scored(model, chat_model):
    """Scores of texts in Python; of chat messages, with the model that has a template."""

    def scored(prompts, continuations):
        folder = model if isinstance(prompts[0], str) else chat_model
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
        loaded = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
        with BatchGenerator(loaded, tokenizer, page_size=4) as generator:
            return generator.score(prompts, continuations)

    return scored


def by_index(rows):
    return sorted(rows, key=lambda row: row["index"])


def shares(values):
    odds = [math.exp(value) for value in values]
    return [odd / sum(odds) for odd in odds]


# ------------------------------------------------------------------ labels


@pytest.mark.parametrize("normalize", [False, True])
def test_labels_are_those_that_python_gives(
    score, scored, table, written, tmp_path, rows, normalize
):
    # Alone finds: choices scored behind another text, in another order, or by the other measure.
    out, prefix = tmp_path / "out.jsonl", written("prefix.txt", TEMPLATE[0])
    given = ["-f", table, "--prefix", prefix, "--template", TEMPLATE[1:], "-o", out]
    given += ["--choices", ",".join(CHOICES)]
    said = score(*given, *["--normalize"] * normalize).stderr
    words = "mean of their log-probabilities (without" if normalize else "sum of their"
    assert f"choices, 1 to 4 tokens long, are compared by the {words}" in said
    # A text that ends with a letter has a space before a word, not before another script.
    expected = scored(TEXTS, [" b", " cde", "字"])
    labels = set()
    for row, own, line in zip(by_index(rows(out)), expected, csv.DictReader(TABLE.splitlines())):
        values = [one.mean if normalize else one.logprob for one in own]
        best = values.index(max(values))
        labels.add(best)
        assert row["label"] == CHOICES[best]
        assert row["logprob"] == pytest.approx(own[best].logprob, abs=1e-5)
        assert [row[f"p_{c}"] for c in CHOICES] == pytest.approx(shares(values), abs=1e-5)
        assert {name: row[name] for name in line} == line
        assert (row["error"], row["sample"]) == (None, 0)
        assert "prompt" not in row  # which the columns say
    # Else the sum and the mean could not be told apart here.
    assert labels == ({1, 2} if normalize else {2})


def test_labels_of_chats_are_scored_as_answers(pagedkv, scored, chat_model, tmp_path, rows):
    # Alone finds: choices behind the bare text, or with a space in an answer's beginning.
    out, prefix = tmp_path / "out.jsonl", tmp_path / "prefix.txt"
    prefix.write_text("d")
    given = ("score", chat_model, "abc", "bcd", "--prefix", prefix, "--choices", "b,c", "-o", out)
    assert pagedkv(*given).exit_code == 0
    system = {"role": "system", "content": "d"}
    expected = scored(
        [[system, {"role": "user", "content": x}] for x in ("abc", "bcd")], ["b", "c"]
    )
    for row, own in zip(by_index(rows(out)), expected, strict=True):
        assert row["logprob"] == pytest.approx(max(one.logprob for one in own), abs=1e-5)
        values = [one.logprob for one in own]
        assert [row["p_b"], row["p_c"]] == pytest.approx(shares(values), abs=1e-5)
    assert [row["prompt"] for row in by_index(rows(out))] == ["abc", "bcd"]


def test_a_column_that_labels_would_take_the_place_of_is_refused(score, written, tmp_path, rows):
    # Alone finds: right labels that lie in the table and are lost.
    file = written("t.csv", "text,label,seed\nabc,right,x\n")
    given = ["-f", file, "--column", "text", "--choices", "b,c", "-o", tmp_path / "out.jsonl"]
    said = score(*given, code=2).stderr
    assert "--label: the table has a column 'label' already" in said
    score(*given, "--label", "guess")
    (row,) = rows(tmp_path / "out.jsonl")
    assert (row["text"], row["label"]) == ("abc", "right")
    assert row["seed"] == "x"  # no option of a row that is scored
    assert row["guess"] in ("b", "c")


@pytest.mark.parametrize("name", ["", "index", "p_b", "key"])
def test_labels_have_a_name_of_their_own(score, name):
    # Alone finds: a label in the place of a row's number, of which nothing goes on.
    said = score("abc", "--choices", "b,c", "--label", name, code=2).stderr
    assert "--label: expected a name other than index, sample, logprob, p_b, p_c, error" in said


def test_a_row_that_cannot_be_scored_has_the_reason_and_the_others_are_there(
    score, written, tmp_path, rows
):
    # Alone finds: NaN in JSON, a row that never ends, or an exit code that hides it.
    file = written("t.jsonl", json.dumps({"prompt": "a" * 3000}) + '\n{"prompt": "b"}\n')
    out = tmp_path / "out.jsonl"
    said = score("-f", file, "--choices", "b,c", "-o", out, code=3).stderr
    long, short = by_index(rows(out))
    assert "1 of 2 prompts is longer than the model takes" in said
    assert "tokens, got 3000" in long["error"]
    assert (long["label"], long["logprob"], long["p_b"]) == (None, None, None)
    assert (short["error"], short["p_b"] + short["p_c"]) == (None, pytest.approx(1))


def test_a_choice_that_the_model_does_not_take_is_an_error_of_its_row(score, written):
    # Alone finds: a label by the choices that were left.
    file = written("t.jsonl", json.dumps({"prompt": "a" * 250}) + '\n{"prompt": "b"}\n')
    result = score("-f", file, "--choices", f"b,{'c' * 40}", code=1)
    long, short = by_index(map(json.loads, result.stdout.splitlines()))
    assert f"prompt 0: {long['error']}" in result.stderr
    assert (long["label"], short["error"]) == (None, None)


@pytest.mark.parametrize("labels", [["--choices", "b,c"], []])
def test_cells_that_are_no_texts_are_errors_of_their_rows_alone(score, tmp_path, rows, labels):
    # Alone finds: a cell that ends the job, a row that is tried again, or one that a pipe lacks.
    file, out = tmp_path / "t.csv", tmp_path / "out.jsonl"
    file.write_bytes('text\nbcd\n""\nf\xfcr\n'.encode("latin-1"))
    given = ["-f", file, "--column", "text", *labels]
    said = score(*given, "-o", out, code=3).stderr
    assert "1 of 3 prompts is empty" in said
    good, *bad = by_index(rows(out))
    assert (good["error"], good["logprob"] < 0) == (None, True)
    assert all(row["error"] and row["logprob"] is None for row in bad)
    before = out.read_bytes()
    score(*given, "-o", out, code=3)
    assert out.read_bytes() == before
    piped = by_index(map(json.loads, score(*given, code=3).stdout.splitlines()))
    assert [row["error"] for row in piped] == [row["error"] for row in (good, *bad)]
    assert {tuple(row) for row in piped} == {tuple(piped[0])}
    more = ["--encoding", "latin-1", "--empty", "skip"]
    lines = score(*given, *more).stdout.splitlines()
    assert [row["text"] for row in by_index(map(json.loads, lines))] == ["bcd", "f\xfcr"]


def test_labels_within_a_budget_are_the_same(score, table):
    # Alone finds: a plan that asks for the tokens of an answer, which a job that scores has not.
    given = ["-f", table, "--template", TEMPLATE, "--choices", ",".join(CHOICES)]
    plain, planned = (
        by_index(map(json.loads, score(*given, *more).stdout.splitlines()))
        for more in ([], ["--device-memory", "1GiB"])
    )
    for one, other in zip(plain, planned, strict=True):
        assert one["label"] == other["label"]
        assert one["logprob"] == pytest.approx(other["logprob"], abs=1e-5)


# ------------------------------------------------------------------ texts


def test_texts_alone_have_log_probabilities_and_perplexities(score, scored, tmp_path):
    # Alone finds: a first token without its score, or a prefix that is scored along.
    texts, prefix = ["abc", "b", "字字"], tmp_path / "prefix.txt"
    prefix.write_text("de")
    for before, given in (("", []), ("de", ["--prefix", prefix])):
        lines = [json.loads(line) for line in score(*texts, *given).stdout.splitlines()]
        expected = scored([before] * len(texts), [[text] for text in texts])
        for row, (own,) in zip(by_index(lines), expected, strict=True):
            assert row["logprob"] == pytest.approx(own.logprob, abs=1e-5)
            assert row["perplexity"] == pytest.approx(math.exp(-own.mean), rel=1e-5)
            assert row["num_tokens"] == len(own.tokens)
            assert row["prompt"] == texts[row["index"]]


def test_a_perplexity_that_no_number_holds_is_null_and_ends_no_job(score, checkpoints):
    unlikely = tiny(vocab_size=len(LETTERS))
    with torch.no_grad():
        unlikely.lm_head.weight.mul_(3000)
    found = score("abcd", "bcde", model=checkpoints("unlikely", model=unlikely))
    rows = [json.loads(line, parse_constant=pytest.fail) for line in found.stdout.splitlines()]
    assert [row["perplexity"] for row in rows] == [None, None]
    assert all(row["logprob"] < -710 and row["error"] is None for row in rows)


def test_infinities_are_null_and_choices_that_none_can_come_are_an_error():
    """As of a model that masks some of its tokens."""
    text, labels = Scoring(), Scoring(("a", "b"))

    def row(scoring, *logprobs):
        scores = [Score(0, i, [5], [one], [False], 0) for i, one in enumerate(logprobs)]
        return row_of(scoring.types, Prompt("c"), scoring.row(0, scores))

    json.dumps([row(text, -math.inf), mixed := row(labels, -math.inf, -2.0)], allow_nan=False)
    assert (mixed["label"], mixed["p_a"], mixed["p_b"]) == ("b", 0, 1)
    none = row(labels, -math.inf, -math.inf)
    assert none["error"] == "no choice has a probability above 0"
    assert none["label"] is none["p_a"] is None


def test_chat_messages_are_texts_to_score_behind_only(pagedkv, chat_model, written):
    # Alone finds: messages handed to the tokenizer as a text.
    chat = written("t.jsonl", '{"messages": [{"role": "user", "content": "a"}]}')
    refused = pagedkv("score", chat_model, "-f", chat)
    assert refused.exit_code == 2
    assert "prompt 0: expected a text without --choices, got chat messages" in refused.stderr
    assert pagedkv("score", chat_model, "-f", chat, "--choices", "b,c").exit_code == 0
    prefix = written("prefix.json", '[{"role": "system", "content": "a"}]')
    refused = pagedkv("score", chat_model, "a", "--prefix", prefix)
    assert refused.exit_code == 2
    assert "--prefix: expected a text without --choices" in refused.stderr


# ------------------------------------------------------------------ going on, shards, tables


def test_the_same_command_goes_on_and_another_is_refused(
    score, generate, table, tmp_path, rows, monkeypatch
):
    # Alone finds: prompts scored twice, half of a prompt's choices kept, or a file of other labels.
    out = tmp_path / "out.jsonl"
    given = ["-f", table, "--template", TEMPLATE, "-o", out]
    mine = [*given, "--choices", ",".join(CHOICES)]
    stream = job.BatchGenerator.stream_scores

    def interrupted(self, *arguments):
        scores = sorted(stream(self, *arguments), key=lambda score: score.index)
        yield from scores[:4]  # one prompt's choices, and one of the next
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(job.BatchGenerator, "stream_scores", interrupted)
        assert "what was finished is kept" in score(*mine, code=130).stderr
    assert len(rows(out)) == 1
    encode = job.Encoder.encode
    monkeypatch.setattr(job.Encoder, "encode", lambda self, p: seen.append([*p]) or encode(self, p))
    seen: list[list[int]] = []
    assert "out.jsonl has 1 of 3 prompts already" in score(*mine).stderr
    assert len(rows(out)) == 3
    assert [len(indices) for indices in seen] == [2]
    before = out.read_bytes()
    for other, said in (
        (["--choices", "b,cde"], 'choices: ["b", "cde", "字"] there, ["b", "cde"] here'),
        ([*mine[-2:], "--normalize"], "normalize: not given there, true here"),
        ([], "choices: "),
    ):
        assert said in score(*given, *other, code=2).stderr
    said = generate("-f", table, "--template", TEMPLATE, "-o", out, code=2).stderr
    assert 'command: "score" there, not given here' in said
    assert out.read_bytes() == before


def test_shards_have_the_rows_of_the_whole_and_tables_have_their_columns(
    score, table, tmp_path, rows
):
    # Alone finds: a shard that is cut by the options of `generate`, or scores other texts.
    parquet = pytest.importorskip("pyarrow.parquet")
    given = ["-f", table, "--template", TEMPLATE, "--choices", ",".join(CHOICES), "-o"]
    score(*given, tmp_path / "all.jsonl")
    for shard in range(2):
        score(*given, tmp_path / "out.parquet", "--shard", f"{shard}/2")
    for part in tmp_path.glob("out-*-of-00002.parquet"):
        types = {each.name: str(each.type) for each in parquet.read_schema(part)}
        shares = dict.fromkeys([f"p_{choice}" for choice in CHOICES], "double")
        assert types == {
            **dict.fromkeys(["id", "kind", "text", "label", "error"], "string"),
            **{"index": "int64", "sample": "int64", "logprob": "double", **shares},
        }
    parts = [
        row
        for part in sorted(tmp_path.glob("out-*-of-00002.parquet"))
        for row in parquet.read_table(part).to_pylist()
    ]
    whole = by_index(rows(tmp_path / "all.jsonl"))
    for row in whole:
        row.pop("key"), row.pop("made_with", None)
    for one, other in zip(by_index(parts), whole, strict=True):
        assert one.keys() == other.keys()
        numbers = [name for name, value in other.items() if isinstance(value, float)]
        assert [one[name] for name in numbers] == pytest.approx(
            [other[name] for name in numbers], abs=1e-5
        )
        assert all(one[name] == other[name] for name in one.keys() - numbers)

    score(*given, tmp_path / "out.csv")
    with (tmp_path / "out.csv").open(newline="", encoding="utf-8") as file:
        assert [row["label"] for row in csv.DictReader(file)] == [row["label"] for row in whole]


def test_the_time_left_is_told_by_the_tokens_of_prompts(score):
    # Alone finds: long prompts at the end that count as the short ones before them.
    now = 0.0
    pace = Labelled([10, 10, 60], lambda: now)
    now = 8.0
    assert pace.told() == "0/3 rows, 0.0 rows/s, 0:00:08 passed"
    pace.ended(0)
    pace.ended(1)
    assert pace.told() == "2/3 rows, 0.2 rows/s, 0:00:08 passed, about 0:00:24 left"
    pace.ended(2)
    assert pace.share == 1
    assert "tokens scored for 2 rows in" in " ".join(score("abc", "bcd").stderr.split())


# ------------------------------------------------------------------ what is given


def test_choices_stand_between_commas_or_in_the_lines_of_a_file(written):
    # Alone finds: spaces that become part of a label, or a file's name taken for one.
    assert choices_of(None) == ()
    assert choices_of("a, b b ,c") == ("a", "b b", "c")
    assert choices_of("@" + written("labels.txt", "\ufeffa, b\r\n\r\nc\n")) == ("a, b", "c")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a,,b", "expected texts with commas between them, got 'a,,b'"),
        ("", "expected texts with commas"),
        ("a,b,a", "expected different ones, got 'a' twice"),
        ("a", "expected two or more, such as billing,login,other, or @FILE, got a"),
        ("@nowhere.txt", "cannot read nowhere.txt"),
    ],
)
def test_choices_that_are_none_are_refused(text, said):
    # Alone finds: an empty choice, or two that share their columns.
    with pytest.raises(UsageError) as refused:
        choices_of(text)
    assert str(refused.value).startswith("--choices: ")
    assert said in str(refused.value)


def test_a_word_goes_on_behind_a_space_and_other_things_do_not():
    # Alone finds: a label joined to the word before it, or a space in a text that has none.
    assert behind("Label:", "b") == behind("a", "b") == behind("So?", "b") == " b"
    assert behind("Label: ", "b") == behind("(", "b") == behind('"', "b") == behind("", "b") == "b"
    assert behind("字", "b") == "b"
    assert (behind("a", "字"), behind("a", "."), behind("Label:\n", "b")) == ("字", ".", "b")


@pytest.mark.parametrize(
    ("option", "said"), [(["--normalize"], "normalize"), (["--label", "x"], "label")]
)
def test_options_of_labels_are_refused_without_choices(score, option, said):
    # Alone finds: an option that is dropped in silence.
    assert f"--{said}: expected with --choices" in score("abc", *option, code=2).stderr
