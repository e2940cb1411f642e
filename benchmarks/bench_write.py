"""Writing the K and V of one layer's new tokens into pages that lie anywhere.

At full size a GPU runs the append cells of `benchmarks/gpu/grid.py`. The baseline copies as many
bytes from one contiguous tensor to another.
"""

import pytest
import torch

from benchmarks import kernel_cases as cases
from benchmarks.gpu import grid
from benchmarks.kernel_cases import new_cell
from benchmarks.measuring import Bench, What
from pagedkv import write_kv
from pagedkv.kernels import reference

CELLS = {
    "small": [
        new_cell((8, 2, 64), (40,) * 8, (1,) * 8),
        new_cell((8, 2, 64), (100, 17), (90, 17)),
    ],
    "cpu": [
        new_cell((9, 3, 64), (512,) * 64, (1,) * 64),
        new_cell((9, 3, 64), (4096,), (4096,)),
        new_cell((32, 8, 128), (1024,) * 4, (1024,) * 4),
    ],
    "cuda": [cell for cell in grid.other_cells() if cell.kind == "append"],
}


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    cases.spread(metafunc, CELLS, (*cases.backends(), "copy"))


def bench_write(bench: Bench, device: torch.device, cell: grid.Cell, way: str) -> None:
    case = cases.case_of(cell, device)
    moved = 2 * len(case.q) * cell.token_bytes(case.q.element_size())  # read, and written
    what = What(
        op="write",
        case=cases.label(cell, case.q.dtype),
        way=way,
        nbytes=moved,
        baseline=way == "copy",
        shape=cases.shape_of(cell),
    )
    if way == "copy":
        source, target = torch.randn(2, moved // 8, device=device)  # half of it each
        bench(lambda: target.copy_(source), what, cases.check_pools([target], [source]))
        return
    placed = cases.place(case, way)
    step, k, v = placed.step, placed.k, placed.v
    pools = placed.cache._storage.layer(0)
    expected = [pool.clone() for pool in pools]
    reference.write_kv(k, v, *expected, step.slots())
    bench(lambda: write_kv(k, v, step, 0), what, cases.check_pools(pools, expected))
