"""The benchmarks' report, from a results file made by hand."""

from __future__ import annotations

import json
import sys
from pathlib import Path
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
    cells = [cell(CASE, 0, ours=1000.0, sdpa=2000.0), cell("prefill/B1-S8192", 10**12, ours=2000.0)]
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
    assert "| prefill/B1-S8192 | ours | 2 ms | 500 | 500 | 75% of matmul |" in " ".join(lines)


def test_a_picture_is_drawn_where_asked(
    data: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "out.json"
    file.write_text(json.dumps(data))
    report.main([str(file), "--plots", str(tmp_path / "plots")])
    assert (tmp_path / "plots" / "out.png").stat().st_size > 0
    assert "### decode" in capsys.readouterr().out


def test_the_table_needs_no_matplotlib(
    data: dict[str, Any],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    file = tmp_path / "out.json"
    file.write_text(json.dumps(data))
    report.main([str(file)])
    printed = capsys.readouterr()
    assert "### decode" in printed.out
    assert "matplotlib" in printed.err
    assert list(tmp_path.iterdir()) == [file]


def test_cells_of_a_card_are_drawn_as_well(tmp_path: Path) -> None:
    ways = {"ours": {"times": {"graph_cold": 10.0}}, "peer": {"missing": "not here"}}
    ways["read"] = {"times": {"graph_cold": 9.0}}
    cell = {"id": "decode/A", "bytes": 10**6, "flops": 10**7, "ways": ways, "run": 0}
    cell |= {"base": None, "target": "must"}
    cells = {"decode": cell, "prefill": cell | {"id": "prefill/A", "flops": 10**10}}
    ceilings = {"read_gbs": 4000.0, "matmul_tflops": 700.0}
    runs = [{"machine": {"device": "a card"}, "ceilings": ceilings, "correctness": "passed"}]
    results = {"runs": runs, "cells": cells}
    found = {(line.case, line.way): line.info for line in report.load(results)}
    assert found["decode/A", "ours"]["GB/s"] == 100.0
    assert found["prefill/A", "ours"]["TFLOPS"] == 1000.0
    assert "TFLOPS" not in found["decode/A", "read"]  # the ceiling says as much
    assert report.plot(results, tmp_path / "roofline.png")
    assert (tmp_path / "roofline.png").stat().st_size > 10_000
