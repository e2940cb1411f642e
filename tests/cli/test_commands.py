"""The commands as a user runs them: what comes out where, exit codes, options, going on."""

import json
import re
import shutil
from importlib.metadata import version

import pytest

pytest.importorskip("transformers")
pytest.importorskip("typer")
pytest.importorskip("filelock")

from transformers import GenerationConfig

from pagedkv.cli import job, main, screen
from tests.cli.conftest import LETTERS
from tests.hf.tiny import build, tiny

FIELDS = ["index", "sample", "prompt", "tokens", "text", "logprobs"]
FIELDS += ["finish_reason", "cached_tokens", "error", "key"]
# A random model repeats itself until it is made to stop.
SHORT = ("-n", 6, "--page-size", 4)


@pytest.fixture
def generate(pagedkv, model):
    """`pagedkv generate` with the model without a template."""

    def generate(*arguments, code: int = 0, **options):
        result = pagedkv("generate", model, *SHORT, *arguments, **options)
        assert result.exit_code == code, result.output
        return result

    return generate


# ------------------------------------------------------------------ what comes out


def test_texts_alone_go_to_standard_output_in_the_order_of_the_prompts(generate, tmp_path):
    file = tmp_path / "prompts.jsonl"
    limits = {"abc": 12, "bcd": 1, "cde": 5, "d" * 30: 3}
    lines = [json.dumps({"prompt": p, "max_new_tokens": n}) for p, n in limits.items()]
    file.write_text("\n".join(lines))
    both = generate("-f", file)
    texts = both.stdout.split("\n\n")
    assert [len(text.strip()) for text in texts] == list(limits.values())
    for prompt, n, text in zip(limits, limits.values(), texts, strict=True):
        assert generate(prompt, "-n", n).stdout == text.strip() + "\n"
    assert "tokens a second" in both.stderr
    assert "21 tokens generated for 4 rows" in " ".join(both.stderr.split())
    assert "\x1b" not in both.output


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
    result = generate("-f", file, "-o", out, "--logprobs")
    assert result.stdout == ""
    found = sorted(rows(out), key=lambda row: row["index"])
    assert sorted(found[0]) == sorted(FIELDS)
    # It is the first to end, and says for all rows what they were made with.
    assert sorted(found[1]) == sorted([*FIELDS, "id", "made_with"])
    for row, line in zip(found, lines, strict=True):
        assert row["prompt"] == line["prompt"]
        assert row["text"] == "".join(LETTERS[i] for i in row["tokens"])
        assert len(row["logprobs"]) == len(row["tokens"]) == line.get("max_new_tokens", 6)
        assert max(row["logprobs"]) <= 0
        assert (row["sample"], row["finish_reason"], row["error"]) == (0, "length", None)
    assert [row["cached_tokens"] for row in found] == [0, 8]

    again = generate("-f", file, "-o", out, "--logprobs")
    assert "[red]out.jsonl has 2 of 2 prompts already" in again.stderr
    assert generate("a", "-o", tmp_path / "b.jsonl").exit_code == 0
    assert rows(tmp_path / "b.jsonl")[0]["logprobs"] is None


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
    assert "\x1b" not in generate("abc").stdout
    assert ">" not in generate("abc").stdout
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
    # The template writes the first letter of a role, the content, and a q.
    expected = pagedkv(*common, "--raw", "sduaq", "sdubacq")
    assert expected.stdout == "\n".join(row["text"] + "\n" for row in found)

    text = tmp_path / "prefix.txt"
    text.write_text("d")
    assert pagedkv(*common, "--prefix", text, "a").stdout == f"{found[0]['text']}\n"
    assert pagedkv(*common, "--raw", "--prefix", text, "a").stdout == (
        pagedkv(*common, "--raw", "da").stdout
    )


def test_chat_messages_need_a_template(generate, pagedkv, chat_model):
    chat = '{"prompt": [{"role": "tool", "content": "a"}]}'
    assert "chat template" in generate("-f", "-", stdin=chat, code=2).stderr
    refused = pagedkv("generate", chat_model, "-f", "-", stdin=chat)
    assert refused.exit_code == 2
    assert "prompt 0: the chat template refuses it: no tools here" in refused.stderr


# ------------------------------------------------------------------ options


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
    texts = generate(*given, "--seed", 3, "-f", "-", stdin=piped).stdout.split("\n\n")
    default = generate("abc", *given, "--seed", 3).stdout.strip()
    assert [text.strip() for text in texts] == [
        default,
        generate("abc").stdout.strip(),
        generate("abc", "-t", 1, "--seed", 7).stdout.strip(),
        default,
    ]


