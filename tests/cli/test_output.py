"""The output file: what is in it, what a restart keeps, what is refused and left as it was."""

import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from pagedkv.cli.errors import UsageError
from pagedkv.cli.job_rows import JobRows, key_of
from pagedkv.cli.output import Output

KEYS = [key_of("model", i) for i in range(3)]
MADE = {"weights": "00ff", "max_new_tokens": 6}


@pytest.fixture
def path(tmp_path):
    yield tmp_path / "out.jsonl"
    hidden = [p.name for p in tmp_path.iterdir() if p.name.startswith(".")]
    assert not hidden, f"left behind: {hidden}"


def row(index: int, sample: int = 0, error: str | None = None, **others) -> dict:
    return {**others, "index": index, "sample": sample, "text": f"字 {index}", "error": error}


def write(
    path: Path, *rows: dict, keys: list[str] = KEYS, samples: int = 1, made_with: dict = MADE
) -> list[int]:
    """Opens the file, writes rows to it and closes it; what was left to do before that."""
    output = Output(path, JobRows(keys, samples, made_with))
    try:
        left = output.unfinished()
        for each in rows:
            output.write(each)
    finally:
        output.close()
    return left


def places(path: Path) -> list[tuple[int, int]]:
    found = [json.loads(line) for line in path.read_bytes().splitlines()]
    return [(each["index"], each["sample"]) for each in found]


def refused(path: Path, says: str, **job) -> None:
    """The file is refused and stays as it was."""
    before = path.read_bytes(), path.stat().st_mtime_ns
    with pytest.raises(UsageError, match=says):
        write(path, row(0), **job)
    assert (path.read_bytes(), path.stat().st_mtime_ns) == before


# ------------------------------------------------------------------ going on


def test_rows_are_lines_with_the_key_of_their_prompt(path):
    assert write(path, row(1, key="mine", id=7), row(0)) == [0, 1, 2]
    lines = path.read_text(encoding="utf-8").split("\n")
    assert lines.pop() == ""
    assert [json.loads(line) for line in lines] == [
        {"key": KEYS[1], "id": 7, **row(1), "made_with": MADE},
        {"key": KEYS[0], **row(0)},
    ]
    assert "字" in lines[0]


def test_a_restart_is_told_what_is_missing_and_writes_nothing_twice(path):
    write(path, row(1))
    assert write(path, row(1), row(2)) == [0, 2]
    assert write(path) == [0]
    assert places(path) == [(1, 0), (2, 0)]


def test_a_prompt_is_unfinished_until_all_its_samples_are_there(path):
    write(path, row(0, 0), row(0, 1), row(2, 1), samples=2)
    assert write(path, row(2, 0), row(2, 1), samples=2) == [1, 2]
    assert places(path) == [(0, 0), (0, 1), (2, 1), (2, 0)]


def test_prompts_may_be_added_behind_the_others(path):
    write(path, row(0), keys=KEYS[:1])
    assert write(path) == [1, 2]


def test_rows_with_an_error_are_dropped_and_tried_again(path):
    write(path, row(0), row(1, error="too long"), row(2))
    path.chmod(0o640)
    before = path.read_bytes().splitlines()
    assert write(path) == [1]
    assert path.read_bytes().splitlines() == [before[0], before[2]]
    assert stat.S_IMODE(path.stat().st_mode) == 0o640


@pytest.mark.parametrize("kept", [0, 1])
@pytest.mark.parametrize("length", [1, 9, 12, 60, -1])
def test_a_torn_last_line_is_dropped(path, kept, length):
    write(path, row(0), row(1))
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:kept]) + lines[kept][:length])
    assert write(path, row(1)) == [0, 1, 2][kept:]
    assert places(path) == [(0, 0), (1, 0)][1 - kept :]


