"""An output file is gone on with by the job that began it and no other."""

import re
import shutil
from pathlib import Path

import pytest

from pagedkv.cli import generate_run
from pagedkv.cli.answers import CAUSE, KEY
from pagedkv.cli.errors import UsageError
from pagedkv.cli.job_rows import JobRows
from pagedkv.cli.pace import Pace
from tests.cli.conftest import LETTERS, SHORT, answers
from tests.hf.tiny import tiny


def test_no_row_is_counted_with_more_than_the_model_takes(generate, monkeypatch):
    paces = []
    monkeypatch.setattr(generate_run, "Pace", lambda *args: paces.append(Pace(*args)) or paces[-1])
    result = generate("abc", "d" * 1000, "-n", 10**18, code=3)  # the model takes 256 tokens
    assert "1 of 2 prompts is longer than the model takes" in result.stderr
    assert len(answers(result.stdout)[0]) == 256 - len("abc")
    assert "65 pages of 4 tokens" in result.stderr
    (pace,) = paces
    assert pace.share == 1


def test_a_file_is_not_continued_with_something_else(generate, pagedkv, chat_model, tmp_path):
    out, prefix = tmp_path / "out.jsonl", tmp_path / "prefix.txt"
    prefix.write_text("x")
    generate("abc", "-o", out)
    before = out.read_bytes()
    others = {
        ("abd",): "line 1 of .* answers another prompt 0",
        ("abc", "-n", 5): r"\(max_new_tokens: 6 there, 5 here\)",
        ("abc", "--prefix", prefix): r"\(prefix: not given there, \"\w{16}\" here\)",
        ("abc", "--logprobs"): r"\(logprobs: false there, true here\)",
        ("abc", "-k", 2): r"\(do_sample: not given there, true here; samples: 1 there, 2 here\)",
        ("abc", "--seed", 2): r"\(seed: not given there, 2 here\)",
        ("abc", "--set", "eos_token_id=null"): r"\(eos_token_id: not given there, null here\)",
        ("abc", "--dtype", "bfloat16"): r"\(dtype: \"auto\" there, \"bfloat16\" here\)",
        ("abc", "--weight-format", "int8"): r"\(pack_weights: not given there, \"int8\" here\)",
        ("abc", "--kv-format", "int8"): r"\(kv_format: .dense,dense. there, .int8,int8. here\)",
        ("abc", "--cache", "retention=sinks", "--cache", "budget=128"): r"budget: .*; page_size: "
        r"not given there, 4 here; retention: not given there, \"sinks\" here\)",
        ("abc", "--cache", "read_tokens=8"): r"read_tokens: not given there, 8 here\)",
    }
    for other, says in others.items():
        assert re.search(says, generate(*other, "-o", out, code=2).stderr), other
    other = pagedkv("generate", chat_model, *SHORT, "abc", "-o", out)
    assert re.search(r"\(tokenizer: \"\w{16}\" there, \"\w{16}\" here\)", other.stderr)
    assert other.exit_code == 2
    assert out.read_bytes() == before


def test_what_a_template_is_told_is_a_part_of_the_job(generate, pagedkv, chat_model, tmp_path):
    out = tmp_path / "out.jsonl"
    job = ("generate", chat_model, *SHORT, "abc")
    told = (*job, "--chat-template-kwargs", '{"add_generation_prompt": false}')
    assert pagedkv(*told).stdout == generate("uabc").stdout != pagedkv(*job).stdout
    assert pagedkv(*job, "-o", out).exit_code == 0
    refused = pagedkv(*told, "-o", out)
    assert refused.exit_code == 2
    assert "(chat_template_kwargs: not given there, " in refused.stderr


def test_a_file_goes_on_however_its_rows_are_computed(generate, pagedkv, model, tmp_path, rows):
    out, moved = tmp_path / "out.jsonl", tmp_path / "elsewhere" / "model"
    prompts = ["abc", "bcd", "cde", "def", "efg"]
    generate(*prompts[:1], "-o", out, "--max-tokens", 900)
    ways = [
        ("--page-size", 8, "--step-tokens", 2, "--device", "cpu", "--max-tokens", 128),
        ("--cache", "max_sequences=1", "--cache", "growth_step=8", "--cache", "host_tokens=64"),
        ("--device-memory", "64MiB"),
    ]
    for n, way in enumerate(ways, start=2):
        assert f"has {n - 1} of {n} prompts already" in (
            generate(*prompts[:n], "-o", out, *way).stderr
        )
    shutil.copytree(model, moved)  # by which its files get younger
    pagedkv("generate", moved, *SHORT, *prompts, "-o", out)
    assert [row["prompt"] for row in rows(out)] == prompts


