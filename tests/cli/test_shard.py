"""One shard of a job: which it is, which rows it writes, what other shards have done."""

import csv
import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from pagedkv.cli import job as jobs
from pagedkv.cli.errors import UsageError
from pagedkv.cli.shard import Shard, shard_of
from tests.cli.conftest import by_place
from tests.effort import few

# ------------------------------------------------------------------ which it is


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("5/4", r"I from 0 and below N, got 5/4; the shards of 4 are 0/4 to 3/4"),
        ("4/4", r"I from 0 and below N, got 4/4; the shards of 4 are 0/4 to 3/4"),
        ("1/0", r"I from 0 and below N, got 1/0"),
        ("-1/4", r"expected I/N, such as 0/4, or slurm, got '-1/4'"),
        ("a/b", r"got 'a/b'"),
        ("1/2/3", r"got '1/2/3'"),
        ("1", r"got '1'"),
        ("", r"got ''"),
        ("0/4 ", r"got '0/4 '"),
        ("slurm", r"a task of a job array .* got no number in SLURM_ARRAY_TASK_ID; elsewhere"),
    ],
)
def test_what_is_no_shard_is_refused_before_anything_is_read(pagedkv, tmp_path, given, said):
    result = pagedkv(
        "generate", "nowhere", "-f", "nothing", "-o", tmp_path / "out.jsonl", f"--shard={given}"
    )
    assert result.exit_code == 2
    with pytest.raises(UsageError, match=f"--shard: .*{said}"):
        shard_of(given, Path("out"))
    assert "--shard" in result.stderr
    assert not list(tmp_path.iterdir())


def test_a_shard_needs_a_file(generate):
    assert "--shard: expected with --out FILE" in generate("abc", "--shard", "0/2", code=2).stderr


def array(monkeypatch, task, first, last, count):
    for name, value in (("ID", task), ("MIN", first), ("MAX", last), ("COUNT", count)):
        monkeypatch.setenv(f"SLURM_ARRAY_TASK_{name}", str(value))


@pytest.mark.parametrize(
    ("task", "first", "last", "count", "shard"),
    [
        (0, 0, 3, 4, Shard(0, 4)),
        (3, 0, 3, 4, Shard(3, 4)),
        (1, 1, 4, 4, Shard(0, 4)),
        (4, 1, 4, 4, Shard(3, 4)),
        (7, 7, 7, 1, Shard(0, 1)),
    ],
)
def test_the_task_of_an_array_is_counted_from_its_first(
    monkeypatch, task, first, last, count, shard
):
    array(monkeypatch, task, first, last, count)
    assert shard_of("slurm", Path("out")) == shard


@pytest.mark.parametrize(("task", "first", "last", "count"), [(7, 1, 7, 3), (4, 0, 12, 4)])
def test_an_array_with_gaps_is_refused(monkeypatch, task, first, last, count):
    array(monkeypatch, task, first, last, count)
    with pytest.raises(
        UsageError, match=f"without gaps.* got {count} tasks from {first} to {last}"
    ):
        shard_of("slurm", Path("out"))


def test_a_task_that_its_array_does_not_have_is_refused(monkeypatch):
    array(monkeypatch, 9, 1, 4, 4)
    with pytest.raises(UsageError, match="got task 9 of 1 to 4; give I/N"):
        shard_of("slurm", Path("out"))


def test_the_files_of_shards_of_any_number_and_of_the_whole_know_each_other(tmp_path):
    shard = Shard(1, 4)
    assert shard.named(Path("a/out.jsonl")) == Path("a/out-00001-of-00004.jsonl")
    assert shard.named(Path("out")) == Path("out-00001-of-00004")
    names = ["out.jsonl", "out-00000-of-00004.jsonl", "out-00002-of-00007.jsonl"]
    others = ["out-1.jsonl", "out-00000-of-00004.csv", "outer-00000-of-00004.jsonl", "t.jsonl"]
    for name in (*names, *others, "out-00001-of-00004.jsonl"):
        (tmp_path / name).touch()
    beside = shard.beside(tmp_path / "out-00001-of-00004.jsonl")
    assert {path.name for path in beside} == {*names}
    assert shard.beside(tmp_path / "missing" / "out-00001-of-00004.jsonl") == []


