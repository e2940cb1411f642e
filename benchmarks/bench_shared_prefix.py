"""Decoding rows that begin with the same pages: read once for all of them, or once for each.

`triton` and `torch` find out by themselves that rows share pages. `triton-apart` and `torch-apart`
run the same texts with nothing shared, and their rate counts what they then must read; so does that
of the baseline, SDPA over contiguous K and V. On a GPU `torch` does not read a prefix once.
"""

import pytest
import torch

from benchmarks import kernel_cases as cases
from benchmarks.gpu import grid
from benchmarks.kernel_cases import new_cell
from benchmarks.measuring import Bench, What

CELLS = {
    "small": [new_cell((8, 2, 64), (544,) * 8, (1,) * 8, shared=512)],
    "cpu": [
        new_cell((9, 3, 64), (1024 + 64,) * 16, (1,) * 16, shared=1024),
        new_cell((9, 3, 64), (4096 + 64,) * 16, (1,) * 16, shared=4096),
        new_cell((9, 3, 64), (256 + 1024,) * 16, (1,) * 16, shared=256),
    ],
    "cuda": [cell for cell in grid.other_cells() if cell.shared],
}
WAYS = [f"{backend}{ending}" for backend in cases.backends() for ending in ("", "-apart")]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    cases.spread(metafunc, CELLS, (*WAYS, "sdpa"))


def bench_shared_prefix(bench: Bench, device: torch.device, cell: grid.Cell, way: str) -> None:
    case = cases.case_of(cell, device)
    backend, _, ending = way.partition("-")
    what = What(
        op="shared prefix",
        case=cases.label(cell, case.q.dtype),
        way=way,
        nbytes=cases.nbytes(cell, apart=bool(ending) or way == "sdpa"),
        flops=cell.flops,
        baseline=way == "sdpa",
        shape={**cases.shape_of(cell), "shared": cell.shared},
    )
    call = cases.attend(case, backend, apart=bool(ending))
    bench(call, what, cases.check_attention(case))