def test_other_weights_in_the_same_folder_are_noticed(pagedkv, checkpoints, tmp_path, rows):
    folder, out = checkpoints("trained"), tmp_path / "out.jsonl"
    job = ("generate", folder, *SHORT, "-o", out, "abc", "bcd")
    assert pagedkv(*job).exit_code == 0
    before = out.read_bytes()
    tiny(vocab_size=len(LETTERS)).save_pretrained(folder)  # of the same size, with another seed
    refused = pagedkv(*job, "cde")
    assert refused.exit_code == 2
    assert re.search(r"another job \(weights: \"\w+\" there, \"\w+\" here\);", refused.stderr)
    assert out.read_bytes() == before
    (folder / "generation_config.json").write_text('{"do_sample": true}')
    assert "generation_config: " in pagedkv(*job).stderr


def test_sizes_count_where_answers_depend_on_them(generate, tmp_path):
    def refusal(out, first, then):
        generate("abc", "-o", tmp_path / out, *first)
        return generate("abc", "-o", tmp_path / out, *then, code=2).stderr

    pages = ("--cache", "retention=sinks", "--cache", "budget=128")
    assert "page_size: 4 there, 8 here" in refusal("a", pages, (*pages, "--page-size", 8))
    share = ("--cache", "retention=sinks", "--cache", "keep=0.5")
    assert "keep: 0.5 there, 0.25 here" in refusal("c", share, (*share[:3], "keep=0.25"))
    # Without a budget goes what finds no room.
    pages = ("--cache", "retention=sinks", "--max-tokens")
    assert "(max_tokens: 128 there, 64 here)" in refusal("b", (*pages, 128), (*pages, 64))


def test_samples_that_are_missing_are_added(generate, tmp_path, rows):
    out, job = tmp_path / "out.jsonl", ("abc", "bcd", "-k", 3, "-t", 1, "--seed", 2)
    generate(*job, "-o", out)
    whole = {(row["index"], row["sample"]): row["answer"] for row in rows(out)}
    assert len(whole) == 6
    lines = out.read_bytes().splitlines(keepends=True)
    out.write_bytes(b"".join(lines[:1] + lines[3:4]) + lines[5][:30])
    generate(*job, "-o", out)
    assert len(rows(out)) == 6
    assert {(row["index"], row["sample"]): row["answer"] for row in rows(out)} == whole


def test_the_output_is_checked_before_the_tokenizer_and_the_model(pagedkv, checkpoints, tmp_path):
    broken = checkpoints("weightless")
    (broken / "model.safetensors").unlink()
    for out in (tmp_path / "missing" / "out.jsonl", tmp_path):
        result = pagedkv("generate", broken, "abc", "-o", out)
        assert result.exit_code == 2
        assert "--out: cannot write" in result.stderr
    foreign = tmp_path / "notes.jsonl"
    foreign.write_text("notes")
    assert "not a row" in pagedkv("generate", broken, "abc", "-o", foreign).stderr
    assert foreign.read_text() == "notes"
    (broken / "tokenizer.json").write_text("{")
    assert "not a row" in pagedkv("generate", broken, "abc", "-o", foreign).stderr
    assert "MODEL: cannot load" in pagedkv("generate", broken, "abc", "-o", tmp_path / "b").stderr
    assert [path.name for path in tmp_path.iterdir()] == ["notes.jsonl"]


@pytest.mark.parametrize(
    ("row", "says"),
    [
        ({"index": 1}, "line 3 of a is of prompt 1, sample 0"),
        ({"index": 1, "error": "no text", CAUSE: "bad"}, "line 3 of a is of prompt 1, sample 0"),
        ({"sample": 2}, "line 3 of a is of prompt 0, sample 2"),
        ({KEY: "other", "error": "no pages"}, "answers another prompt 0"),
    ],
)
def test_rows_beyond_a_job_or_of_another_prompt_are_refused_whatever_they_say(row, says):
    """Only a prompt that was bad may have been mended since."""
    job, mine = JobRows(["mine"], 2, {}), {"index": 0, "sample": 0, KEY: "mine"}
    with pytest.raises(UsageError, match=says):
        job.stays(Path("a"), 3, mine | row, told=True)
    mended = {KEY: "other", "error": "no text", CAUSE: "bad"}
    assert not job.stays(Path("a"), 3, mine | mended, told=True)