# ------------------------------------------------------------------ which rows it writes


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    """A file of 64 prompts behind 8 prefixes, in a mixed order."""
    rng = random.Random(0)
    prefixes = ["".join(rng.choices("abcdefghij", k=60)) for _ in range(8)]
    texts = [prefixes[i % 8] + "".join(rng.choices("klmno", k=6)) for i in range(64)]
    rng.shuffle(texts)
    path = tmp_path_factory.mktemp("job") / "prompts.jsonl"
    rows = [json.dumps({"id": f"id {i}", "prompt": text}) for i, text in enumerate(texts)]
    path.write_text("\n".join(rows))
    return path


def computed(rows):
    return sum(len(row["prompt"]) - row["cached_tokens"] for row in rows)


@pytest.mark.parametrize("n", few([2, 4, 8], 4))
def test_shards_have_the_rows_of_the_whole_job_and_compute_as_much(
    generate, prompts, tmp_path, rows, n
):
    generate("-f", prompts, "-o", tmp_path / "whole.jsonl")
    whole = rows(tmp_path / "whole.jsonl")
    for i in range(n):
        said = generate("-f", prompts, "-o", tmp_path / "out.jsonl", "--shard", f"{i}/{n}").stderr
        assert f"shard {i}/{n} has " in said
    files = sorted(tmp_path.glob("out*"))
    assert [path.name for path in files] == [f"out-{i:05}-of-{n:05}.jsonl" for i in range(n)]
    parts = [rows(path) for path in files]
    assert by_place([row for part in parts for row in part]) == by_place(whole)
    assert sum(map(computed, parts)) <= 1.1 * computed(whole)
    assert max(map(computed, parts)) <= 1.2 * computed(whole) / n


def test_another_number_of_shards_goes_on_with_what_is_missing(generate, prompts, tmp_path, rows):
    out = tmp_path / "out.jsonl"
    job = ("-f", prompts, "-o", out, "-k", 2, "-t", 1, "--seed", 3, "--shard")
    generate(*job, "0/2")
    generate(*job, "1/2")
    second = tmp_path / "out-00001-of-00002.jsonl"
    whole = by_place(rows(second) + rows(tmp_path / "out-00000-of-00002.jsonl"))
    lines = second.read_bytes().splitlines(keepends=True)
    second.write_bytes(b"".join(lines[:9]) + lines[9][:-5])  # as a kill leaves it
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    for i in range(3):
        said = generate(*job, f"{i}/3").stderr
        assert "files of other shards have" in said
    assert {path: path.read_bytes() for path in before} == before
    out.write_bytes(b"".join(path.read_bytes() for path in sorted(tmp_path.iterdir())))
    assert f"{out} has 64 of 64 prompts already" in generate(*job[:-1]).stderr
    assert by_place(rows(out)) == whole
    assert " 64 of 64 prompts already" in generate(*job, "5/7").stderr


def test_a_whole_job_that_was_begun_is_gone_on_with_in_shards(generate, written, tmp_path, rows):
    out = tmp_path / "out.jsonl"
    generate("-f", written("some.txt", "abc\nbcd"), "-o", out)
    more = written("more.txt", "abc\nbcd\ncde\ndef")
    for i in range(2):
        generate("-f", more, "-o", out, "--shard", f"{i}/2")
    parts = [rows(path) for path in tmp_path.glob("out-*")]
    assert {row["index"] for part in parts for row in part} == {2, 3}


