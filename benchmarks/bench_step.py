"""Host time of a whole decode step through the Triton backend, and of the calls in it.

16 rows of about 1000 tokens, 30 layers. Measured in a process of its own by `host_cost.py`: on the
card where there is one, else on one that is not there, which leaves out what the CUDA driver takes.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.measuring import Clock, What, device_name

ROOT = Path(__file__).resolve().parents[1]
ROUNDS = {"small": 20, "full": 400}
PARTS = (
    "step",
    "step: prepare",
    "step: 30 layers",
    "step: commit",
    "layer: write and attend",
    "layer: write_kv",
    "kernels: plan",
    "kernels: attend, one launch",
    "kernels: attend, two launches",
    "kernels: write_kv",
)
# What the names promise.
LAUNCHES = {
    "layer: write_kv": 1,
    "kernels: attend, one launch": 1,
    "kernels: attend, two launches": 2,
    "kernels: write_kv": 1,
}
TARGETS = {"kernels: attend, two launches": 20.0}  # microseconds


@pytest.fixture(scope="session")
def host_costs(size: str, device: torch.device) -> dict[str, Any]:
    """Samples in seconds, and kernels launched, of every part."""
    pytest.importorskip("triton")
    # Compiled, not interpreted, whatever tests that ran before in this process wanted; and with
    # the root on the module path, where nothing imports a package called kernels.
    env = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", "PYTHONSAFEPATH")}
    where = "cuda" if device.type == "cuda" else "fake"
    command = [sys.executable, "-m", "benchmarks.host_cost", "--device", where]
    command += ["--rounds", str(ROUNDS[size])]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("part", PARTS)
def bench_step(
    clock: Clock,
    benchmark: Any,
    figure: Callable[..., None],
    host_costs: dict[str, Any],
    device: torch.device,
    part: str,
) -> None:
    assert host_costs.keys() == set(PARTS)
    found = host_costs[part]
    launches, seconds = found["launches"], found["seconds"]
    if launches is not None:
        assert launches == LAUNCHES.get(part, launches)
    What("host", "B16-S1000-L30", part).describe(benchmark)
    real = device.type == "cuda"
    name = device_name(device)
    benchmark.extra_info |= {
        "device": name if real else f"{name}; no GPU, nothing is launched",
        "launches": launches,
        "timed": "host, device idle" if real else "host",
    }
    left = iter(seconds)

    def replay() -> None:
        clock.now += next(left)

    benchmark.pedantic(replay, rounds=len(seconds))
    if benchmark.stats:
        spent = 1e6 * benchmark.stats.stats.median
        figure(f"host time, {part}", spent, "us", TARGETS.get(part))