@pytest.mark.parametrize("length", [1, 9, 30, -1])
def test_torn_lines_between_rows_are_dropped_as_cat_leaves_them(path, length):
    write(path, row(0), row(1, other={"key": "mine"}), row(2))
    first, second, third = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(third + first[:length] + second)
    assert write(path, row(0)) == [0]
    assert places(path) == [(2, 0), (1, 0), (0, 0)]


def test_rows_beside_it_that_are_gone_when_they_are_read_again_are_missed(path, tmp_path):
    beside = tmp_path / "beside.jsonl"
    write(beside, row(0), row(2))
    output = Output(path, JobRows(KEYS, 1, MADE), [beside])
    try:
        output.write(row(1))
        assert [each["index"] for each in output.rows()] == [1, 0, 2]
        beside.unlink()
        with pytest.raises(
            OSError, match=r"2 rows are gone from the files beside .*; run it again"
        ):
            list(output.rows())
    finally:
        output.close()


def removed(path: Path) -> None:
    path.unlink()


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def saved_by_an_editor(path: Path) -> None:
    other = path.with_name("other")
    other.write_bytes(path.read_bytes())
    other.replace(path)


def written_to(path: Path) -> None:
    with path.open("ab") as file:
        file.write(b"a note\n")


@pytest.mark.skipif(sys.platform == "win32", reason="open files stay on Windows")
@pytest.mark.parametrize("change", [removed, emptied, saved_by_an_editor, written_to])
def test_a_file_that_others_change_while_it_is_written_is_told(path, change):
    """Else its job would end well, and rows be gone: they went to a file without a name."""
    output = Output(path, JobRows(KEYS, 1, MADE))
    try:
        output.write(row(0))
        output.sync()
        change(path)
        output.write(row(1))
        with pytest.raises(OSError, match=r"bytes in place of .*another program"):
            output.sync()
        with pytest.raises(OSError, match=r"bytes in place of .*another program"):
            list(output.rows())
    finally:
        output.close()


def test_a_row_that_is_there_twice_is_kept_once(path):
    write(path, row(0), row(1))
    path.write_bytes(path.read_bytes() * 2)
    assert write(path) == [2]
    assert places(path) == [(0, 0), (1, 0)]


def test_a_link_stays_a_link(path, tmp_path):
    link = tmp_path / "link.jsonl"
    link.symlink_to(path)
    write(link, row(0, error="no"), row(1))
    held = Output(path, JobRows(KEYS, 1, MADE))
    with pytest.raises(UsageError, match="another process"):
        Output(link, JobRows(KEYS, 1, MADE))
    held.close()
    assert write(link) == [0, 2]
    assert link.is_symlink()
    assert places(path) == [(1, 0)]


# ------------------------------------------------------------------ what is refused


def test_what_differs_from_what_a_file_was_made_with_is_named_with_both_values(path):
    write(path, row(0), row(1))
    others = {
        r"\(weights: \"00ff\" there, \"00fe\" here\)": {**MADE, "weights": "00fe"},
        r"\(seed: not given there, 3 here\)": {**MADE, "seed": 3},
        r"\(max_new_tokens: 6 there, 5 here; weights: \"00ff\" there, not given here\)": {
            "max_new_tokens": 5
        },
        r'stop: not given there, "x{59}\.\.\. here': {**MADE, "stop": "x" * 100},
    }
    for says, made_with in others.items():
        refused(path, says, made_with=made_with, keys=[key_of("other")] * 3)


def test_rows_of_other_prompts_are_named_by_their_line(path):
    write(path, row(0), row(1))
    other = [KEYS[0], key_of("other"), KEYS[2]]
    refused(path, r"line 2 of .* answers another prompt 1, or with other options", keys=other)
    refused(path, r"line 2 of .* is of prompt 1, sample 0; this job has 1 prompts", keys=KEYS[:1])


def test_a_file_that_does_not_say_what_it_was_made_with_is_refused_all_the_same(path):
    path.write_text(json.dumps({"key": "other", **row(0)}) + "\n")
    refused(path, "line 1 of .* was written for another job; no line of the file says for which")


