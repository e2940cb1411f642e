"""The benchmarks' report, from a results file made by hand."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

# The repository root stays off sys.path, where a folder called kernels lies.
package = ModuleType("benchmarks")
package.__path__ = [str(Path(__file__).resolve().parents[2] / "benchmarks")]
sys.modules.setdefault("benchmarks", package)

from benchmarks import report  # noqa: E402

CASE = "B1-S64-H4-G2-D64-p16-bf16"


def timed(way: str, median: float, **info: Any) -> dict[str, Any]:
    facts = {"op": "decode", "case": CASE, "way": way}
    facts |= {"GB/s": 1.0 / median, "share of read stream": 0.0005 / median}
    facts |= {"read stream (GB/s)": 4000.0, "nbytes": 10**9}
    return {
        "name": f"bench_decode[{CASE}-{way}]",
        "group": f"decode/{CASE}",
        "stats": {"median": median},
        "extra_info": facts | info,
    }


@pytest.fixture
def data() -> dict[str, Any]:
    matrix = {"flops": 10**12, "TFLOPS": 500.0, "share of matmul": 0.75, "matmul (TFLOPS)": 667.0}
    found = [
        timed("triton", 0.001, **{"warm L2 (us)": 900.0}),
        timed("sdpa", 0.002, baseline=True),
        timed("triton", 0.002, **matrix, op="prefill", case="B1-S8192"),
        {"name": "bench_fork", "group": None, "stats": {"median": 7.8e-6}, "extra_info": {}},
    ]
    found[2]["group"] = "prefill/B1-S8192"
    # Files list what ran last last: cases of an operation need not be neighbours.
    machine = {"gpu": {"name": "a card"}, "packages": {"torch": "2.11.0"}}
    commit = {"id": "abc", "dirty": True}
    data = {"machine_info": machine, "commit_info": commit, "datetime": "2026-11-21T10:00:00"}
    return data | {"benchmarks": [found[0], *found[2:], found[1]]}


def test_ways_of_a_case_are_set_against_its_baseline(data: dict[str, Any]) -> None:
    lines = [" ".join(line.split()) for line in report.render(data).splitlines()]
    assert "- device: a card" in lines
    assert "- date: 2026-11-21" in lines
    assert "- torch: 2.11.0" in lines
    assert "- commit: abc, changed" in lines
    decode = lines[lines.index("### decode") + 2 : lines.index("### prefill") - 1]
    del decode[1]  # the rule under the head
    assert decode == [
        "| case | way | median | GB/s | share | time / baseline | warm L2 (us) |",
        f"| {CASE} | triton | 1 ms | 1000 | 50% of read stream | 0.50x | 900 |",
        f"| {CASE} | sdpa | 2 ms | 500 | 25% of read stream | 1.00x | – |",
    ]


def test_the_nearer_ceiling_is_named(data: dict[str, Any]) -> None:
    assert "| B1-S8192 | triton | 2 ms | 500 | 500 | 75% of matmul |" in " ".join(
        report.render(data).split()
    )


def test_benchmarks_without_a_group_come_by_name(data: dict[str, Any]) -> None:
    assert "| bench_fork | 7.8 us |" in report.render(data)


def test_a_picture_is_drawn_where_asked(
    data: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("matplotlib")
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
    pytest.importorskip("matplotlib")
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
