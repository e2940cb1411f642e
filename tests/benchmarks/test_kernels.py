"""The kernel benchmarks' inputs and checks: what is wrong is found out before it is timed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

# The repository root stays off sys.path, where a folder called kernels lies.
package = ModuleType("benchmarks")
package.__path__ = [str(Path(__file__).resolve().parents[2] / "benchmarks")]
sys.modules.setdefault("benchmarks", package)

from benchmarks import bench_kernels as kernels  # noqa: E402
from benchmarks.cells import Cell, Heads, make_case  # noqa: E402
from benchmarks.gpu import grid  # noqa: E402
from benchmarks.peers import dense  # noqa: E402
from pagedkv import paged_attention  # noqa: E402

CPU = torch.device("cpu")
HEADS = Heads(4, 2, 16)
RAGGED = kernels.rows(HEADS, (40, 9, 33), (1, 9, 20))
SHARED = kernels.rows(HEADS, (40,) * 3, (1,) * 3, shared=32)


class Stub:
    """What `Bench` needs of pytest-benchmark."""

    disabled = False

    def __init__(self) -> None:
        self.extra_info, self.group = dict[str, Any](), ""
        self.stats: Any = None

    def pedantic(self, call: Callable[[], object], rounds: int, warmup_rounds: int) -> None:
        call()
        self.stats = SimpleNamespace(stats=SimpleNamespace(median=50e-6))


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


def test_a_wrong_call_is_not_timed() -> None:
    case = make_case(RAGGED, CPU, torch.float32)
    check, right = kernels.right(case), dense.sdpa(gather=False)(case)
    stub = Stub()
    bench = kernels.Bench(stub, "small", dict)
    for wrong in (lambda: right() * 1.001, lambda: right() * float("nan")):
        with pytest.raises(AssertionError, match="relative error"):
            bench(wrong, check, kernels.what_of("decode", RAGGED, "torch"), 1)
    assert stub.stats is None


def test_rates_are_set_against_what_the_processor_reaches() -> None:
    stub, tops = Stub(), {"read_gbs": 4000.0, "matmul_tflops": 700.0}
    bench = kernels.Bench(stub, "small", lambda: tops)
    bench(lambda: None, lambda call: None, kernels.what_of("decode", RAGGED, "sdpa"), 10**5)
    assert stub.group == f"decode/{kernels.label(RAGGED)}"
    assert stub.extra_info["baseline"]
    assert stub.extra_info["GB/s"] == pytest.approx(2.0)
    assert stub.extra_info["share of read stream"] == pytest.approx(0.0005)
    assert "flops" not in stub.extra_info