def test_generation_options_reach_transformers(generate, pagedkv, checkpoints, tmp_path, rows):
    text = generate("abc").stdout.strip()
    out = tmp_path / "out.jsonl"
    generate("abc", "--stop", text[2:4], "--stop", "~", "-o", out)
    assert rows(out)[0]["text"] == text[:4]
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
        (("abc", "--set", "temprature=1"), "temprature"),
        (("abc", "--set", "num_beams=3"), "beam"),
        (("abc", "--set", "repetition_penalty=-1"), "repetition_penalty: expected"),
        (("abc", "--set", "max_time=x"), "max_time: expected a number of seconds"),
        (("abc", "--set", 'max_time=""'), "max_time: expected a number of seconds"),
        (("abc", "--set", "do_sample=[1]"), "do_sample: expected True or False"),
        (("abc", "--set", "eos_token_id=[[1,2]]"), "eos_token_id: expected an id or a list"),
        (("abc", "--set", 'min_length=""'), "min_length: expected an int from 0"),
        (("abc", "--set", "min_new_tokens=[]"), "min_new_tokens: expected an int from 0"),
        (
            ("abc", "--set", f"encoder_no_repeat_ngram_size={10**20}"),
            "encoder_no_repeat_ngram_size",
        ),
        (("abc", "--set", "nothing"), "expected NAME=VALUE, got 'nothing'"),
        (("abc", "--set", "=1"), "expected NAME=VALUE"),
        (("abc", "--set", "seed=1"), "seed has an option of its own, --seed"),
        (("abc", "--set", "num_return_sequences=2"), "--samples"),
        (("abc", "--set", "max_new_tokens=null"), "--max-new-tokens"),
        (("abc", "--set", "logprobs=true"), "--logprobs"),
        (("abc", "--set", "generation_config=x"), "generation_config"),
        (("abc", "--set", "logits_processor=x"), "logits_processor"),
        (("abc", "--set", "stopping_criteria=x"), "stopping_criteria"),
        (("abc", "--set", "prefix_allowed_tokens_fn=x"), "prefix_allowed_tokens_fn"),
        (("abc", "--set", "processors=x"), "processors: expected a callable"),
        (("abc", "--set", "streamer=x"), "streamer"),
        (("abc", "--cache", "nonsense=1"), "--cache: expected one of retention, budget, "),
        (("abc", "--cache", "page_size=8"), "got page_size"),
        (("abc", "--cache", "budget"), "--cache: expected NAME=VALUE, got 'budget'"),
        (("abc", "--cache", "budget=64"), "budget: expected `retention` beside it"),
        (("abc", "--cache", "retention=oldest"), "retention: expected one of fifo, sinks, "),
        (("abc", "--cache", "host_tokens=9", "--device-memory", "1GiB"), "--device-memory"),
        (("abc", "--page-size", "0"), "page-size"),
        (("abc", "-n", "0"), "max-new-tokens"),
        (("abc", "-t", "-1"), "temperature"),
        (("abc", "-k", "2", "-t", "0"), "num_return_sequences"),
        (("abc", "--logprobs"), "--logprobs: expected with --out"),
        (("abc", "-f", "-", "--prefix", "-"), "--prefix: expected a file"),
        (("--prefix", "-"), "--prefix: expected a file"),
        (("abc", "--dtype", "int8"), "--dtype"),
        (("abc", "--device", "nowhere"), "--device"),
        (("abc", "--device", "meta"), "--device: cannot use meta"),
        (("abc", "--device", "hpu"), "--device: cannot use hpu"),
        (("abc", "--stop", ""), "--stop: expected a text"),
        (("abc", "--stop", "x", "--stop", ""), "--stop: expected a text"),
        (("abc", "-f", "prompts.csv"), "got prompts.csv; this makes one: python -c"),
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

    monkeypatch.setattr("pagedkv.batch.generator.GenerationOptions", refuse)
    said = generate("abc", "--set", "max_time=x", code=2).stderr
    kind = "" if error is ValueError else f"{error.__name__}: "
    assert said == f"pagedkv: {kind}max_time: expected a number\n"


def test_models_that_cannot_be_used_are_refused_with_the_reason(pagedkv, checkpoints, tmp_path):
    missing = pagedkv("generate", tmp_path / "nothing", "abc")
    assert missing.exit_code == 2
    assert f"MODEL: cannot load {tmp_path / 'nothing'}, which is no folder here" in missing.stderr

    broken = checkpoints("broken")
    (broken / "model.safetensors").write_bytes(b"torn")
    refused = pagedkv("generate", broken, "abc")
    assert refused.exit_code == 2
    assert "MODEL: cannot load" in refused.stderr

    sizes = {"vocab_size": 101, "hidden_size": 32, "n_layer": 2, "n_head": 4}
    refused = pagedkv("generate", checkpoints("bloom", model=build("Bloom", **sizes)), "abc")
    assert refused.exit_code == 2
    assert "BloomForCausalLM (bloom) cannot use paged attention: its attention" in refused.stderr


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
    assert texts.split("\n\n")[0::2] == [found[i]["text"] + "\n" * (i == 2) for i in (0, 2)]


# ------------------------------------------------------------------ going on


