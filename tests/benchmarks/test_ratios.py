"""Claims of a benchmark run: their tables, the file of ratios, and what the documentation says."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.ratios import Claim, load, save, tables

ROOT = Path(__file__).resolve().parents[2]
BASELINE = ROOT / "benchmarks" / "ratios.json"
FASTER = Claim("whole jobs", "a job", "ours / theirs", 0.5, target=0.6)
SECONDS = Claim("whole jobs", "a job", "ours", 12.0, "s")


def test_runs_that_are_saved_in_one_file_become_ranges(tmp_path: Path) -> None:
    path = tmp_path / "ratios.json"
    for value in (0.5, 0.7, 0.6):
        save([Claim("growth", "a job", "ours / theirs", value), SECONDS], path, "small")
    assert load(path, "small") == {"growth": {"a job: ours / theirs": [0.5, 0.7]}}
    with pytest.raises(ValueError, match="ratios of --size=small, this run is full"):
        load(path, "full")


@pytest.mark.parametrize(
    ("value", "says"), [(0.44, "lower"), (0.46, ""), (0.76, ""), (0.78, "higher")]
)
def test_a_ratio_that_lies_outside_by_more_than_noise_is_marked(value: float, says: str) -> None:
    saved = {"growth": {"a job: ours / theirs": [0.5, 0.7]}}
    found = Claim("growth", "a job", "ours / theirs", value).beside(saved)
    assert found == ("0.50 to 0.70x", says)
    assert Claim("growth", "a job", "another / theirs", value).beside(saved) == ("", "new")
    lines = tables([Claim("growth", "a job", "ours / theirs", value), SECONDS], False, saved)
    assert len(lines["growth"]) == 3
    assert len(lines["whole jobs"]) == 2  # nothing but a head, as seconds are not compared


def test_a_table_names_a_job_once_and_a_target_is_met_at_full_size_only() -> None:
    claims = [FASTER, SECONDS, Claim("whole jobs", "a job", "memory", 0.7, target=0.6)]
    lines = [" ".join(line.split()) for line in tables(claims, full=True)["whole jobs"]]
    assert lines[0] == "| job | claim | measured | target |"
    assert lines[2:] == [
        "| a job | ours / theirs | 0.50x | 0.60x, met |",
        "| | ours | 12 s | |",
        "| | memory | 0.70x | 0.60x, missed |",
    ]
    assert tables(claims, full=False)["whole jobs"][2].rstrip(" |").endswith("0.60x")


def documented() -> list[tuple[str, str]]:
    """(area, "job: claim") of every row of the measured tables, in their order."""
    text = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    found, area, job, wanted = [], "", "", False
    for line in text.splitlines():
        if line.startswith("#"):
            area, wanted = line.lstrip("# "), False
        cells = [cell.strip() for cell in line.strip("|").split(" |")]
        if cells[:2] == ["job", "claim"]:
            wanted = True
        elif not line.startswith("|"):
            wanted = False
        elif wanted and not line.startswith("|---"):
            job = cells[0] or job
            found.append((area, f"{job}: {cells[1]}"))
    return found


# Of the full size alone, or beside a program that is not installed everywhere.
ELSEWHERE = [
    *(f"a pass from the disk: streamed, {n}/4 resident / the slower" for n in (1, 2, 3)),
    "four sentences behind examples: pagedkv / llama.cpp",
]


def test_the_documentation_has_claims_of_the_suite_in_their_order_and_words() -> None:
    ratios = json.loads(BASELINE.read_text())["ratios"]
    claims = [(area, claim) for area, of_it in ratios.items() for claim in of_it]
    there = [row for row in documented() if " / " in row[1] and row[1] not in ELSEWHERE]
    assert len(there) > 20
    assert there == [each for each in claims if each in there]


@pytest.mark.slow
def test_each_way_is_a_row_of_its_job_and_ratios_are_held_against_a_file(tmp_path: Path) -> None:
    file, run = tmp_path / "mine.json", [sys.executable, "-m", "pytest", "benchmarks/"]
    run += ["-k", "bench_grow", "--benchmark-json", str(tmp_path / "all.json")]
    # Nothing is timed by a worker of pytest-xdist, which this process may be.
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    env |= {"PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1"}

    def printed(*options: str) -> str:
        done = subprocess.run([*run, *options], cwd=ROOT, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    out = printed("--save-ratios", str(file))
    assert " benchmark 'growth: 256 tokens more': 2 tests " in out
    assert re.search(r"^torch.cat +[\d.,]+ \([\d.]+\)", out, re.MULTILINE)
    assert re.search(r"^\| 256 tokens more +\| the pool grows / torch.cat", out, re.MULTILINE)
    rows = json.loads((tmp_path / "all.json").read_text())["benchmarks"]
    assert {row["name"] for row in rows} >= {"torch.cat", "the pool grows"}
    assert all(row["stats"]["rounds"] == len(row["stats"]["data"]) for row in rows)
    assert "ratios lie outside of the baseline" in printed("--compare-ratios", str(file))
