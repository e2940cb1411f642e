"""Attention's benchmarks: inputs and checks; what is wrong is found out before it is timed."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks import bench_attention as attention
from benchmarks.cells import Cell, Heads, make_case
from benchmarks.peers import dense
from pagedkv import paged_attention

CPU = torch.device("cpu")
HEADS = Heads(4, 2, 16)
RAGGED = attention.rows(HEADS, (40, 9, 33), (1, 9, 20))
SHARED = attention.rows(HEADS, (40,) * 3, (1,) * 3, shared=32)


@pytest.mark.parametrize(
    "cell", [RAGGED, SHARED, replace(SHARED, shared=0)], ids=["ragged", "shared", "apart"]
)
def test_a_cache_holds_the_case(cell: Cell) -> None:
    ready = attention.placed(cell)
    table = ready.step.page_table()
    assert (table[0, 0] == table[1, 0]).item() == bool(cell.shared)
    assert ready.pools[0].isnan().any()
    check = attention.right(ready.case)
    check(dense.sdpa(gather=False)(ready.case))
    ready.forget()
    with pytest.raises(AssertionError, match="relative error nan"):
        check(dense.sdpa(gather=False)(ready.case))
    check(lambda: paged_attention(ready.case.q, ready.k, ready.v, ready.step, 0))


def test_rows_that_share_nothing_read_more() -> None:
    cell = replace(SHARED, shared=0)
    assert cell.bytes == SHARED.bytes + 2 * 32 * SHARED.token_bytes()


def test_a_wrong_call_is_not_timed() -> None:
    case = make_case(RAGGED, CPU, torch.float32)
    check, right = attention.right(case), dense.sdpa(gather=False)(case)
    for wrong in (lambda: right() * 1.001, lambda: right() * float("nan")):
        with pytest.raises(AssertionError, match="relative error"):
            attention.require_right({"right": (right, check), "wrong": (wrong, check)})
    assert attention.require_right({"right": (right, check)}) == {"right": right}


@pytest.mark.parametrize("lens", [(40, 40), (40, 9)], ids=str)
def test_ways_over_contiguous_rows_are_right(lens: tuple[int, ...]) -> None:
    ways = attention.contiguous(attention.rows(HEADS, lens, (1, 1)))
    assert len(ways) == 2 + (len(set(lens)) == 1)
    for call, check in ways.values():
        check(call)
