"""`pagedkv generate` as a user runs it: what comes out where, from which prompts, how it ends."""

import json
import re

import pytest

from pagedkv.cli import job, loading, main, screen
from pagedkv.kernels.c import eight_bits
from tests.cli.conftest import LETTERS, SHORT, answers
from tests.hf.tiny import tiny

FIELDS = ["index", "sample", "prompt", "tokens", "answer", "logprobs"]
FIELDS += ["finish_reason", "cached_tokens", "error", "key"]


# ------------------------------------------------------------------ what comes out


def test_texts_go_to_standard_output_in_the_order_of_the_prompts(generate, tmp_path):
    file = tmp_path / "prompts.jsonl"
    limits = {"abc": 12, "bcd": 1, "cde": 5, "d" * 30: 3}
    lines = [json.dumps({"prompt": p, "max_new_tokens": n}) for p, n in limits.items()]
    file.write_text("\n".join(lines))
    both = generate("-f", file)
    texts = answers(both.stdout)
    assert [len(text) for text in texts] == list(limits.values())
    for prompt, n, text in zip(limits, limits.values(), texts, strict=True):
        assert generate(prompt, "-n", n).stdout == text + "\n"
    blocks = (f"> {p}\n{text} [cut at {len(text)} tokens]\n" for p, text in zip(limits, texts))
    assert both.stdout == "\n".join(blocks)
    assert "4 rows cut at their limit: --max-new-tokens" in " ".join(both.stderr.split())
    assert "tokens a second" in both.stderr
    assert "21 tokens generated for 4 rows" in " ".join(both.stderr.split())
    assert "\x1b" not in both.output


def test_what_packed_weights_take_is_said_unless_they_are_refused(generate, monkeypatch):
    monkeypatch.setattr(job, "WORTH_SAYING", 1)
    said = "weights packed for this processor: "
    assert said in generate("abc", "-n", 1).stderr
    assert said not in generate("abc", "-n", 1, "--no-pack-weights").stderr


def test_eight_bits_a_weight_are_refused_by_their_option(generate, pagedkv, model, monkeypatch):
    monkeypatch.setattr(eight_bits, "why_not", lambda dtype: "no instructions")
    for command in ("generate", "score"):
        refused = pagedkv(command, model, "--weight-format", "int8", "abc")
        assert refused.exit_code == 2
        expected = "--weight-format: LlamaForCausalLM cannot have 'int8': no instructions"
        assert expected in " ".join(refused.stderr.split())
    expected = {("int4",): "expected int8, got int4"}
    expected |= {("int8", "--no-pack-weights"): "expected without --no-pack-weights"}
    for said, why in expected.items():
        refused = generate("--weight-format", *said, "abc", code=2).stderr
        assert f"--weight-format: {why}" in refused


def test_the_most_expensive_misses_are_explained_where_it_is_asked(generate):
    begin = "abcdefghijkl"
    prompts = (begin + "mno", begin + "pqrstu", begin + "mno")
    said = " ".join(generate(*prompts, "--explain").stderr.split())
    assert "prompt 0: Of 15 tokens 0 are found. Nothing that begins like it" in said
    assert "prompt 1: Of 18 tokens 12 are found. At token 12 the nearest stored text parts" in said
    assert "this one with 'pqrstu'" in said
    assert said.index("prompt 0: Of") < said.index("prompt 1: Of"), "the most expensive first"
    assert "prompt 2: Of" not in said, "it was all found"
    assert "prompt 0: Of" not in generate(*prompts).stderr


def test_columns_that_answers_have_too_are_said_to_be_left_out(generate, tmp_path, rows):
    file, out = tmp_path / "prompts.csv", tmp_path / "out.jsonl"
    file.write_text("question,index,key,error_cause,mine\nabc,other,k1,said,1\n")
    said = " ".join(generate("-f", file, "--column", "question", "-o", out).stderr.split())
    assert "left out of the answers: index, key, error_cause; answers have their own" in said
    (row,) = rows(out)
    assert (row["question"], row["mine"]) == ("abc", "1")
    assert {"k1", "said", "other"}.isdisjoint(map(str, row.values()))

    file.write_text("question,mine\nabc,1\n")
    said = generate("-f", file, "--column", "question", "-o", tmp_path / "b.jsonl").stderr
    assert "left out" not in said


