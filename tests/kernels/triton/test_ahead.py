"""Kernels that other processes compile: what fails is told by name, and fails nothing else."""

import sys

import pytest

pytest.importorskip("triton")

from pagedkv.kernels.triton import ahead

JOBS = [ahead.Job("pagedkv.kernels.triton.copy", name, (), (), ()) for name in ("_none", "_nor")]


def test_what_does_not_compile_is_told_by_name_and_a_death_takes_its_own_kernels_alone(monkeypatch):
    run = ahead.subprocess.run

    def dies(command, **options):
        there = JOBS[0].kernel.encode() in options["input"]
        return run([sys.executable, "-c", "import os; os.abort()"] if there else command, **options)

    monkeypatch.setattr(ahead.subprocess, "run", dies)
    first, second = ahead.compile_all(JOBS, 90, workers=2)
    assert "ended with -6" in first.error
    assert second.job == JOBS[1]
    assert not second.cached
    assert JOBS[1].kernel in second.error
    assert "has no attribute" in second.error


def test_nothing_to_compile_starts_no_process(monkeypatch):
    monkeypatch.delattr(ahead, "subprocess")
    assert ahead.compile_all([], 90) == []
