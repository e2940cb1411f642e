"""`generate --trace` and `pagedkv trace`: a job is recorded, and looked at afterwards."""

import json

import pytest

from pagedkv.trace import replay


def test_a_job_is_recorded_and_shown(generate, pagedkv, tmp_path):
    plain = generate("abcdefgh", "abcdefgi").stdout
    assert generate("abcdefgh", "abcdefgi", "--trace", tmp_path / "job.trace").stdout == plain
    result = pagedkv(
        "trace", tmp_path / "job.trace", "--check",
        "--html", tmp_path / "job.html", "--chrome", tmp_path / "job.json",
    )  # fmt: skip
    assert result.exit_code == 0
    assert "2 sequences" in result.stdout
    assert f"wrote {tmp_path / 'job.html'}" in result.stdout
    assert "<!doctype html>" in (tmp_path / "job.html").read_text("utf-8")
    names = {e["name"] for e in json.loads((tmp_path / "job.json").read_text())["traceEvents"]}
    assert {"step 0", "sequence 0", "pages"} <= names
    assert replay(tmp_path / "job.trace").stats().live == 0


def test_a_trace_alone_is_summed_up_in_a_line(generate, pagedkv, tmp_path):
    generate("abcd", "--trace", tmp_path / "job.trace")
    result = pagedkv("trace", tmp_path / "job.trace")
    assert result.exit_code == 0
    assert result.stdout.count("\n") == 1
    assert "pages live" in result.stdout


def test_a_trace_that_was_cut_off_says_so(generate, pagedkv, tmp_path):
    generate("abcd", "--trace", tmp_path / "job.trace")
    data = (tmp_path / "job.trace").read_bytes()
    (tmp_path / "job.trace").write_bytes(data[:-3])
    result = pagedkv("trace", tmp_path / "job.trace")
    assert result.exit_code == 0
    assert "cut off" in result.stderr


def test_what_is_no_trace_is_refused_by_name(pagedkv, generate, tmp_path):
    (tmp_path / "prompts.txt").write_text("abcd\n")
    for file in (tmp_path / "prompts.txt", tmp_path / "nothing"):
        result = pagedkv("trace", file)
        assert result.exit_code == 2
        assert file.name in result.stderr
    result = generate("-f", tmp_path / "prompts.txt", "--trace", tmp_path / "prompts.txt", code=2)
    assert "expected a new file or an older trace" in " ".join(result.stderr.split())
    assert (tmp_path / "prompts.txt").read_text() == "abcd\n"


def test_a_job_goes_on_beside_a_trace_of_its_beginning(generate, tmp_path, rows):
    """The name of a trace, and whether there is one, changes no answer and hinders no resume."""
    out = tmp_path / "out.jsonl"
    generate("abcd", "-o", out, "--trace", tmp_path / "a.trace")
    assert "has 1 of 1 prompts" in " ".join(generate("abcd", "-o", out).stderr.split())
    assert len(rows(out)) == 1


@pytest.mark.parametrize(
    ("out", "trace"), [("o.jsonl", "o.jsonl"), ("o.csv", "_o.csv.jsonl"), ("o.csv", "o.csv")]
)
def test_a_trace_takes_no_answers_place(generate, tmp_path, out, trace):
    result = generate("ab", "-o", tmp_path / out, "--trace", tmp_path / "." / trace, code=2)
    assert "--trace: expected another file than that of --out" in result.stderr
    assert not list(tmp_path.iterdir())


def test_what_is_drawn_of_a_trace_takes_not_its_place(generate, pagedkv, tmp_path):
    recorded = tmp_path / "job.trace"
    generate("ab", "--trace", recorded)
    before = recorded.read_bytes()
    both = ("--html", tmp_path / "both", "--chrome", tmp_path / "both")
    for options in (("--html", recorded), ("--chrome", recorded), both):
        result = pagedkv("trace", recorded, *options)
        assert (result.exit_code, result.stdout) == (2, "")
        assert f"{options[-2]}: expected another file than that of" in result.stderr
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [before]
