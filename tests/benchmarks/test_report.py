"""The benchmarks' report, from a results file made by hand."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import report

CASE = "decode/B1-S64-H4-G2-D64-p16-fp32-t1"


def cell(id: str, flops: int, **microseconds: float) -> dict[str, Any]:
    ways = {name: {"times": {"eager": spent}} for name, spent in microseconds.items()}
    facts = {"id": id, "bytes": 10**9, "flops": flops, "base": None, "target": "", "run": 0}
    return facts | {"ways": ways}


@pytest.fixture
def data() -> dict[str, Any]:
    """Returns a file as `benchmarks.gpu.run` saves it."""
    ceilings = {"read_gbs": 4000.0, "matmul_tflops": 667.0}
    machine = {"device": "a card", "date": "2026-11-21", "commit": "abc"}
    state = {"correctness": "passed", "binaries": "passed"}
    run = {"machine": machine, **state, "ceilings": ceilings}
    prefill = cell("prefill/B1-S8192", 10**12, ours=2000.0, read=1000.0)
    cells = [cell(CASE, 0, ours=1000.0, sdpa=2000.0), prefill]
    return {"runs": [run], "cells": {each["id"]: each for each in cells}}


def test_ways_of_a_case_are_set_against_ours(data: dict[str, Any]) -> None:
    text = report.render(data)
    lines = [" ".join(line.split()) for line in text.splitlines()]
    about = "device a card, date 2026-11-21, commit abc"
    assert lines[0].startswith(f"- {about}; correctness passed; binaries passed; ")
    head, _, *rows = lines[lines.index("### decode") + 2 : lines.index("### prefill") - 1]
    assert head == "| case | way | median | GB/s | share | time / ours | eager (us) |"
    assert rows == [
        f"| {CASE} | ours | 1 ms | 1000 | 25% of read stream | 1.00x | 1000 |",
        f"| {CASE} | sdpa | 2 ms | 500 | 12% of read stream | 2.00x | 2000 |",
    ]
    ours, read = lines[-2:]
    assert ours.startswith("| prefill/B1-S8192 | ours | 2 ms | 500 | 500 | 75% of matmul |")
    # A yardstick makes no arithmetic.
    assert read.startswith("| prefill/B1-S8192 | read | 1 ms | 1000 | – | 25% of read stream |")
