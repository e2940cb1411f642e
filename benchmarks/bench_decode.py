"""One layer's attention for rows that each bring a few tokens, over pages that lie anywhere.

At full size a GPU runs the decode, page size, ragged and verify cells of `benchmarks/gpu/grid.py`.
The baseline is SDPA over K and V that are contiguous already, which no paged cache has at hand.
"""

import pytest
import torch

from benchmarks import kernel_cases as cases
from benchmarks.gpu import grid
from benchmarks.kernel_cases import new_cell
from benchmarks.measuring import Bench, What

SPREAD = tuple(range(512, 4097, 238))  # sixteen lengths
CELLS = {
    "small": [
        new_cell((8, 2, 64), (256,) * 4, (1,) * 4),
        new_cell((8, 2, 64), (40, 300, 17, 129), (1,) * 4),
        new_cell((8, 2, 64), (200,) * 4, (4,) * 4),
    ],
    "cpu": [
        new_cell((9, 3, 64), (512,) * 16, (1,) * 16),
        new_cell((9, 3, 64), (4096,) * 16, (1,) * 16),
        new_cell((9, 3, 64), (4096,) * 16, (1,) * 16, page_size=64),
        new_cell((9, 3, 64), SPREAD, (1,) * len(SPREAD)),
        new_cell((32, 8, 128), (4096,) * 4, (1,) * 4),
        new_cell((9, 3, 64), (4096,) * 16, (4,) * 16),
    ],
    "cuda": [
        *grid.decode_cells(),
        *grid.page_cells(),
        *grid.ragged_cells(),
        *grid.verify_cells(),
    ],
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    cases.spread(metafunc, CELLS, (*cases.backends(), "sdpa"))


def bench_decode(bench: Bench, device: torch.device, cell: grid.Cell, way: str) -> None:
    case = cases.case_of(cell, device)
    what = What(
        op="decode",
        case=cases.label(cell, case.q.dtype),
        way=way,
        nbytes=cases.nbytes(cell),
        flops=cell.flops,
        baseline=way == "sdpa",
        shape=cases.shape_of(cell),
    )
    bench(cases.attend(case, way), what, cases.check_attention(case))