def test_one_row_that_is_kept_says_what_all_were_made_with(path):
    def telling() -> list[int]:
        lines = [json.loads(line) for line in path.read_bytes().splitlines()]
        return [line["index"] for line in lines if line.get("made_with") == MADE]

    # Not one that is tried again, and no field of the same name that came with a prompt.
    write(path, row(0, error="no"), row(1, made_with="mine"), row(2, made_with={"seed": 1}))
    assert telling() == [1]
    assert write(path, row(0)) == [0]
    assert telling() == [1]
    assert "made_with" not in json.loads(path.read_bytes().splitlines()[1])
    told, *_ = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(told[:-9])  # torn, it is written again
    assert write(path, row(1), row(2)) == [0, 1, 2]
    assert telling() == [1]


@pytest.mark.parametrize("field", [{"index": -1}, {"sample": -1}, {"sample": 1}, {"index": 3}])
def test_rows_that_the_job_cannot_have_are_refused(path, field):
    path.write_text(json.dumps({"key": KEYS[-1], **row(2), **field}) + "\n")
    refused(path, r"line 1 of .* is of prompt -?\d, sample -?\d; this job has 3 prompts")


@pytest.mark.parametrize(
    "content",
    [
        b"notes\n",
        b"notes",  # which is no torn line
        b'{"id": 1}',
        b'[{"id": 1}]',
        b'{"id": 1}\n',
        b"{}\n",
        b"[]\n",
        b"3\n",
        b"\x00\xff\xfe",
        b"\x00\xff\n",
        b'{"index": 0, "sample": 0}\n',
        # What a table program makes of a row.
        b'{"key": "key 0", "index": 0.0, "sample": 0}\n',
        b'{"key": "key 0", "index": 1, "sample": false}\n',
        b'{"key": 7, "index": 0, "sample": 0}\n',
    ],
)
def test_a_foreign_file_is_refused(path, content):
    path.write_bytes(content)
    refused(path, "line 1 of .* is not a row of this command")


def test_a_foreign_text_before_a_row_is_refused(path):
    write(path, row(0))
    path.write_bytes(b"notes" + path.read_bytes())
    refused(path, "line 1 of .* is not a row of this command")


def test_a_foreign_line_behind_rows_is_refused(path):
    write(path, row(0, error="no"))
    with path.open("ab") as file:
        file.write(b"notes")
    refused(path, "line 2 of .* is not a row of this command")


def test_an_empty_line_is_nothing(path):
    write(path, row(0), row(1))
    first, second = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"\n" + first + b"\n \r\n" + second + b"\n")
    assert write(path) == [2]
    assert path.read_bytes() == first + second
    path.write_bytes(b"\n\n")
    assert write(path) == [0, 1, 2]


def test_an_empty_line_of_a_file_beside_is_nothing(path, tmp_path):
    beside = tmp_path / "beside.jsonl"
    write(beside, row(0))
    beside.write_bytes(b"\n" + beside.read_bytes() + b"\n")
    output = Output(path, JobRows(KEYS, 1, MADE), [beside])
    output.close()
    assert output.unfinished() == [1, 2]


def test_an_error_that_trying_again_would_not_mend_stays(path):
    bad = row(1, error="empty", error_cause="empty")
    write(path, row(0), bad, row(2, error="no memory"))
    before = path.read_bytes().splitlines(keepends=True)
    output = Output(path, JobRows(KEYS, 1, MADE, final=["empty"]))
    output.close()
    assert (output.unfinished(), output.failed()) == ([2], {1: "empty"})
    assert path.read_bytes() == b"".join(before[:2])
    other = [KEYS[0], key_of("mended"), KEYS[2]]  # the cell has a text now
    output = Output(path, JobRows(other, 1, MADE, final=["empty"]))
    output.close()
    assert (output.unfinished(), output.failed()) == ([1, 2], {})
    assert path.read_bytes() == before[0]


