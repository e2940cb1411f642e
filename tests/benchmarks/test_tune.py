"""The offline tuner, as far as a machine without a GPU can tell."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from benchmarks.cells import Heads
from benchmarks.gpu import tune
from pagedkv.kernels.triton import decode, decode_tuning, prefill

ROOT = Path(__file__).resolve().parents[2]
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
LAYER = tune.Layer(Heads(32, 8, 128), 16, torch.bfloat16, 90)
SMALL = tune.Layer(Heads(2, 1, 16), 16, torch.float32, 90)


def test_workloads_make_products_of_the_rows_that_are_tuned() -> None:
    for rows, new in ((16, 1), (32, 8), (64, 16)):
        assert {cell.new[0] for cell in tune.workloads(LAYER, rows)} == {new}
    apart = LAYER._replace(heads=Heads(8, 8, 128))
    assert tune.workloads(apart, 64) == []  # 16 queries of one head are no 64 rows
    assert all(cell.new[0] > decode_tuning.MOST_QUERIES for cell in tune.workloads(LAYER, None))


def test_lines_are_those_of_the_tables() -> None:
    for rows, known in zip(tune.ROWS, decode_tuning.TUNING[(90, True, 128, 2)]):
        split = {16: 256, 32: 1024, 64: 1024}[rows]
        assert tune.known(LAYER, decode, rows) == known._replace(split=split)
        assert eval(tune.written(known), {"Tuning": decode_tuning.Tuning}) == known
    known = prefill.TUNING[(None, True, 128, 2)]
    line = tune.line(LAYER, tune.written(known))
    assert eval(f"{{{line}}}", {"Tuning": prefill.Tuning}) == {(90, True, 128, 2): known}


def test_scores_are_relative_to_the_best_and_need_every_workload() -> None:
    times = [{"a": 10.0, "b": 20.0, "c": 5.0}, {"a": 40.0, "b": 10.0}]
    found = tune.score(times)
    assert list(found) == ["b", "a"]
    assert math.isclose(found["b"], 2.0)  # 4 times and once the best
    assert math.isclose(found["a"], math.sqrt(8.0))


def test_what_is_wrong_is_not_timed(monkeypatch, capsys) -> None:
    if DEVICE == "cpu":
        monkeypatch.setattr(tune.measuring, "SAMPLES", 3)
        monkeypatch.setattr(tune.measuring, "ROUNDS", 1)
    monkeypatch.setattr(tune, "LOADS", {16: ((1, 40), (2, 33))})
    every = [{"block_n": 16}, {"block_n": 32}]
    cells = tune.workloads(SMALL, 16)
    ranked = tune.fastest(cells, "decode", every, SMALL, DEVICE)
    assert sorted(each["block_n"] for each in ranked) == [16, 32]
    monkeypatch.setattr(tune, "TOLERANCE", {4: 0.0})
    assert tune.race(cells[0], "decode", every, SMALL, DEVICE) == {}
    assert "wrong" in capsys.readouterr().out


@pytest.mark.slow
def test_dry_run_lists_what_the_compiler_makes_well(tmp_path: Path) -> None:
    """One configuration fits a card with little shared memory, the other does not."""
    env = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-P", "-m", "benchmarks.gpu.tune", "--dry-run", "--kernel", "decode"]
    command += ["--rows", "16", "--block-n", "32", "128", "--warps", "4", "--stages", "3"]
    done = subprocess.run(
        [*command, "--arch", "120", "--jobs", "1"],
        env=env | {"PYTHONPATH": str(ROOT)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "stays block_n=32 num_warps=4 num_stages=3: " in done.stdout
    assert "  out block_n=128" in done.stdout
    assert "(120, False, 128, 2): (Tuning(" in done.stdout
