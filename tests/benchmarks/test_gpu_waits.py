"""The benchmark of waits for a card, tried out where there is none."""

from __future__ import annotations

import json
import warnings

import pytest
import torch

from benchmarks.gpu.waits import waits


def test_a_wait_is_told_by_its_line():
    def run() -> None:
        for _ in range(3):
            warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        warnings.warn("something else", stacklevel=1)

    ((line, count),) = waits(run, torch.device("cpu")).items()
    assert line.startswith("tests/benchmarks/test_gpu_waits.py:")
    assert count == 3


@pytest.mark.slow
def test_every_way_to_generate_is_told(fresh_python, tmp_path):
    fresh_python("-m", "benchmarks.gpu.waits", "--tiny", f"--out={tmp_path}")
    found = json.loads((tmp_path / "waits.json").read_text())
    ways = [name for name in found if ": waits in " in name]
    assert len(ways) == 12
    assert all(found[name] == {} for name in ways)  # nobody waits for a CPU
