"""The kernel benchmarks' inputs and checks: what is wrong is found out before it is timed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks import bench_kernels as kernels
from benchmarks.cells import Cell, Heads, make_case
from benchmarks.gpu import grid
from benchmarks.peers import dense
from pagedkv import paged_attention

CPU = torch.device("cpu")
HEADS = Heads(4, 2, 16)
RAGGED = kernels.rows(HEADS, (40, 9, 33), (1, 9, 20))
SHARED = kernels.rows(HEADS, (40,) * 3, (1,) * 3, shared=32)


def test_names_tell_cases_apart() -> None:
    assert kernels.label(grid.decode_cells()[0]) == "B32-S4096-H32-G8-D128-p16-fp32"
    assert kernels.label(RAGGED) == "B3-S9..40-T1..20-H4-G2-D16-p16-fp32"
    named = [kernels.label(cell) for cell in grid.core() if cell.kind == "attend"]
    # Cells for host time are decode cells of their own.
    assert len(set(named)) >= len(named) - 2


@pytest.mark.parametrize("cell", [RAGGED, SHARED, replace(SHARED, shared=0)], ids=kernels.label)
def test_a_cache_holds_the_case(cell: Cell) -> None:
    ready = kernels.placed(cell)
    table = ready.step.page_table()
    assert (table[0, 0] == table[1, 0]).item() == bool(cell.shared)
    assert ready.pools[0].isnan().any()
    check = kernels.right(ready.case)
    check(dense.sdpa(gather=False)(ready.case))
    ready.forget()
    with pytest.raises(AssertionError, match="relative error nan"):
        check(dense.sdpa(gather=False)(ready.case))
    check(lambda: paged_attention(ready.case.q, ready.k, ready.v, ready.step, 0))


def test_rows_that_share_nothing_read_more() -> None:
    cell = replace(SHARED, shared=0)
    assert cell.bytes == SHARED.bytes + 2 * 32 * SHARED.token_bytes()


def test_a_wrong_call_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(RAGGED, CPU, torch.float32)
    check, right = kernels.right(case), dense.sdpa(gather=False)(case)
    monkeypatch.setattr(kernels, "measure", lambda ways: dict.fromkeys(ways, "timed"))
    for wrong in (lambda: right() * 1.001, lambda: right() * float("nan")):
        with pytest.raises(AssertionError, match="relative error"):
            kernels.timed({"right": (right, check), "wrong": (wrong, check)})
    assert kernels.timed({"right": (right, check)}) == {"right": "timed"}


@pytest.mark.parametrize("lens", [(40, 40), (40, 9)], ids=str)
def test_ways_over_contiguous_rows_are_right(lens: tuple[int, ...]) -> None:
    ways = kernels.contiguous(kernels.rows(HEADS, lens, (1, 1)))
    assert list(ways) == ["sdpa", "repeat", "cat"][: 2 + (len(set(lens)) == 1)]
    for call, check in ways.values():
        check(call)
