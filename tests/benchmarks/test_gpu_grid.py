"""The GPU benchmarks as far as a machine without a GPU can tell: cells, peers, results, table."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import cells, measuring, report
from benchmarks.gpu import grid, measure, ours, run
from benchmarks.peers import build, dense
from benchmarks.peers import kernels as peers
from pagedkv.kernels import reference
from tests.effort import few

CORE = grid.core()
ATTENTION = [cell for cell in CORE if cell.kind == "attend"]
CPU = torch.device("cpu")


def by_id(every: list[cells.Cell]) -> dict[str, cells.Cell]:
    return {cell.id: cell for cell in every}


def record(cell: cells.Cell, **times: float) -> run.Record:
    ways = {name: {"error": 1e-3, "times": {"graph_cold": spent}} for name, spent in times.items()}
    return {"ways": ways, "seconds": 0.1}


def test_core_grid() -> None:
    known = by_id(CORE)
    assert len(known) == len(CORE) <= 60
    for cell in CORE:
        assert len(cell.kv_lens) == len(cell.new)
        assert all(0 < new <= length for length, new in zip(cell.kv_lens, cell.new))
        assert cell.shared % cell.page_size == 0
        assert set(cell.peers) <= peers.PEERS.keys()
        assert cell.base is None or cell.base in known
        size = (cell.num_pages + cells.SPARE_PAGES) * cell.page_size * cell.token_bytes()
        assert size <= cells.POOL_CAP
        assert "must" in cell.target


def test_bytes_and_flops() -> None:
    cell = by_id(CORE)["decode/A/b32/4k/p16"]
    assert cell.bytes == 32 * 4096 * 2 * 8 * 128 * 2 + 2 * 32 * 32 * 128 * 2
    full = by_id(CORE)["prefill/A/b1/32k/p64"]
    assert full.flops == 4 * (32768 * 32769 // 2) * 32 * 128


@pytest.mark.parametrize("cell", few(CORE, *CORE[::6]), ids=lambda cell: cell.id)
def test_inputs(cell: cells.Cell) -> None:
    cell = cell.shrunk()
    case = cells.make_case(cell, CPU, torch.float32)
    held = torch.cat(
        [case.row_ids(row)[cell.shared // cell.page_size :] for row in range(len(cell.new))]
    )
    assert len(held.unique()) == len(held)
    free = torch.ones(len(case.k_pages), dtype=torch.bool)
    free[case.page_table[case.page_table >= 0].long()] = False
    assert free.sum() == cells.SPARE_PAGES
    assert case.k_pages[free].isnan().all()
    assert case.v_pages[~free].isfinite().all()
    assert len(case.slots.unique()) == len(case.q) == case.query_start_loc[-1]


@pytest.mark.parametrize("cell", few(ATTENTION, *ATTENTION[::6]), ids=lambda cell: cell.id)
def test_sdpa_and_truth_agree_with_the_reference(cell: cells.Cell) -> None:
    case = cells.make_case(cell.shrunk(rows=3, tokens=40), CPU, torch.float32)
    rows = (case.page_table, case.kv_lens, case.query_start_loc)
    true, _ = reference.paged_attention(case.q, case.k_pages, case.v_pages, *rows, scale=case.scale)
    tokens = dense.sample(case)
    assert dense.error(dense.truth(case, tokens), true[tokens]) < 1e-5
    for name in ("sdpa", "sdpa-dense"):
        assert dense.error(peers.PEERS[name](case)(), true) < 1e-5


def test_pages_of_a_row_lie_anywhere() -> None:
    case = cells.make_case(by_id(CORE)["decode/A/b1/1k/p16"], CPU)
    ids = case.row_ids(0)
    assert not (ids.diff() == 1).all()


def test_too_large_a_pool_is_refused() -> None:
    cell = replace(CORE[0], kv_lens=(1 << 20,) * 8, new=(1,) * 8)
    with pytest.raises(ValueError, match="GiB"):
        cells.make_case(cell, CPU)


def test_wrong_results_are_not_timed() -> None:
    cell = by_id(CORE)["decode/A/b1/1k/p16"].shrunk()
    case = cells.make_case(cell, CPU, torch.float32)
    check = dense.check_attention(case)
    wrong, way = measure.ready(lambda case: case.output, case, "a peer", check)
    assert wrong == {"wrong": "nan"}
    assert way is None

    def absent(case: cells.Case) -> cells.Call:
        raise peers.Missing("not here")

    assert measure.ready(absent, case, "a peer", check) == ({"missing": "not here"}, None)
    right, way = measure.ready(peers.PEERS["sdpa"], case, "sdpa", check)
    assert right["error"] < 1e-5
    assert isinstance(way, measuring.Way)


@pytest.mark.parametrize("name", ["append/A/256x1", "copy/A/16k"])
def test_writes_are_checked(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Held to the reference in place of our kernels; a call that writes nothing is found out."""
    monkeypatch.setattr(ours, "paged", reference)
    case = cells.make_case(by_id(CORE)[name].shrunk(), CPU, torch.float32)
    check = measure.CHECKS[case.cell.kind](case)
    assert check(ours.prepare(case, "ours")) == 0
    assert not check(lambda: case.k_pages) < measure.TOLERANCE


