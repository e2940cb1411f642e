"""The command as a process: killed, interrupted, cut off, beside another one."""

import json
import os
import random
import signal
import subprocess
import sys
import time

import pytest

from tests.cli.conftest import by_place

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform == "win32", reason="signals and terminals of Unix"),
]


@pytest.fixture
def job_of(model, tmp_path):
    """Arguments of a job of many rows that end at different times, but for its output file."""

    def write(rows: int) -> tuple:
        random.seed(1)
        file = tmp_path / "prompts.jsonl"
        with file.open("w", encoding="utf-8") as lines:
            for i in range(rows):
                prompt = "".join(random.choices("abcdef", k=random.randint(3, 20)))
                row = {"id": i, "prompt": prompt, "max_new_tokens": random.randint(20, 150)}
                lines.write(json.dumps(row) + "\n")
        # A cache of few rows, so that some wait while others are finished.
        return "generate", model, "-f", file, "-t", 0, "--max-tokens", 600

    return write


@pytest.fixture
def job(job_of):
    return job_of(60)


def wait_for(process, condition) -> None:
    end = time.monotonic() + 600
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.005)


def lines_of(path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def test_a_job_that_is_killed_again_and_again_ends_as_if_nothing_had_happened(
    start, job, tmp_path, rows
):
    whole, out = tmp_path / "whole.jsonl", tmp_path / "out.jsonl"
    assert start(*job, "-o", whole).wait(600) == 0
    random.seed()
    for _ in range(3):
        process = start(*job, "-o", out)
        before = lines_of(out)
        wait_for(process, lambda before=before: lines_of(out) > before)
        time.sleep(random.uniform(0, 0.2))
        process.kill()
        process.wait()
        with out.open("ab") as file:
            file.write(out.read_bytes().splitlines()[0][: random.randint(0, 40)])
    last = start(*job, "-o", out)
    _, stderr = last.communicate(timeout=600)
    assert last.returncode == 0
    assert "of 60 prompts already" in stderr.decode()
    assert by_place(rows(out)) == by_place(rows(whole))
    assert len(rows(out)) == 60
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "out.jsonl",
        "prompts.jsonl",
        "whole.jsonl",
    ]


@pytest.mark.parametrize(
    ("sent", "code", "in_background"),
    [(signal.SIGINT, 130, False), (signal.SIGTERM, 143, False), (signal.SIGTERM, 143, True)],
)
def test_an_interruption_keeps_what_is_finished_and_sums_up(
    start, job_of, tmp_path, rows, sent, code, in_background
):
    out = tmp_path / "out.jsonl"
    if in_background:  # of a shell, which has that ignore Ctrl-C
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # taken back by `start`
    process = start(*job_of(300), "-o", out)
    wait_for(process, lambda: lines_of(out) > 3)
    if in_background:
        process.send_signal(signal.SIGINT)
        before = lines_of(out)
        wait_for(process, lambda: lines_of(out) > before + 3)
    process.send_signal(sent)
    stdout, stderr = process.communicate(timeout=600)
    assert process.returncode == code
    assert stdout == b""
    assert b"interrupted; what was finished is kept" in stderr
    assert b"tokens a second" in stderr
    assert b"Traceback" not in stderr
    assert 3 < len(by_place(rows(out))) < 300
    assert not list(tmp_path.glob(".*"))


def test_a_second_sigterm_ends_it_at_once(start, job_of, tmp_path):
    code = """
import signal, sys
from pagedkv.cli.signals import Ending
with Ending() as ending:
    try:
        signal.raise_signal(signal.SIGTERM)
    except KeyboardInterrupt:
        print("first", ending.terminated, flush=True)
    signal.raise_signal(signal.SIGTERM)
    print("second")
"""
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (-signal.SIGTERM, "first True\n")


@pytest.mark.parametrize("closed", [(1,), (1, 2), (0, 1, 2)])
def test_closed_standard_files_end_in_no_traceback_and_stay_out_of_the_output(
    start, model, tmp_path, rows, closed
):
    def close() -> None:
        for number in closed:
            os.close(number)

    job, out = ("generate", model, "-t", 0, "-n", 5), tmp_path / "out.jsonl"
    process = start(*job, "abc", "-o", out, preexec_fn=close)
    _, stderr = process.communicate(timeout=600)
    assert (process.returncode, b"Traceback" in stderr) == (0, False)
    assert len(rows(out)) == 1
    process = start(*job, "abc", preexec_fn=close)
    _, stderr = process.communicate(timeout=600)
    assert process.returncode == 2
    assert stderr.startswith(b"pagedkv: standard output is closed" if 2 not in closed else b"")
    assert b"Traceback" not in stderr


def test_a_reader_that_leaves_is_no_mistake(start, job):
    process = start(*job, bufsize=0)
    assert process.stdout.readline()
    process.stdout.close()
    process.stdout = None
    _, stderr = process.communicate(timeout=600)
    assert b"Traceback" not in stderr
    assert b"Exception ignored" not in stderr


def test_only_one_process_writes_a_file(start, job, tmp_path, rows):
    out = tmp_path / "out.jsonl"
    first = start(*job, "-o", out)
    wait_for(first, out.exists)
    first.send_signal(signal.SIGSTOP)
    second = start(*job, "-o", out)
    _, stderr = second.communicate(timeout=600)
    first.send_signal(signal.SIGCONT)
    assert second.returncode == 2
    assert b"another process is writing" in stderr
    assert first.wait(600) == 0
    assert len(by_place(rows(out))) == 60


def test_texts_may_be_written_in_any_encoding(start, model):
    env = {"PYTHONIOENCODING": "ascii"}
    process = start("generate", model, "abc", "-n", 9, "-t", 0, env=env)
    stdout, stderr = process.communicate(timeout=600)
    assert process.returncode == 0, stderr
    assert stdout
