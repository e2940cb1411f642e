"""Options of `pagedkv generate`: what they change, and exit codes of what cannot be run."""

import json

import pytest
from transformers import GenerationConfig

from tests.cli.conftest import LETTERS, SHORT, answers
from tests.hf.unsupported import unsupported


def test_seeds_repeat_what_is_drawn(generate, tmp_path, rows):
    drawn = ("abc", "-k", 3, "-t", 1.5)
    first = generate(*drawn, "--seed", 5).stdout
    assert generate(*drawn, "--seed", 5).stdout == first
    assert generate(*drawn, "--seed", 50).stdout != first
    texts = first.rstrip("\n").split("\n\n")
    assert len(set(texts)) == 3
    assert generate("abc", "-t", 1.5, "--seed", 6).stdout == texts[1] + "\n"


def test_temperature_zero_is_greedy_whatever_the_model_says(generate, pagedkv, checkpoints):
    folder = checkpoints("warm")
    GenerationConfig(do_sample=True, temperature=1.5).save_pretrained(folder)
    greedy = generate("abc").stdout
    common = ("generate", folder, *SHORT, "abc")
    assert pagedkv(*common, "-t", 0).stdout == greedy
    assert pagedkv(*common, "--seed", 1).stdout == generate("abc", "-t", 1.5, "--seed", 1).stdout
    assert pagedkv(*common, "--seed", 1).stdout != greedy


@pytest.mark.parametrize("given", [(), ("-t", 0), ("-t", 1.5)])
def test_rows_have_temperatures_and_seeds_of_their_own(generate, given):
    lines = [
        {"prompt": "abc"},
        {"prompt": "abc", "temperature": 0},
        {"prompt": "abc", "temperature": 1, "seed": 7},
        {"prompt": "abc", "temperature": None, "seed": None, "max_new_tokens": None},
    ]
    piped = "\n".join(map(json.dumps, lines))
    texts = answers(generate(*given, "--seed", 3, "-f", "-", stdin=piped).stdout)
    default = generate("abc", *given, "--seed", 3).stdout.strip()
    assert texts == [
        default,
        generate("abc").stdout.strip(),
        generate("abc", "-t", 1, "--seed", 7).stdout.strip(),
        default,
    ]


def test_generation_options_reach_transformers(generate, pagedkv, checkpoints, tmp_path, rows):
    text = generate("abc").stdout.strip()
    out = tmp_path / "out.jsonl"
    generate("abc", "--stop", text[2:4], "--stop", "~", "-o", out)
    assert rows(out)[0]["answer"] == text[:4]
    assert rows(out)[0]["finish_reason"] == "stop"

    folder, ends = checkpoints("ends"), LETTERS.index(text[2])
    GenerationConfig(eos_token_id=ends).save_pretrained(folder)
    common = ("generate", folder, *SHORT, "abc")
    assert pagedkv(*common).stdout.strip() == text[: text.index(text[2]) + 1]
    assert pagedkv(*common, "--set", "eos_token_id=null").stdout.strip() == text

    penalised = generate("abc", "-n", 20, "--set", "repetition_penalty=5.0").stdout.strip()
    assert len(set(penalised)) == 20


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("abc", "--set", "temprature=1"), "did you mean temperature?"),
        (("abc", "--set", "topk=4"), "--set: generate has no option topk; did you mean top_k?"),
        (("abc", "--set", "max_tokens=4"), "max_tokens has an option of its own, --max-new-tokens"),
        (("abc", "--set", "n=4"), "n has an option of its own, --samples"),
        (("abc", "--top-k", "4"), "No such option: --top-k (Possible options: --set top_k=...)"),
        (("abc", "--max_tokens", "4"), "(Possible options: --max-new-tokens)"),
        (("abc", "--cache", "retention=h2o"), "did you mean importance?"),
        (("abc", "--kv-format", "q8"), "--kv-format: expected one of dense, fp8, int8, int4,"),
        (("abc", "--set", "num_beams=3"), "beam"),
        (("abc", "--set", "max_time=x"), "max_time: expected a number of seconds"),
        (("abc", "--set", "nothing"), "expected NAME=VALUE, got 'nothing'"),
        (("abc", "--set", "seed=1"), "seed has an option of its own, --seed"),
        (("abc", "--set", "num_return_sequences=2"), "--samples"),
        (("abc", "--set", "max_new_tokens=null"), "--max-new-tokens"),
        (("abc", "--set", "logprobs=true"), "--logprobs"),
        (("abc", "--set", "chat_template_kwargs={}"), "option of its own, --chat-template-kwargs"),
        (("abc", "--chat-template-kwargs", "x"), "--chat-template-kwargs: expected JSON"),
        (("abc", "--chat-template-kwargs", "[1]"), "--chat-template-kwargs: expected an object"),
        (("abc", "--chat-template-kwargs", "{}", "--raw"), "expected none with --raw"),
        (("abc", "--chat-template-kwargs", '{"a": 1}'), "expected a model with a chat template"),
        (("abc", "--set", "generation_config=x"), "generation_config"),
        (("abc", "--set", "processors=x"), "processors: expected a callable"),
        (("abc", "--set", "streamer=x"), "streamer"),
        (("abc", "--cache", "page_size=8"), "--cache: expected one of retention, budget, "),
        (("abc", "--cache", "budget"), "--cache: expected NAME=VALUE, got 'budget'"),
        (("abc", "--cache", "keep=0.5,retention=fifo"), "; give --cache once for each"),
        (("abc", "--cache", "budget=64"), "budget: needs retention="),
        (("abc", "--cache", "host_tokens=9", "--device-memory", "1GiB"), "--device-memory"),
        (("abc", "--page-size", "0"), "page-size"),
        (("abc", "-n", "0"), "max-new-tokens"),
        (("abc", "-t", "-1"), "temperature"),
        (("abc", "-k", "2", "-t", "0"), "num_return_sequences"),
        (("-f", "a.csv", "-f", "b.csv"), "--file: expected one, got a.csv, b.csv"),
        (("abc", ""), "prompt 1: expected a text, got none"),
        (("abc", "--trace", "/nowhere/at.trace"), "--trace: cannot write /nowhere/at.trace: "),
        (("abc", "--prefix-store", ""), "expected a path, got an empty text"),
        (("abc", "-f", "-", "--prefix", "-"), "--prefix: expected a file"),
        (("abc", "--dtype", "int8"), "--dtype"),
        (("abc", "--device", "nowhere"), "--device: expected auto, cpu, cuda"),
        (("abc", "--device", "meta"), "--device: cannot use meta"),
        (("abc", "--stop", ""), "--stop: expected a text"),
        (("abc", "--cache", "max_sequence=1"), "; did you mean max_sequences?"),
        (("abc", "--set", "repetition_penalty=NaN"), "NaN"),
        (("abc", "-f", "/nowhere/at all"), "/nowhere/at all"),
        (("--nothing",), "--nothing"),
        ((), "no prompts"),
    ],
)
def test_what_cannot_be_run_is_said_with_exit_code_2(generate, arguments, says):
    result = generate(*arguments, code=2)
    assert says in result.stderr
    assert result.stdout == ""
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("error", [ValueError, AttributeError, OverflowError, RuntimeError])
def test_an_option_is_refused_with_whatever_error_it_ends_in(generate, monkeypatch, error):
    def refuse(*arguments, **options):
        raise error("max_time: expected a number")

    monkeypatch.setattr("pagedkv.batch.calls.GenerationOptions", refuse)
    said = generate("abc", "--set", "max_time=x", code=2).stderr
    kind = "" if error is ValueError else f"{error.__name__}: "
    assert said == f"pagedkv: {kind}max_time: expected a number\n"


