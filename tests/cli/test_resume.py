"""A job that is gone on with: what is loaded for it, and the table at its end."""

import csv
import sys

from pagedkv.cli import job


def test_a_job_that_is_done_loads_neither_torch_nor_transformers(
    generate, model, tmp_path, fresh_python
):
    generate("abc", "bcd", "-o", tmp_path / "out.jsonl")
    code = f"""
import sys
from pagedkv.cli import main
sys.argv = ["pagedkv", "generate", {str(model)!r}, "-n", "6", "--page-size", "4", "abc", "bcd"]
sys.argv += ["-o", {str(tmp_path / "out.jsonl")!r}]
try:
    main()
except SystemExit as ended:
    print("code", ended.code, sorted({{"torch", "transformers"}} & set(sys.modules)))
"""
    assert fresh_python("-c", code).splitlines()[-1] == "code 0 []"


def test_a_job_that_cannot_be_run_leaves_no_file(generate, tmp_path):
    for mistake in (("--set", "num_beams=3"), ("--device", "nowhere"), ("--cache", "budget=64")):
        generate("abc", "-o", tmp_path / "out.jsonl", *mistake, code=2)
        generate("abc", "-o", tmp_path / "out.csv", *mistake, code=2)
    assert not list(tmp_path.iterdir())
    (tmp_path / "out.jsonl").touch()
    generate("abc", "-o", tmp_path / "out.jsonl", "--set", "num_beams=3", code=2)
    assert [path.name for path in tmp_path.iterdir()] == ["out.jsonl"]


# ------------------------------------------------------------------ tables


def table(path) -> list[dict]:
    with path.open(newline="", encoding="utf-8-sig") as file:
        return list(csv.DictReader(file))


def test_a_table_is_made_at_the_end_of_rows_that_stay_beside_it(generate, tmp_path, rows):
    file, out = tmp_path / "prompts.csv", tmp_path / "out.csv"
    beside = tmp_path / "_out.csv.jsonl"
    file.write_text("id,question\n7,abc\n8,bcd\n")
    said = generate("-f", file, "--column", "question", "-o", out).stderr
    assert f"rows go to {beside}; {out} is made of them at the end" in said
    assert said.endswith(f"{out} has 2 rows\n")
    made = {row["id"]: row["answer"] for row in table(out)}
    assert made == {row["id"]: row["answer"] for row in rows(tmp_path / "_out.csv.jsonl")}
    assert list(made) == ["7", "8"]

    out.unlink()
    with file.open("a") as more:
        more.write("9,cde\n")
    said = generate("-f", file, "--column", "question", "-o", out).stderr
    assert f"{beside} has 2 of 3 prompts already" in said
    assert [row["question"] for row in table(out)] == ["abc", "bcd", "cde"]
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "_out.csv.jsonl", "out.csv", "prompts.csv",
    ]  # fmt: skip


def test_a_table_that_is_missing_is_made_of_rows_that_are_there(generate, tmp_path, monkeypatch):
    out = tmp_path / "out.csv"
    generate("abc", "-o", out)
    out.unlink()
    monkeypatch.setitem(sys.modules, "pagedkv.cli.generate_run", None)  # nothing is left to run
    assert f"{out} has 1 rows" in generate("abc", "-o", out).stderr
    assert len(table(out)) == 1


def test_a_table_tells_rows_that_failed_and_is_made_again_without_them(generate, tmp_path):
    out = tmp_path / "out.csv"
    generate("abc", "d" * 50, "-o", out, "--max-tokens", 24, code=1)
    assert [row["finish_reason"] for row in table(out)] == ["length", "error"]
    generate("abc", "d" * 50, "-o", out)
    assert [row["finish_reason"] for row in table(out)] == ["length", "length"]


def test_no_table_is_made_of_a_job_that_was_stopped(generate, tmp_path, monkeypatch, rows):
    stream = job.BatchGenerator.stream
    out = tmp_path / "out.csv"
    for error, code in ((KeyboardInterrupt, 130), (RuntimeError("no memory"), 1)):

        def stopped(self, *arguments, error=error, **options):
            yield next(iter(stream(self, *arguments, **options)))
            raise error

        with monkeypatch.context() as patch:
            patch.setattr(job.BatchGenerator, "stream", stopped)
            said = generate("abc", "bcd", "cde", "-o", out, code=code).stderr
        assert f"{out} is made when no row is missing: run the same command again" in said
        assert not out.exists()
    assert len(rows(tmp_path / "_out.csv.jsonl")) == 2
    generate("abc", "bcd", "cde", "-o", out)
    assert len(table(out)) == 3


def test_a_table_that_cannot_be_written_leaves_the_rows(generate, tmp_path, monkeypatch, rows):
    def full(*arguments):
        raise OSError("No space left on device")

    monkeypatch.setattr("pagedkv.cli.resume.write_table", full)
    out = tmp_path / "out.csv"
    said = generate("abc", "-o", out, code=1).stderr
    assert f"cannot write {out}, its rows are kept: No space left on device" in said
    assert len(rows(tmp_path / "_out.csv.jsonl")) == 1


def test_parquet_needs_its_package_before_anything_is_computed(generate, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    said = generate("abc", "-o", tmp_path / "out.parquet", code=2).stderr
    assert "out.parquet needs pyarrow: pip install 'pagedkv[parquet]'" in said
    assert not list(tmp_path.iterdir())
