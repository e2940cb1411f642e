"""The benchmark of several cards, tried out where there are none."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from math import isfinite
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
def test_it_times_one_process_and_two(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command += ["--local-addr=127.0.0.1"]
    command += ["-m", "benchmarks.gpu.ranks", "--tiny", f"--out={tmp_path}"]
    env = os.environ | {"GLOO_SOCKET_IFNAME": "lo"}  # needs no name of this machine
    env.pop("PYTHONSAFEPATH", None)  # `-m benchmarks` is found in the folder it starts in
    done = subprocess.run(command, cwd=ROOT, env=env, timeout=240, capture_output=True, text=True)
    assert not done.returncode, done.stderr[-2000:]
    found = json.loads((tmp_path / "ranks.json").read_text())
    assert found["ranks"] == 2
    for rows in (1, 16, 64):
        for way in ("alone", "shared out"):  # a difference of two times: of a busy machine below 0
            assert isfinite(found[f"batch {rows}: {way}, ms a step"])
        assert 0 < found[f"batch {rows}: share of agreements"] < 1
