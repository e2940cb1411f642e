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
from benchmarks import measuring  # noqa: E402
from benchmarks.cells import Cell, Heads, make_case  # noqa: E402
from benchmarks.gpu import dense, grid  # noqa: E402
from pagedkv import paged_attention  # noqa: E402

CPU = torch.device("cpu")
HEADS = Heads(4, 2, 16)
RAGGED = kernels.rows(HEADS, (40, 9, 33), (1, 9, 20))
SHARED = kernels.rows(HEADS, (40,) * 3, (1,) * 3, shared=32)


class Stub:
    """What `Bench` needs of pytest-benchmark."""

    disabled = False

    def __init__(self, timer: Callable[[], float]) -> None:
        self.timer, self.extra_info, self.group = timer, dict[str, Any](), ""
        self.stats: Any = None

    def pedantic(self, call: Callable[[], object], rounds: int, warmup_rounds: int) -> None:
        start = self.timer()
        call()
        self.stats = SimpleNamespace(stats=SimpleNamespace(median=self.timer() - start))


def test_names_tell_cases_apart() -> None:
    bf16 = torch.bfloat16
    assert kernels.label(grid.decode_cells()[0], bf16) == "B32-S4096-H32-G8-D128-p16-bf16"
    assert kernels.label(RAGGED, bf16) == "B3-S9..40-T1..20-H4-G2-D16-p16-bf16"
    named = [kernels.label(cell, bf16) for cell in grid.core() if cell.kind == "attend"]
    # Cells for host time are decode cells of their own.
    assert len(set(named)) >= len(named) - 2


@pytest.mark.parametrize("cell", [RAGGED, SHARED, replace(SHARED, shared=0)], ids=kernels.label)
def test_a_cache_holds_the_case(cell: Cell) -> None:
    ready = kernels.placed(cell, CPU, "torch")
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
    stub = Stub(measuring.Clock())
    bench = measuring.Bench(stub, None, CPU, "small", lambda: {})
    for wrong in (lambda: right() * 1.001, lambda: right() * float("nan")):
        with pytest.raises(AssertionError, match="relative error"):
            bench(wrong, measuring.What("decode", "case", "way"), check)
    pools, expected = [torch.full((4,), float("nan"))], [torch.full((4,), float("nan"))]
    expected[0][1] = 1.0
    with pytest.raises(AssertionError, match="1 elements"):
        kernels.same(pools, expected)(lambda: None)
    assert stub.stats is None


def test_device_time_is_what_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    class Way:
        graph = many = None
        samples, repeats, call = 3, 1, print

        def __init__(self, *_: Any) -> None: ...
        def cold(self, *_: Any) -> float:
            return 50.0

        def burst(self, *_: Any) -> float:
            return 40.0

        def host(self) -> float:
            return 7.0

    monkeypatch.setattr(measuring, "Way", Way)
    clock = measuring.Clock()
    stub = Stub(clock)
    top = {"read_gbs": 4000.0, "matmul_tflops": 700.0}
    bench = measuring.Bench(stub, clock, CPU, "small", lambda: top)
    bench(lambda: None, measuring.What("decode", "case", "way", 10**5), lambda call: None)
    assert stub.group == "decode/case"
    assert stub.stats.stats.median == pytest.approx(50e-6)
    assert stub.extra_info["GB/s"] == pytest.approx(2.0)
    assert stub.extra_info["share of read stream"] == pytest.approx(0.0005)
    assert stub.extra_info["warm L2 (us)"] == 40.0
    assert "flops" not in stub.extra_info
