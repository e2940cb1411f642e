"""One layer's causal attention for rows that bring many tokens: whole prompts, chunks, mixtures.

At full size a GPU runs the prefill cells of `benchmarks/gpu/grid.py`. The baseline is SDPA over
contiguous K and V.
"""

import pytest
import torch

from benchmarks import kernel_cases as cases
from benchmarks.gpu import grid
from benchmarks.kernel_cases import new_cell
from benchmarks.measuring import Bench, What

CELLS = {
    "small": [
        new_cell((8, 2, 64), (128,) * 2, (128,) * 2),
        new_cell((8, 2, 64), (320,), (64,)),
        new_cell((8, 2, 64), (200, 70, 33), (90, 1, 1)),
    ],
    "cpu": [
        new_cell((9, 3, 64), (512,) * 4, (512,) * 4),
        new_cell((9, 3, 64), (2048,), (2048,)),
        new_cell((9, 3, 64), (4096 + 512,), (512,)),
        new_cell((9, 3, 64), (2048,) * 16, (512,) + (1,) * 15),
    ],
    "cuda": grid.prefill_cells(),
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    cases.spread(metafunc, CELLS, (*cases.backends(), "sdpa"))


def bench_prefill(bench: Bench, device: torch.device, cell: grid.Cell, way: str) -> None:
    case = cases.case_of(cell, device)
    what = What(
        op="prefill",
        case=cases.label(cell, case.q.dtype),
        way=way,
        nbytes=cases.nbytes(cell),
        flops=cell.flops,
        baseline=way == "sdpa",
        shape=cases.shape_of(cell),
    )
    bench(cases.attend(case, way), what, cases.check_attention(case))
