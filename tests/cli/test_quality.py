"""`pagedkv quality`: a table and a recommendation, from any text, and what is refused."""

from __future__ import annotations

import io
import json
import re
import sys
from datetime import date

import pytest
from rich.console import Console

from pagedkv import retention
from pagedkv.cli import screen
from pagedkv.cli.quality import POLICIES, combinations
from pagedkv.cli.screen import Screen
from tests.cli.conftest import LETTERS
from tests.hf.tiny import tiny

TEXT = "".join(LETTERS[(i * i + i // 7) % 26] for i in range(400))


@pytest.fixture(scope="session")
def wide_model(checkpoints):
    """Heads as wide as formats need; it takes texts of 256 tokens."""
    return checkpoints("wide", model=tiny(vocab_size=len(LETTERS), hidden_size=128))


@pytest.fixture
def mine(tmp_path):
    path = tmp_path / "mine.txt"
    path.write_text(TEXT)
    return path


@pytest.fixture
def measure(pagedkv, wide_model, mine):
    def measure(*arguments, code=0, text=mine, length=160):
        given = ["--text", text, "--length", length, *arguments]
        result = pagedkv("quality", wide_model, *given)
        assert result.exit_code == code, result.output
        return result

    return measure


def rows(out):
    return {line.split("  ")[0].strip() for line in out.splitlines()}


def test_a_table_has_a_row_for_each_variant_and_ends_with_what_to_use(measure):
    out = measure("--kv-format", "int8", "int4", "int4,int8", "--retention", "sinks:96").stdout
    assert {"full cache", "int8", "int4", "int4,int8", "sinks 96", "never saw it"} <= rows(out)
    assert "mine.txt: 160 tokens." in out
    assert out.strip().splitlines()[-1].startswith(("Use ", "Keep "))
    assert "\x1b" not in out


def test_where_nothing_is_said_eight_and_four_bits_are_measured_and_their_lengths_told(measure):
    out = measure().stdout
    assert {"int8", "int4"} <= rows(out)
    said = " ".join(out.split())
    assert re.search(r" int4 takes fewer bytes a row .*, than int8 from \d+ tokens on\. ", said)


def test_a_text_shorter_than_asked_for_is_read_whole_and_said(measure, tmp_path):
    short = tmp_path / "short.txt"
    short.write_text(TEXT[:140])
    out = measure("--kv-format", "int8", text=short, length=200).stdout
    assert "short.txt: 140 tokens, which is all of it: fewer than 200." in out


def test_all_figures_go_to_a_file_and_a_picture_says_which_model_read_how_much_and_when(
    measure, wide_model, tmp_path
):
    pytest.importorskip("matplotlib").rcParams["svg.fonttype"] = "none"
    figures, picture = tmp_path / "out.json", tmp_path / "out.svg"
    result = measure("--kv-format", "dense", "int8", "--json", figures, "--plot", picture)
    found = json.loads(figures.read_text())
    dense, int8 = found["variants"]
    assert dense["name"] == "dense"
    assert abs(dense["kl"]["mine.txt"]) < 1e-6
    assert int8["kl"]["mine.txt"] > 0
    assert found["recommendation"] in " ".join(result.stdout.split())
    read = f"{wide_model.name}, float32; mine.txt: 160 tokens; {date.today():%Y-%m-%d}"
    assert read in picture.read_text()


def test_a_wish_is_answered_with_the_smallest_that_holds_and_in_how_many_draws(measure, tmp_path):
    long, figures = tmp_path / "long.txt", tmp_path / "out.json"
    long.write_text(TEXT * 8)
    tried = "--kv-format", "dense", "int8"
    shown = measure(*tried, "--at-most", 5, "--json", figures, text=long, length=130).stdout
    promise = json.loads(figures.read_text())["promise"]
    assert (promise["chosen"], promise["held"]) == ("int8", {"dense": 1.0, "int8": 1.0})
    said = " ".join(shown.split())
    assert re.search(r" int8( \S+){6} 100\.0% good", said)
    assert said.endswith("on 16 held-out windows, at most 5 in 100.0% of 1,000 draws.")
    assert "good: KL below 5 nats" in said
    refused = measure("--kv-format", "int8", "--at-most", 1e-9, text=long, length=130).stdout
    assert "Nothing stays below 1e-09 nats: the nearest, int8, has a KL of" in refused


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--kv-format", "int3"), "--kv-format: expected one of dense, fp8, int8, int4"),
        (("--retention", "keydif:0.5"), "got keydif; did you mean keydiff?"),
        (("--retention", "keydiff"), "expected with keydiff how much stays: keydiff:0.5"),
        (("--retention", "keydiff:1.5"), "a share between 0 and 1 or a number of tokens"),
        (("--retention", "keydiff:160"), "keydiff 160 has no effect, the longest text has 160"),
        (("--retention", "keydiff:16"), "keydiff 16: budget: expected at least"),
        (("--read-tokens", "many"), "--read-tokens: expected a share"),
        (("--read-tokens", "4096"), "--read-tokens: read 4,096 has no effect"),
        (("--length", "100"), "--length: expected at least 128 tokens, got 100"),
        (("--length", "512"), "--length: expected at most 256, which this model takes, got 512"),
        (("--at-most", "0"), "--at-most: expected nats above 0, got 0"),
        (("--at-most", "0.1"), "got 2; give 3,520 more tokens of text, or a smaller --length"),
        (("--text", "nowhere.txt"), "--text: cannot read nowhere.txt: No such file"),
        (("--text", "/dev/zero"), "--text: expected a file or a pipe, got /dev/zero"),
        (("--plot", "picture.doc"), "--plot: expected a name that ends in .png"),
        (("--json", "no/such/folder.json"), "--json: no folder no/such"),
        (("--dtype", "int8"), "--dtype: expected auto"),
    ],
)
def test_what_cannot_be_used_is_refused_by_name(measure, arguments, says):
    result = measure(*arguments, code=2)
    assert says in result.stderr
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"caf\xe9 au lait", "expected text in UTF-8, got byte 0xe9 at 3 of "),
        (b"", "expected some text, "),
        (b" \n", "expected some text, "),
        (b"too short", "mine.txt: expected at least 128 tokens, got 9"),
    ],
)
def test_texts_that_cannot_be_read_are_named(measure, mine, content, says):
    mine.write_bytes(content)
    assert says in measure(code=2).stderr


