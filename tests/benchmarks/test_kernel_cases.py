"""The kernel benchmarks' inputs and checks: what is wrong is found out before it is timed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

# The repository root stays off sys.path, where a folder called kernels lies.
package = ModuleType("benchmarks")
package.__path__ = [str(Path(__file__).resolve().parents[2] / "benchmarks")]
sys.modules.setdefault("benchmarks", package)

from benchmarks import kernel_cases as cases  # noqa: E402
from benchmarks import measuring  # noqa: E402
from benchmarks.gpu import grid  # noqa: E402

CPU = torch.device("cpu")
RAGGED = cases.new_cell((4, 2, 16), (40, 9, 33), (1, 9, 20))
SHARED = cases.new_cell((4, 2, 16), (40,) * 3, (1,) * 3, shared=32)


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
    assert cases.label(grid.decode_cells()[0], bf16) == "B32-S4096-H32-G8-D128-p16-bf16"
    assert cases.label(RAGGED, bf16) == "B3-S9..40-T1..20-H4-G2-D16-p16-bf16"
    named = [cases.label(cell, bf16) for cell in grid.core() if cell.kind == "attend"]
    # Cells for host time are decode cells of their own.
    assert len(set(named)) >= len(named) - 2


@pytest.mark.parametrize("cell", [RAGGED, SHARED], ids=["ragged", "shared"])
@pytest.mark.parametrize("apart", [False, True])
def test_a_cache_holds_the_case(cell: grid.Cell, apart: bool) -> None:
    case = grid.make_case(cell, CPU, torch.float32)
    placed = cases.place(case, "torch", apart)
    table = placed.step.page_table()
    assert (table[0, 0] == table[1, 0]).item() == bool(cell.shared and not apart)
    check = cases.check_attention(case)
    check(cases.attend(case, "sdpa"))
    check(cases.attend(case, "torch", apart))
    pools = placed.cache._storage.layer(0)
    assert pools[0].isnan().any()
    assert cases.nbytes(cell, apart=True) >= cases.nbytes(cell)


def test_a_wrong_call_is_not_timed() -> None:
    case = grid.make_case(RAGGED, CPU, torch.float32)
    check, right = cases.check_attention(case), cases.attend(case, "sdpa")
    stub = Stub(measuring.Clock())
    bench = measuring.Bench(stub, None, CPU, "small", lambda: {})
    for wrong in (lambda: right() * 1.001, lambda: right() * float("nan")):
        with pytest.raises(AssertionError, match="relative error"):
            bench(wrong, measuring.What("decode", "case", "way"), check)
    pools, expected = [torch.full((4,), float("nan"))], [torch.full((4,), float("nan"))]
    expected[0][1] = 1.0
    with pytest.raises(AssertionError, match="1 elements"):
        cases.check_pools(pools, expected)(lambda: None)
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

    monkeypatch.setattr(measuring.timing, "Way", Way)
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