def test_answers_have_the_name_that_is_asked_for(generate, tmp_path, rows):
    file, out = tmp_path / "prompts.csv", tmp_path / "out.jsonl"
    file.write_text("answer,question\n42,abc\n")
    job = ("-f", file, "--column", "question", "-o", out)
    said = generate(*job, code=2).stderr
    assert "--answer: the prompts have a column 'answer' already; --answer NAME calls the" in said
    assert "--answer: the prompts have a column 'answer'" in (
        generate("-f", file, "--column", "answer", "-o", out, code=2).stderr
    )
    assert not out.exists()
    generate(*job, "--answer", "said")
    (row,) = rows(out)
    assert list(row)[:3] == ["key", "answer", "question"]
    assert (row["answer"], row["said"]) == ("42", generate("abc").stdout.strip())
    said = generate(*job, "--answer", "tells", code=2).stderr
    assert '(answer: "said" there, "tells" here)' in said
    for taken in ("index", "error", "key", ""):
        said = generate("abc", "-o", tmp_path / "b", "--answer", taken, code=2).stderr
        assert "--answer: expected a name other than index, sample, " in said
        assert f"got '{taken}'" in said
    for option in (("--answer", "said"), ("--tokens",), ("--logprobs",)):
        assert f"{option[0]}: expected with --out FILE" in generate("a", *option, code=2).stderr


def test_prompts_may_come_through_a_pipe(generate):
    assert generate(stdin="abc\nbcd\n").stdout == generate("abc", "bcd").stdout
    assert generate("-f", "-", stdin=b'\xef\xbb\xbf{"prompt": "abc"}').stdout == (
        generate("abc").stdout
    )


def test_rows_of_the_output_file_say_everything_about_themselves(generate, tmp_path, rows):
    file, out = tmp_path / "prompts.jsonl", tmp_path / "[red]out.jsonl"
    shared = "abcdefgh"
    own = {"id": "x", "text": "mine", "max_new_tokens": 3}
    lines = [{"prompt": shared}, {"prompt": shared + "字", **own}]
    file.write_text("\n".join(json.dumps(line, ensure_ascii=False) for line in lines), "utf-8")
    result = generate("-f", file, "-o", out, "--logprobs", "--tokens")
    assert result.stdout == ""
    found = sorted(rows(out), key=lambda row: row["index"])
    assert sorted(found[0]) == sorted(FIELDS)
    # It is the first to end, and says for all rows what they were made with.
    assert sorted(found[1]) == sorted([*FIELDS, "id", "text", "made_with"])
    assert found[1]["text"] == "mine"
    for row, line in zip(found, lines, strict=True):
        assert row["prompt"] == line["prompt"]
        assert row["answer"] == "".join(LETTERS[i] for i in row["tokens"])
        assert len(row["logprobs"]) == len(row["tokens"]) == line.get("max_new_tokens", 6)
        assert max(row["logprobs"]) <= 0
        assert (row["sample"], row["finish_reason"], row["error"]) == (0, "length", None)
    assert [row["cached_tokens"] for row in found] == [0, 8]

    again = generate("-f", file, "-o", out, "--logprobs", "--tokens")
    assert "[red]out.jsonl has 2 of 2 prompts already" in again.stderr
    assert generate("a", "-o", tmp_path / "b.jsonl").exit_code == 0
    assert {"logprobs", "tokens"}.isdisjoint(rows(tmp_path / "b.jsonl")[0])


def test_short_rows_run_side_by_side_with_int4_as_well(pagedkv, checkpoints):
    folder = checkpoints("wide", model=tiny(vocab_size=len(LETTERS), head_dim=32))
    arguments = ("generate", folder, "abc", "bcd", "cde", "def", "-n", 6, "--kv-format", "int4")
    assert "computed in 6 steps" in " ".join(pagedkv(*arguments).stderr.split())