def test_files_of_shards_joined_are_the_file_of_the_whole(
    generate, prompts, tmp_path, rows, monkeypatch
):
    out, joined = tmp_path / "out.csv", tmp_path / "_out.csv.jsonl"
    for i in range(2):
        generate("-f", prompts, "-o", out, "--shard", f"{i}/2")
    parts = sorted(tmp_path.glob("_out-*.csv.jsonl"))
    joined.write_bytes(b"".join(path.read_bytes() for path in parts))
    monkeypatch.setattr(jobs, "BatchGenerator", None)  # nothing is computed
    assert f"{out} has 64 rows" in generate("-f", prompts, "-o", out).stderr


def test_a_shard_without_rows_ends_well_with_an_empty_file(generate, tmp_path):
    said = generate("abc", "-o", tmp_path / "out.jsonl", "--shard", "3/4").stderr
    assert said.endswith("shard 3/4 has 0 of 1 prompts, 0 are left\n")
    (file,) = tmp_path.iterdir()
    assert (file.name, file.read_bytes()) == ("out-00003-of-00004.jsonl", b"")
    generate("abc", "-o", tmp_path / "out.jsonl", "--shard", "0/4", "--device", "nowhere", code=2)
    assert list(tmp_path.iterdir()) == [file]


def test_tables_of_shards_have_all_rows_whoever_computed_them(generate, prompts, tmp_path):
    def ids(path):
        with path.open(newline="", encoding="utf-8-sig") as file:
            return [row["id"] for row in csv.DictReader(file)]

    out = tmp_path / "out.csv"
    generate("-f", prompts, "-o", out, "--shard", "1/2")
    for i in range(3):
        generate("-f", prompts, "-o", out, "--shard", f"{i}/3")
    tables = sorted(tmp_path.glob("out-*-of-00003.csv"))
    assert sorted(i for path in tables for i in ids(path)) == sorted(f"id {i}" for i in range(64))
    before = tables[2].read_bytes()
    tables[2].unlink()
    generate("-f", prompts, "-o", out, "--shard", "2/3")
    assert tables[2].read_bytes() == before


def test_tables_have_each_row_once_where_added_prompts_made_other_shards(
    generate, written, tmp_path
):
    out, found = tmp_path / "out.csv", []
    for texts in ("cba\ndcb\nedc\nfed", "cba\ndcb\nedc\nfed\naaa\nabb\nacc\nadd"):
        for i in range(2):
            generate("-f", written("p.txt", texts), "-o", out, "--shard", f"{i}/2")
    for path in sorted(tmp_path.glob("out-*.csv")):
        with path.open(newline="", encoding="utf-8-sig") as file:
            found.append([row["prompt"] for row in csv.DictReader(file)])
    assert found == [["aaa", "abb", "acc", "add"], ["cba", "dcb", "edc", "fed"]]


def test_no_table_is_made_of_no_rows(generate, tmp_path):
    said = generate("abc", "-o", tmp_path / "out.csv", "--shard", "1/2").stderr
    assert "no table is made of no rows: there is no" in said
    assert [path.name for path in tmp_path.iterdir()] == ["_out-00001-of-00002.csv.jsonl"]


# ------------------------------------------------------------------ what other shards have done


@pytest.fixture
def half(generate, written, tmp_path):
    """A job of two prompts, the first of its two shards done: its options and that file."""
    job = ("-f", written("prompts.txt", "abc\nbcd"), "-o", tmp_path / "out.jsonl")
    generate(*job, "--shard", "0/2")
    return job, tmp_path / "out-00000-of-00002.jsonl"


def test_rows_of_another_job_are_refused_wherever_they_are(generate, half, tmp_path):
    job, file = half
    before = file.read_bytes()
    said = generate(*job, "--shard", "1/2", "-n", 9, code=2).stderr
    assert f"{file} was written for another job (max_new_tokens: 6 there, 9 here)" in said
    row = json.loads(before) | {"index": 1, "made_with": None}
    file.write_text(json.dumps(row) + "\n")
    said = generate(*job, "--shard", "1/2", code=2).stderr
    assert f"line 1 of {file} was written for another job" in said
    file.write_text("notes\n")
    assert f"line 1 of {file} is not a row" in generate(*job, "--shard", "1/2", code=2).stderr
    assert not (tmp_path / "out-00001-of-00002.jsonl").exists()


