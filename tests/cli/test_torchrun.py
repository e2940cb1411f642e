"""The command as several processes of torchrun: one output, one report, one exit code, no hang."""

import json
import re
import resource
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.conftest import LETTERS, SHORT, by_place
from tests.cli.test_processes import lines_of, wait_for
from tests.hf.tiny import tiny
from tests.hf.zoo import built

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="signals of Unix")

EVEN = len(LETTERS) + 1  # a vocabulary that two processes can share out
SECONDS = 600  # that a run may take; torch.distributed itself would wait for hours


@pytest.fixture(scope="session")
def shared(checkpoints):
    """Folder of a model that two processes can share out."""
    return checkpoints("shared", model=tiny(vocab_size=EVEN))


@pytest.fixture
def ranks(start, tmp_path):
    """Starts the command as ranks of a launcher; all but the first in a folder of their own."""
    elsewhere = tmp_path / "another machine"
    elsewhere.mkdir()

    def ranks(*arguments, n: int = 2, first=None, **options) -> list[subprocess.Popen]:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(n)}
        place |= {"LOCAL_WORLD_SIZE": str(n), "GLOO_SOCKET_IFNAME": "lo"}
        started = []
        for rank in range(n):
            env = place | {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            own = (first or {}) if rank == 0 else {"cwd": elsewhere}
            started.append(start(*arguments, env=env, **{**options, **own}))
        return started

    return ranks


def ended(processes) -> tuple[str, str]:
    """Returns the first process's output; the others wrote nothing, all ended with one code."""
    outputs = [process.communicate(timeout=SECONDS) for process in processes]
    said = [(out.decode(), error.decode()) for out, error in outputs]
    assert len({process.returncode for process in processes}) == 1, said
    assert said[1:] == [("", "")] * (len(said) - 1)
    return said[0]


def refused(processes) -> str:
    """Returns the message of a command that was refused before it ran anything."""
    stdout, stderr = ended(processes)
    assert {process.returncode for process in processes} == {2}, stderr
    assert stdout == ""
    lines = re.findall("^pagedkv: .*", stderr, re.MULTILINE)
    (said,) = (line for line in lines if not re.search(r" \.\.\. \d:\d\d:\d\d$", line))
    return said


@pytest.fixture
def job(written, shared):
    """A job of rows that end at different times, in a cache that has some wait."""

    def write(rows: int) -> tuple:
        given = [
            {"id": i, "prompt": "abcdefgh"[i % 7 :] * (1 + i % 3), "max_new_tokens": 10 + i % 40}
            for i in range(rows)
        ]
        written("prompts.jsonl", "".join(json.dumps(row) + "\n" for row in given))
        return "generate", shared, "-f", "prompts.jsonl", "-t", 0, "--max-tokens", 600

    return write


@pytest.mark.slow
def test_two_processes_write_one_file_and_report_once(
    ranks, pagedkv, written, shared, tmp_path, rows
):
    written("prompts.txt", "abc\nbcdbcd\ncde\n")
    command = ("generate", shared, *SHORT, "-t", 0, "-f")
    stdout, stderr = ended(ranks(*command, "prompts.txt", "-o", "out.jsonl"))
    assert stdout == ""
    assert stderr.count("tokens a second") == stderr.count("at their fullest") == 1
    alone = pagedkv(*command, tmp_path / "prompts.txt", "-o", tmp_path / "alone.jsonl")
    assert alone.exit_code == 0, alone.output
    assert by_place(rows(tmp_path / "out.jsonl")) == by_place(rows(tmp_path / "alone.jsonl"))


@pytest.mark.slow
def test_two_processes_label_rows_as_one_does(ranks, pagedkv, written, shared, tmp_path, rows):
    # Alone finds: texts that only the first has, for which the others would wait.
    written("t.csv", "a,b\nc,bcd\nd,efgh\n")
    command = ("score", shared, "--template", "a{a} {b}", "--choices", "b,cde", "-f")
    stdout, stderr = ended(ranks(*command, "t.csv", "-o", "out.jsonl"))
    assert stdout == ""
    assert stderr.count("tokens scored for 2 rows") == 1
    alone = pagedkv(*command, tmp_path / "t.csv", "-o", tmp_path / "alone.jsonl")
    assert alone.exit_code == 0, alone.output
    both = [by_place(rows(tmp_path / name)) for name in ("out.jsonl", "alone.jsonl")]
    for one, other in zip(*(found.values() for found in both), strict=True):
        assert one["label"] == other["label"]
        assert one["logprob"] == pytest.approx(other["logprob"], abs=1e-4)


def test_what_one_process_runs_is_refused_once(ranks, tmp_path):
    said = refused(ranks("plan", tmp_path, "--gpu", "list"))
    assert said == (
        "pagedkv: torchrun is for `pagedkv generate` and `pagedkv score`; `pagedkv plan` runs "
        "without it"
    )


def test_a_variable_of_a_cluster_does_not_make_several_processes_of_one(
    pagedkv, monkeypatch, shared
):
    for name, value in {"WORLD_SIZE": "2", "RANK": "1"}.items():  # no LOCAL_RANK
        monkeypatch.setenv(name, value)
    assert pagedkv("generate", shared, *SHORT, "abc").exit_code == 0


def test_experts_are_shared_out_among_processes_only(pagedkv, shared):
    refusal = pagedkv("generate", shared, "abc", "--expert-parallel")
    assert refusal.exit_code == 2
    assert "--expert-parallel: expected under torchrun" in refusal.stderr


@pytest.mark.slow
def test_torchrun_prints_texts_once_and_goes_on_with_a_file(start, pagedkv, shared, tmp_path, rows):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "-m", "pagedkv"]
    texts = pagedkv("generate", shared, *SHORT, "-t", 0, "abc", "bcd").stdout

    def run(*arguments):
        process = start(*arguments, launcher=command)
        stdout, stderr = process.communicate(timeout=SECONDS)
        return process.returncode, stdout.decode(), stderr.decode()

    code, stdout, stderr = run("generate", shared, *SHORT, "-t", 0, "abc", "bcd")
    assert (code, stdout) == (0, texts), stderr
    assert stderr.count("tokens a second") == 1
    job = ("generate", shared, *SHORT, "-t", 0, "-o", "out.jsonl", "abc")
    assert run(*job)[0] == 0
    code, _, stderr = run(*job, "bcd")
    assert code == 0, stderr
    assert stderr.count("out.jsonl has 1 of 2 prompts already") == 1
    assert len(by_place(rows(tmp_path / "out.jsonl"))) == 2
    code, _, stderr = run(*job, "bcd")
    assert (code, "2 of 2 prompts already" in stderr) == (0, True)
    code, _, stderr = run(*job, "bcd", "-n", 7)
    assert code != 0
    assert stderr.count("was written for another job") == 1