def test_a_cache_that_keeps_a_budget_makes_room_and_other_texts(generate):
    def run(*arguments):
        result = generate("abc", "-n", 100, "--page-size", 4, *arguments)
        return result.stdout, " ".join(result.stderr.split())

    kept = run("--cache", "retention=sinks", "--cache", "budget=48")
    whole = run()
    assert kept[0] != whole[0]
    assert "26 in use" in kept[1]  # 12 and the one being written, in each of two layers
    grown = run("--cache", "growth_step=8", "--cache", "host_tokens=64")
    assert grown[0] == whole[0]


def test_no_colour_is_written_into_a_pipe(generate, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")  # which is about what goes to a person
    assert "\x1b" not in generate("abc", "bcd").stdout
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.delenv("FORCE_COLOR")
    assert "\x1b" not in generate("abc").output


def test_a_job_that_nobody_watches_tells_its_pace_now_and_then(generate, monkeypatch, tmp_path):
    monkeypatch.setattr(screen, "FIRST", 0.02)
    monkeypatch.setattr(screen, "EVERY", 0.02)
    said = generate("abc", "bcd", "-n", 60, "-o", tmp_path / "out.jsonl").stderr.splitlines()
    pace = [line for line in said if line.startswith("pagedkv: ") and "/2 rows, " in line]
    assert any(re.search(r" tokens/s, .* passed, about .* left$", line) for line in pace)
    assert said.index(pace[-1]) < next(
        i for i, line in enumerate(said) if "tokens a second" in line
    )


# ------------------------------------------------------------------ prompts


def test_chat_prompts_and_prefixes_go_through_the_template(pagedkv, chat_model, tmp_path, rows):
    out, prefix = tmp_path / "out.jsonl", tmp_path / "prefix.json"
    chat = [{"role": "user", "content": "b"}, {"role": "assistant", "content": "c"}]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "a"}) + "\n" + json.dumps({"prompt": chat}))
    prefix.write_text(json.dumps([{"role": "system", "content": "d"}]))
    common = ("generate", chat_model, *SHORT)
    assert pagedkv(*common, "-f", prompts, "--prefix", prefix, "-o", out).exit_code == 0
    found = sorted(rows(out), key=lambda row: row["index"])
    assert [row["prompt"] for row in found] == ["a", chat]
    # The template writes the first letter of a role, the content, and a q where a turn begins.
    expected = pagedkv(*common, "--raw", "sduaq", "sdubac")
    assert answers(expected.stdout) == [row["answer"] for row in found]

    text = tmp_path / "prefix.txt"
    text.write_text("d")
    assert pagedkv(*common, "--prefix", text, "a").stdout == f"{found[0]['answer']}\n"
    assert pagedkv(*common, "--raw", "--prefix", text, "a").stdout == (
        pagedkv(*common, "--raw", "da").stdout
    )


# ------------------------------------------------------------------ interruptions


def test_an_interruption_prints_the_texts_that_waited_for_an_earlier_one(generate, monkeypatch):
    stream = job.BatchGenerator.stream

    def interrupted(self, *arguments, **options):
        results = stream(self, *arguments, **options)
        yield sorted(results, key=lambda result: result.index)[1]
        raise KeyboardInterrupt

    expected = generate("bcd").stdout
    monkeypatch.setattr(job.BatchGenerator, "stream", interrupted)
    result = generate("abc", "bcd", code=130)
    assert answers(result.stdout) == answers(expected)
    assert "interrupted; what was finished is kept" in result.stderr
    assert "for 1 rows" in " ".join(result.stderr.split())


def test_an_interruption_while_it_loads_ends_it_at_once(generate, monkeypatch, tmp_path):
    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(loading.AutoModelForCausalLM, "from_pretrained", interrupted)
    assert generate("abc", "-o", tmp_path / "out.jsonl", code=130).output == ""
    assert not list(tmp_path.iterdir())
    monkeypatch.setattr("pagedkv.cli.app.app", interrupted)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 130