def test_an_empty_file_is_taken(path):
    path.touch()
    assert write(path) == [0, 1, 2]


def test_places_that_cannot_be_written_are_refused(path, tmp_path):
    with pytest.raises(UsageError, match="there is no folder"):
        write(tmp_path / "missing" / "out.jsonl")
    assert not (tmp_path / "missing").exists()
    path.write_bytes(b"")
    with pytest.raises(UsageError, match="there is no folder"):
        write(path / "out.jsonl")
    with pytest.raises(UsageError, match=r"cannot write .* too long"):
        write(tmp_path / ("x" * 300))
    ends = os.pipe()  # whose names, as that of /dev/stdout, lead to no file
    for other in (tmp_path, Path(os.devnull), Path("/"), Path(f"/dev/fd/{ends[1]}")):
        with pytest.raises(UsageError, match="no plain file"):
            write(other)
    for end in ends:
        os.close(end)


def test_a_file_that_may_only_be_read_is_refused(path):
    write(path, row(0, error="no"))
    path.chmod(0o400)
    if os.access(path, os.W_OK):
        pytest.skip("this user may write everything")
    refused(path, "cannot write")


def test_only_one_has_the_file_open(path):
    first = Output(path, JobRows(KEYS, 1, MADE))
    first.write(row(0))
    with pytest.raises(UsageError, match="another process is writing"):
        Output(path, JobRows(KEYS, 1, MADE))
    first.write(row(1))
    first.close()
    assert write(path) == [2]


FULL = """
import resource, sys
from pathlib import Path
from pagedkv.cli.job_rows import JobRows
from pagedkv.cli.output import Output
resource.setrlimit(resource.RLIMIT_FSIZE, (150, 150))
output = Output(Path(sys.argv[1]), JobRows(["a", "b"], 1, {}))
try:
    for index in range(2):
        output.write({"index": index, "sample": 0, "error": None, "text": "x" * 50})
except OSError as error:
    print(error)
output.close()
"""


@pytest.mark.skipif(sys.platform == "win32", reason="has no limit on the size of files")
def test_a_full_disk_is_said_and_the_torn_line_dropped_later(path, fresh_python):
    said = fresh_python("-c", FULL, str(path))
    assert "too large" in said
    assert path.stat().st_size == 150
    assert write(path, keys=["a", "b"], made_with={}) == [1]
    assert places(path) == [(0, 0)]


RACE = """
import sys
from pathlib import Path
from pagedkv.cli.job_rows import JobRows
from pagedkv.cli.output import Output
from pagedkv.cli.errors import UsageError
sys.stdin.read(1)
opened = 0
while opened < 50:
    try:
        output = Output(Path(sys.argv[1]), JobRows(["a"], 1, {}))
    except UsageError as error:
        assert "another process" in str(error), error
        continue
    holder = Path(sys.argv[1] + ".holder")
    holder.open("x").close()  # fails if somebody else has the file open
    holder.unlink()
    output.close()
    opened += 1
"""


def test_the_lock_holds_while_others_come_and_go(path):
    command = [sys.executable, "-c", RACE, str(path)]
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    racing = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, env=env)
        for _ in range(3)
    ]
    for process in racing:
        process.stdin.write(b"!")
        process.stdin.flush()
    for process in racing:
        _, stderr = process.communicate(timeout=600)
        assert process.returncode == 0, stderr.decode()


def test_a_file_without_rows_that_cannot_be_removed_stays_empty(path, monkeypatch):
    def unlink(at: Path, missing_ok: bool = False) -> None:
        raise PermissionError(13, "Permission denied", str(at))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", unlink)
        assert write(path) == [0, 1, 2]
    assert path.read_bytes() == b""
    assert write(path, row(0)) == [0, 1, 2]