MISTAKES = {
    "an option that is none": (["abc", "--nothing"], "No such option"),
    "a value that is none": (["abc", "--kv-format", "int3"], "--kv-format: expected"),
    "a file that only the first could have": (["-f", "missing.txt"], "--file: cannot read"),
    "an output that cannot be written": (["abc", "-o", "missing/out"], "--out: cannot write"),
    "streamed layers": (["abc", "--host-memory", "1GiB", "--device-memory", "1GiB"], "streams"),
    "a plan that does not fit": (["abc", "--device-memory", "60KiB"], "on each of 2 ranks"),
    "a device for all": (["abc", "--device", "cpu"], "--device: expected none under torchrun"),
    "a prefix store": (["abc", "--prefix-store", "x"], "--prefix-store: expected none"),
    "a trace that cannot be written": (["abc", "--trace", "missing/t"], "--trace: cannot write"),
    "growth": (["abc", "--cache", "growth_step=8"], "--cache: expected no growth_step"),
    "experts that there are not": (["abc", "--expert-parallel"], "MODEL: cannot load"),
    "an option of generate": (["abc", "--set", "nothing=1"], "nothing"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_ends_all_processes_with_one_message(ranks, shared, name):
    arguments, words = MISTAKES[name]
    stdout, stderr = ended(processes := ranks("generate", shared, *arguments))
    assert {process.returncode for process in processes} == {2}, stderr
    assert stdout == ""
    assert stderr.count(words) == 1, stderr


@pytest.mark.slow
def test_models_that_cannot_be_shared_out_are_refused_by_name(ranks, checkpoints):
    odd = checkpoints("odd", model=tiny(vocab_size=EVEN, num_key_value_heads=1))
    assert "1 KV heads cannot be shared out whole" in refused(ranks("generate", odd, "abc"))
    unplanned = checkpoints("unplanned", model=tiny("gpt2", vocab_size=EVEN))
    assert "has no `tp_plan`" in refused(ranks("generate", unplanned, "abc"))


@pytest.mark.slow
def test_a_model_that_only_another_process_misses_is_said_by_the_first(ranks, shared, tmp_path):
    (tmp_path / "model").symlink_to(shared)
    said = refused(ranks("generate", "./model", "abc"))
    assert "rank 1 of 2: MODEL: " in said


@pytest.mark.slow
def test_an_output_that_another_process_writes_ends_all(ranks, start, job, tmp_path):
    first = start(*job(60), "-o", "out.jsonl")
    wait_for(first, lambda: lines_of(tmp_path / "out.jsonl") > 0)
    first.send_signal(signal.SIGSTOP)
    said = refused(ranks(*job(60), "-o", "out.jsonl"))
    first.send_signal(signal.SIGCONT)
    assert "another process is writing" in said


@pytest.mark.slow
@pytest.mark.parametrize(
    ("whom", "number", "code"),
    [
        ("first", signal.SIGINT, 130),
        ("other", signal.SIGINT, 130),
        ("other", signal.SIGTERM, 143),
        ("all", signal.SIGTERM, 143),
    ],
)
def test_a_signal_keeps_what_is_finished_and_the_job_goes_on(
    ranks, job, tmp_path, rows, whom, number, code
):
    out, command = tmp_path / "out.jsonl", (*job(60), "-o", "out.jsonl")
    processes = ranks(*command)
    wait_for(processes[0], lambda: lines_of(out) > 3)
    for process in {"first": processes[:1], "other": processes[1:], "all": processes}[whom]:
        process.send_signal(number)
    stdout, stderr = ended(processes)
    assert (processes[0].returncode, stdout) == (code, "")
    assert stderr.count("interrupted; what was finished is kept") == 1
    assert stderr.count("tokens a second") == 1
    kept = len(by_place(rows(out)))
    assert 3 < kept < 60
    again = ranks(*command)
    _, stderr = ended(again)
    assert again[0].returncode == 0, stderr
    assert f"has {kept} of 60 prompts already" in stderr
    assert len(by_place(rows(out))) == 60


@pytest.mark.slow
@pytest.mark.parametrize("whom", [0, 1])
def test_a_process_that_is_killed_ends_the_job_which_goes_on(ranks, job, tmp_path, rows, whom):
    out, command = tmp_path / "out.jsonl", (*job(60), "-o", "out.jsonl")
    # As a thread of the lost group does now and then that wants the interpreter at shutdown.
    aborting = "import atexit, os; atexit.register(os.abort); from pagedkv.cli import main; main()"
    processes = ranks(*command, launcher=[sys.executable, "-c", aborting])
    wait_for(processes[0], lambda: lines_of(out) > 3)
    processes[whom].kill()
    other = processes[1 - whom]
    _, stderr = other.communicate(timeout=SECONDS)
    assert other.returncode == 1, stderr
    assert b"Traceback" not in stderr
    if whom == 1:
        assert stderr.count(b"stopped, what was finished is kept") == 1
        assert stderr.count(b"tokens a second") == 1
    assert ended(ranks(*command))
    assert len(by_place(rows(out))) == 60


@pytest.mark.slow
@pytest.mark.parametrize("interrupt", [signal.SIG_DFL, signal.SIG_IGN], ids=["heard", "ignored"])
def test_a_full_disk_of_the_first_ends_all_at_one_step(ranks, job, tmp_path, rows, interrupt):
    def little() -> None:
        signal.signal(signal.SIGINT, interrupt)
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000))

    out, command = tmp_path / "out.jsonl", (*job(60), "--tokens", "-o", "out.jsonl")
    processes = ranks(*command, first={"preexec_fn": little})
    _, stderr = ended(processes)
    assert processes[0].returncode == 1
    assert stderr.count("stopped, what was finished is kept: [Errno 27]") == 1
    assert stderr.count("tokens a second") == 1
    computed = re.search(r"tokens generated for (\d+) rows", stderr)
    assert computed is None or int(computed[1]) < 60
    assert ended(ranks(*command))
    assert len(by_place(rows(out))) == 60