def test_names_that_others_use_are_taken_where_they_mean_the_same(generate):
    drawn = ("abc", "--seed", 3, "-t", 9)
    few = generate(*drawn, "--set", "top_k=2").stdout
    assert generate(*drawn, "--set", "top-k=2").stdout == few != generate(*drawn).stdout
    said = ("abc", "--dtype", "bfloat16"), ("abc", "--dtype", "bf16")
    assert len({generate(*given).stdout for given in said}) == 1


def test_a_cache_too_small_for_a_prompt_is_told_by_its_option(generate):
    result = generate("abc", "d" * 50, "--max-tokens", 24, code=1)
    told = "--max-tokens: the cache has room for 24 tokens, and a prompt has 50; --max-new-tokens"
    assert told in result.stderr
    assert "Warning" not in result.stderr


def test_models_that_cannot_be_used_are_refused_with_the_reason(pagedkv, checkpoints, tmp_path):
    endless = pagedkv("generate", "x" * 300, "abc")
    assert (endless.exit_code, "no id on the hub" in endless.stderr) == (2, True)
    missing = pagedkv("generate", tmp_path / "nothing", "abc")
    assert missing.exit_code == 2
    assert f"MODEL: no folder {tmp_path / 'nothing'}, and no id on the hub" in missing.stderr

    broken = checkpoints("broken")
    (broken / "model.safetensors").write_bytes(b"torn")
    refused = pagedkv("generate", broken, "abc")
    assert refused.exit_code == 2
    assert "model.safetensors: the header claims" in refused.stderr

    refused = pagedkv("generate", checkpoints("ant", model=unsupported("CpmAntForCausalLM")), "abc")
    assert refused.exit_code == 2
    assert "CpmAntForCausalLM (cpmant) cannot use paged attention: its attention" in refused.stderr


def test_rows_that_fail_do_not_stop_the_others(generate, tmp_path, rows):
    out = tmp_path / "out.jsonl"
    job = ("-o", out, "abc", "d" * 50, "bcd")
    result = generate(*job, "--max-tokens", 24, code=1)
    assert "prompt 1: " in result.stderr
    found = {row["index"]: row for row in rows(out)}
    assert found[1]["finish_reason"] == "error"
    assert found[1]["error"] in result.stderr
    assert [found[i]["error"] for i in (0, 2)] == [None, None]

    kept = [line for line in out.read_text("utf-8").splitlines() if '"error": null' in line]
    result = generate(*job)
    assert "has 2 of 3 prompts already" in result.stderr
    assert out.read_text("utf-8").splitlines()[:2] == kept
    assert sorted(row["index"] for row in rows(out)) == [0, 1, 2]

    texts = generate(*job[2:], "--max-tokens", 24, code=1).stdout
    assert "> " + "d" * 50 + "\n[error]\n" in texts
    assert answers(texts)[0::2] == [found[i]["answer"] for i in (0, 2)]
