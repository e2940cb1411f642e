"""Kernels that other processes compile: what fails is told by name, and fails nothing else."""

import sys

import pytest

pytest.importorskip("triton")

from pagedkv.kernels.triton import ahead

JOBS = [ahead.Job("pagedkv.kernels.triton.copy", name, (), (), ()) for name in ("_none", "_nor")]


def test_a_kernel_that_does_not_compile_is_told_by_name():
    for done, job in zip(ahead.compile_all(JOBS, 90, workers=1), JOBS):
        assert done.job == job
        assert not done.cached
        assert job.kernel in done.error
        assert "has no attribute" in done.error


def test_a_process_that_dies_takes_only_its_own_kernels_with_it(monkeypatch):
    run = ahead.subprocess.run

    def dies(command, **options):
        there = JOBS[0].kernel.encode() in options["input"]
        return run([sys.executable, "-c", "import os; os.abort()"] if there else command, **options)

    monkeypatch.setattr(ahead.subprocess, "run", dies)
    first, second = ahead.compile_all(JOBS, 90, workers=2)
    assert "ended with -6" in first.error
    assert "has no attribute" in second.error


def test_nothing_to_compile_starts_no_process(monkeypatch):
    monkeypatch.delattr(ahead, "subprocess")
    assert ahead.compile_all([], 90) == []
