"""The GPU benchmark of formats, tried out where there is no GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import tests.benchmarks.test_gpu_grid  # noqa: F401  # where the benchmarks are found
from benchmarks.cells import Case, Cell, make_case
from benchmarks.gpu import capacity, measure
from benchmarks.peers import dense
from benchmarks.peers import kernels as peers

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def cell() -> Cell:
    return replace(capacity.cells()[0].shrunk(rows=2, tokens=800), page_size=16)


def test_every_way_is_right_and_timed(cell: Cell) -> None:
    found = measure.measure_cell(cell, CPU, lambda _: None, set())["ways"]
    ours = capacity.variants(cell)
    assert set(found) == {*ours, *cell.peers}
    assert len(ours) == 8
    for name in ours:
        assert found[name]["times"]["eager"] > 0, (name, found[name])
        assert ("error" in found[name]) is ("read" not in name)
        assert found[name].get("error", 0) < measure.TOLERANCE
    assert found["int4"]["bytes"] < 0.5 * found["ours"]["bytes"]


def test_the_peer_attends_to_what_it_is_held_against(
    cell: Cell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its own code needs a card; what it is given and compared with does not."""

    def attend(case: Case) -> object:
        k, v = (x.float() for x in (case.k_pages, case.v_pages))
        return dense.sdpa(True)(replace(case, k_pages=k, v_pages=v))

    monkeypatch.setitem(peers.PEERS, "flashinfer", attend)
    case = make_case(cell, CPU, torch.float32)
    call, check, nbytes = peers.flashinfer_fp8(case)
    assert check is not None
    assert check(call) < 1e-5
    assert nbytes == case.k_pages.nbytes // 2
    plain = dense.check_attention(case)
    assert plain(call) > 0.01, "fp8 is told apart"


def test_an_output_of_nan_is_an_error(cell: Cell, monkeypatch: pytest.MonkeyPatch) -> None:
    real = capacity.paged_attention
    monkeypatch.setattr(capacity, "paged_attention", lambda *args: real(*args) * float("nan"))
    monkeypatch.setattr(capacity, "variants", lambda cell: {"ours": {}})
    found = measure.measure_cell(cell, CPU, lambda _: None, set())
    assert found["ways"]["ours"] == {"wrong": "nan"}