@pytest.mark.parametrize("option", ["--json", "--plot"])
def test_figures_take_no_texts_place(pagedkv, tmp_path, option):
    text = tmp_path / "mine.png"
    text.write_text("mine")
    result = pagedkv("quality", "model", "--text", text, option, text)
    assert result.exit_code == 2
    assert f"{option}: expected another file than that of --text" in result.stderr
    assert text.read_text() == "mine"
    both = ("--plot", tmp_path / "both.png", "--json", tmp_path / "both.png")
    assert (
        "--json: expected another file than that of --plot" in pagedkv("quality", "m", *both).stderr
    )


def test_a_picture_needs_its_package(measure, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    result = measure("--plot", "out.png", code=2)
    assert "--plot: needs matplotlib: pip install 'pagedkv[viz]'" in result.stderr


def test_a_model_whose_heads_a_format_cannot_take_is_named(pagedkv, model, mine):
    result = pagedkv("quality", model, "--text", mine, "--length", 200, "--kv-format", "int8")
    assert result.exit_code == 2
    assert "int8: kv_format: int8 needs a head_dim that is a multiple of 16" in result.stderr


def test_an_interruption_ends_with_its_code(measure, monkeypatch):
    from pagedkv.cli import quality_run

    def interrupted(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(quality_run, "measure_quality", interrupted)
    assert "nothing was measured to its end" in measure(code=130).stderr


@pytest.mark.parametrize(
    ("width", "words"),
    [
        (200, "reading texts, 25%, 0:00:00 passed, about 0:00:01 left"),
        (45, "reading texts, 25%, about 0:00:01 left"),
    ],
)
def test_how_far_reading_is_is_shown_as_of_any_job(width, words):
    from pagedkv.cli.quality_run import Reading

    reading, file = Reading(), io.StringIO()
    shown = Screen(Console(file=file, width=width))
    shown.doing(reading)
    assert str(reading) == "reading texts, 0%, 0:00:00 passed"
    reading.tell(100, 400)
    shown.console.print(shown._line())
    assert words in file.getvalue()


def test_memory_that_runs_out_is_said(measure, monkeypatch):
    from pagedkv.cli import quality_run

    def full(*args, **options):
        raise MemoryError("no bytes left")

    monkeypatch.setattr(quality_run, "measure_quality", full)
    assert "stopped: MemoryError: no bytes left" in measure(code=1).stderr


def test_every_policy_can_be_asked_for():
    assert tuple(retention.POLICIES) == POLICIES


def test_options_with_several_values_end_at_the_next_option(pagedkv, wide_model, mine, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text(TEXT[::-1])
    arguments = ("--text", mine, other, "-l", 130, "--kv-format", "int8", "dense")
    result = pagedkv("quality", wide_model, *arguments)
    assert "mine.txt: 130 tokens. other.txt: 130 tokens." in result.stdout
    assert {"int8", "dense"} <= rows(result.stdout)


def test_a_model_behind_an_option_with_several_values_is_missed(pagedkv, wide_model):
    result = pagedkv("quality", "--kv-format", "int8", wide_model)
    assert result.exit_code == 2
    assert "Missing argument 'MODEL'" in result.output
    assert "MODEL comes first" in pagedkv("quality", "--help").output


def test_formats_and_policies_are_combined_where_asked():
    apart = combinations(["int8"], ["sinks:96"], ["0.25"], combine=False)
    assert apart == [
        {"kv_format": ("int8", "int8")},
        {"retention": "sinks", "budget": 96},
        {"read": 0.25},
    ]
    assert combinations(None, ["sinks:0.5"], None, False) == [{"retention": "sinks", "keep": 0.5}]
    both = combinations(["int8", "int8"], ["sinks:96"], ["0.25"], combine=True)
    assert both[:3] == apart
    assert both[3:] == [apart[0] | apart[1], apart[0] | apart[2]]


def test_a_log_tells_how_much_is_read(measure, monkeypatch):
    monkeypatch.setattr(screen, "FIRST", 0.01)
    monkeypatch.setattr(screen, "EVERY", 0.01)
    said = measure("--kv-format", "int8").stderr
    assert re.search(r"pagedkv: reading texts, \d+%, \d:\d\d:\d\d passed", said)
    assert "Traceback" not in said