def test_what_is_left_out_is_said_and_the_rest_is_measured(monkeypatch) -> None:
    monkeypatch.setattr(measure.ours, "variants", lambda case: ["ours"])  # others are interpreted
    cell = by_id(CORE)["decode/A/b1/1k/p16"].shrunk()
    tried = []
    found = measure.measure_cell(cell, CPU, tried.append, {"ours", "flashinfer"})
    assert found["ways"]["ours"] == {"failed": "left out, because it failed before"}
    assert "times" in found["ways"]["read"]
    assert tried[0] == measure.INPUTS
    assert tried[-1] == measure.TIMING
    assert not {"ours", "flashinfer"} & set(tried)
    assert not measure.measure_cell(cell, CPU, tried.append, {measure.INPUTS})["ways"]


def test_cells_are_reported_way_by_way(tmp_path: Path) -> None:
    results = run.Results(tmp_path / "cells.json")
    results.data["runs"].append(
        {"machine": {"commit": "abc"}, "correctness": "passed", "ceilings": {"read_gbs": 4000.0}}
    )
    chosen = [by_id(CORE)[name] for name in ("decode/A/b32/4k/p16", "verify/A/q4/b32/4k")]
    spent = {"decode/A/b32/4k/p16": 100.0, "verify/A/q4/b32/4k": 110.0}
    run.run_cells(
        chosen, results, lambda cell, **_: record(cell, ours=spent[cell.id], flashinfer=135.0)
    )
    results.data["cells"][chosen[1].id]["ways"]["read"] = {"missing": "no folder"}
    results.save()
    text = report.render(json.loads(results.path.read_text()))
    lines = (" ".join(line.split()) for line in text.splitlines())
    rows = [line for line in lines if line.startswith(("| dec", "| ver"))]
    assert "commit abc; correctness passed; read_gbs 4000" in text
    decode, peer, verify, _, missing = rows
    assert "| ours | 100 us | 5374 |" in decode
    assert "| 134% of read stream |" in decode
    assert "must >= 0.95x flashinfer" in decode
    assert "| flashinfer | 135 us | 3981 |" in peer
    assert "| 1.35x |" in peer
    assert "| 1.10x |" in verify
    assert "| read | missing: no folder |" in missing


def test_planning_is_compared_with_planning() -> None:
    times = {"graph_cold": 10.0, "eager_cold": 12.0}
    ways = {
        "ours": {"times": times},
        "ours+plan": {"times": {"graph_cold": 14.0, "eager_cold": 20.0}},
    }
    assert report.beside("flashinfer", {"graph_cold": 15.0}, ways) == 10.0
    assert report.beside("flashinfer+plan", {"eager_cold": 60.0}, ways) == 20.0
    assert report.beside("ours+plan", {"graph_cold": 14.0}, ways) == 10.0


def test_dry_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["--dry-run", "-k", "pages/"]) == 0
    printed = capsys.readouterr().out
    assert "5 cells" in printed
    assert "flashinfer:" in printed


def test_modules_that_are_built_are_found(tmp_path: Path) -> None:
    (tmp_path / "page").mkdir()
    (tmp_path / "page" / "page.so").touch()
    assert build.built(tmp_path) == ["page"]