@pytest.mark.slow
def test_a_reader_that_leaves_ends_all(ranks, job):
    processes = ranks(*job(60), bufsize=0)
    assert processes[0].stdout.readline()
    processes[0].stdout.close()
    processes[0].stdout = None
    for process in processes:
        _, stderr = process.communicate(timeout=SECONDS)
        assert b"Traceback" not in stderr
        assert b"Exception ignored" not in stderr
    assert {process.returncode for process in processes} == {1}


@pytest.mark.slow
def test_tables_traces_drafts_and_plans_are_those_of_one_process(
    ranks, pagedkv, shared, checkpoints, tmp_path
):
    draft = checkpoints("draft", model=tiny(vocab_size=EVEN, num_hidden_layers=1))
    command = ("generate", shared, *SHORT, "-t", 0, "abcabc", "bcd")
    texts = pagedkv(*command).stdout
    for more in (
        ["--trace", "pages.trace"],
        ["--draft", draft],
        ["--device-memory", "64MiB"],
        ["-o", "out.csv"],
    ):
        stdout, stderr = ended(processes := ranks(*command, *more))
        assert processes[0].returncode == 0, stderr
        assert stdout == ("" if "out.csv" in more else texts)
    assert (tmp_path / "out.csv").read_text(encoding="utf-8").count("\n") == 3
    assert pagedkv("trace", tmp_path / "pages.trace", "--check").exit_code == 0
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {"another machine", "out.csv", "_out.csv.jsonl", "pages.trace"}
    assert not list((tmp_path / "another machine").iterdir())


@pytest.mark.slow
def test_whole_experts_are_shared_out_on_demand(ranks, pagedkv, checkpoints):
    folder: Path = checkpoints("mixtral", model=built("mixtral", vocab_size=EVEN))
    command = ("generate", folder, *SHORT, "-t", 0, "abcabc", "bcd")
    texts = pagedkv(*command).stdout
    for more in ([], ["--expert-parallel"]):
        stdout, stderr = ended(ranks(*command, *more))
        assert stdout == texts, stderr