def test_no_row_is_counted_with_more_than_the_model_takes(generate, monkeypatch):
    paces = []
    monkeypatch.setattr(job, "Pace", lambda *args: paces.append(screen.Pace(*args)) or paces[-1])
    result = generate("abc", "d" * 1000, "-n", 10**18, code=1)  # the model takes 256 tokens
    assert "prompt 1: prompt: the model takes 256 tokens" in result.stderr
    assert len(result.stdout.split("\n\n")[0]) == 256 - len("abc")
    assert "66 pages of 4 tokens" in result.stderr
    (pace,) = paces
    assert pace.tokens_left == 0


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
    # Without a budget goes what finds no room.
    pages = ("--cache", "retention=sinks", "--max-tokens")
    assert "(max_tokens: 128 there, 64 here)" in refusal("b", (*pages, 128), (*pages, 64))


def test_samples_that_are_missing_are_added(generate, tmp_path, rows):
    out, job = tmp_path / "out.jsonl", ("abc", "bcd", "-k", 3, "-t", 1, "--seed", 2)
    generate(*job, "-o", out)
    whole = {(row["index"], row["sample"]): row["tokens"] for row in rows(out)}
    assert len(whole) == 6
    lines = out.read_bytes().splitlines(keepends=True)
    out.write_bytes(b"".join(lines[:1] + lines[3:4]) + lines[5][:30])
    generate(*job, "-o", out)
    assert len(rows(out)) == 6
    assert {(row["index"], row["sample"]): row["tokens"] for row in rows(out)} == whole


def test_the_output_is_checked_after_the_tokenizer_and_before_the_model(
    pagedkv, checkpoints, tmp_path
):
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
    assert "MODEL" in pagedkv("generate", broken, "abc", "-o", tmp_path).stderr
    assert [path.name for path in tmp_path.iterdir()] == ["notes.jsonl"]


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
    assert result.stdout.strip() == expected.strip()
    assert "interrupted; what was finished is kept" in result.stderr
    assert "for 1 rows" in " ".join(result.stderr.split())


def test_an_interruption_while_it_loads_ends_it_at_once(generate, monkeypatch, tmp_path):
    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(job.AutoModelForCausalLM, "from_pretrained", interrupted)
    assert generate("abc", "-o", tmp_path / "out.jsonl", code=130).output == ""
    assert [path.name for path in tmp_path.iterdir()] == ["out.jsonl"]
    monkeypatch.setattr("pagedkv.cli.app.app", interrupted)
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 130


# ------------------------------------------------------------------ info, help, what is missing


def test_what_is_installed_says_its_version(pagedkv):
    assert pagedkv("--version").stdout == f"pagedkv {version('pagedkv')}\n"


def test_info_names_versions_devices_and_backends(pagedkv):
    import torch

    printed = pagedkv("info").stdout
    for words in ("pagedkv", "python", torch.__version__, "transformers", "cpu", "backend", "GiB"):
        assert words in printed
    assert "\x1b" not in printed


def test_help_names_the_exit_codes(pagedkv):
    printed = " ".join(pagedkv("generate", "--help").stdout.split())
    for words in ("Exit codes", "130", "--samples", "--set"):
        assert words in printed
    assert pagedkv("--help").exit_code == 0


def test_help_and_mistakes_do_not_wait_for_torch(fresh_python):
    code = """
import sys
from pagedkv.cli import main
for arguments in (["--help"], ["generate", "--help"], ["generate", "m", "-f", "nothing"]):
    sys.argv = ["pagedkv", *arguments]
    try:
        main()
    except SystemExit as ended:
        print("code", ended.code)
print(sorted({"torch", "transformers", "numpy"} & set(sys.modules)))
"""
    printed = fresh_python("-c", code).splitlines()
    assert [line for line in printed if line.startswith("code")] == ["code 0", "code 0", "code 2"]
    assert printed[-1] == "[]"


@pytest.mark.parametrize(("name", "code"), [("SIGINT", 130), ("SIGTERM", 143)])
def test_an_interruption_waits_until_torch_is_loaded(fresh_python, name, code):
    # In the middle of it C++ would meet an exception that it does not know.
    code_run = f"""
import signal, sys
class Press:
    def find_spec(self, name, *_):
        if name == "torch":
            signal.raise_signal(signal.{name})
            print("goes on")
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.meta_path.insert(0, Press())
sys.argv = ["pagedkv", "generate", "nowhere/at all", "abc"]
from pagedkv.cli import main
try:
    main()
except SystemExit as ended:
    print("code", ended.code)
"""
    assert fresh_python("-c", code_run).splitlines() == ["goes on", f"code {code}"]


@pytest.mark.parametrize("package", ["typer", "rich", "filelock", "transformers"])
def test_a_package_that_is_missing_is_named(fresh_python, package):
    code = f"""
import sys
sys.modules[{package!r}] = None
from pagedkv.cli import main
sys.argv = ["pagedkv", "generate", "model", "abc"]
try:
    main()
except SystemExit as ended:
    print(ended)
"""
    *_, said = fresh_python("-c", code).splitlines()  # behind what others warn of
    assert said == f"pagedkv: the command needs {package}: pip install 'pagedkv[hf,cli]'"