def test_a_row_that_ended_in_an_error_elsewhere_is_tried_again(generate, half, tmp_path, rows):
    job, file = half
    row = json.loads(file.read_bytes()) | {"error": "no memory"}
    file.write_text(json.dumps(row) + "\n")
    generate(*job, "--shard", "0/1")
    assert [row["index"] for row in rows(tmp_path / "out-00000-of-00001.jsonl")] == [0, 1]


def test_prompts_that_are_added_move_no_row_to_another_shard(generate, half, tmp_path, rows):
    job, _ = half
    with (tmp_path / "prompts.txt").open("a") as file:
        file.write("\naaa\naab")  # which come first in the order
    for i in range(2):
        generate(*job, "--shard", f"{i}/2")
    found = [row["index"] for path in tmp_path.glob("out-*") for row in rows(path)]
    assert sorted(found) == [0, 1, 2, 3]


def test_each_shard_has_a_trace_of_its_own(generate, tmp_path):
    for i in range(2):
        trace = ("--trace", tmp_path / "t.trace")
        generate("abc", "bcd", "-o", tmp_path / "out.jsonl", *trace, "--shard", f"{i}/2")
    assert len(list(tmp_path.glob("t-*-of-00002.trace"))) == 2


@pytest.mark.slow
def test_shards_at_once_write_each_row_once(start, model, prompts, tmp_path, rows):
    job = ("generate", model, "-f", prompts, "-t", 0, "-n", 40, "-o", tmp_path / "out.jsonl")
    processes = [start(*job, "--shard", f"{i}/2") for i in range(2)]
    assert [process.wait(600) for process in processes] == [0, 0]
    found = by_place([row for path in tmp_path.glob("out-*") for row in rows(path)])
    assert len(found) == 64


SLURM = Path(__file__).resolve().parents[2] / "docs" / "examples" / "slurm_array.sh"


@pytest.fixture
def sbatch(tmp_path, monkeypatch):
    """Runs the script of a job array as Slurm does, a task of it at a time."""
    command = tmp_path / "bin" / "pagedkv"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m pagedkv "$@"\n')
    command.chmod(0o755)
    path = f"{command.parent}{os.pathsep}{os.environ['PATH']}"
    here = {"PATH": path, "PYTHONPATH": str(SLURM.parents[2]), "OMP_NUM_THREADS": "1"}
    for name, value in here.items():
        monkeypatch.setenv(name, value)

    def run(*arguments):
        line = ["bash", str(SLURM), *map(str, arguments)]
        return subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, timeout=600)

    return run


@pytest.mark.slow
def test_the_job_array_of_the_examples_answers_every_prompt(
    sbatch, model, prompts, tmp_path, rows, monkeypatch
):
    job = (model, prompts, tmp_path / "answers.jsonl", "-n", 2)
    for task in (1, 2):  # an array may begin at any number
        array(monkeypatch, task, 1, 2, 2)
        done = sbatch(*job)
        assert done.returncode == 0, done.stderr
    names = [f"answers-0000{i}-of-00002.jsonl" for i in range(2)]
    assert len(by_place([row for name in names for row in rows(tmp_path / name)])) == 64
    assert "64 of 64 prompts already" in sbatch(*job).stderr


def test_the_job_array_of_the_examples_says_what_it_lacks(sbatch):
    lacking = sbatch("MODEL")
    assert lacking.returncode == 2
    assert "expected MODEL, a file of prompts" in lacking.stderr
    assert "#SBATCH --array=0-7\n" in SLURM.read_text(encoding="utf-8")
