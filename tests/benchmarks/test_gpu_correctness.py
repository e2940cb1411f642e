"""Our ways through a GPU's cells, and what is compiled ahead, as far as no GPU can tell."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from benchmarks.cells import make_case
from benchmarks.gpu import delta_rule, grid, measure, ours, precompile
from pagedkv.kernels.triton.ahead import Done

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def test_all_ways_through_a_cell_give_the_same() -> None:
    cell = next(cell for cell in grid.core() if cell.id == "shared/A/n64/8k+64")
    case = make_case(cell.shrunk(), DEVICE, torch.float32)
    known = ours.prepare(case, "ours")()
    for name in ours.variants(case):
        torch.testing.assert_close(ours.prepare(case, name)(), known, rtol=1e-4, atol=1e-5)
    assert ours.variants(case) == ["ours", "ours-apart", "ours+plan"]


def test_a_layer_of_the_delta_rule_is_checked_before_it_is_timed(monkeypatch) -> None:
    (cell,) = delta_rule.cells()
    assert cell in grid.core()
    assert cell.bytes == 2 * 64 * (32 * 128 * 128 * 4 + 8192 * 4 * 2)  # state and convolution
    case = make_case(cell.shrunk(rows=2), DEVICE, torch.float32)
    call, check, _ = ours.prepare(case, "ours")
    assert check(call) == 0
    monkeypatch.setattr(delta_rule, "delta_rule_step", lambda q, k, v, *others: v)
    wrong, way = measure.ready(partial(ours.prepare, variant="ours"), case, "ours", check)
    assert "the output is off by" in wrong["failed"]
    assert way is None


@pytest.mark.slow
def test_variants_are_listed_and_found_by_calls(tmp_path: Path, forked) -> None:
    """Kernels compiled ahead are those that a call with tensors of real sizes asks for."""
    program = """
from functools import partial
import pathlib
import torch
from triton import knobs
from triton.runtime import driver
from pagedkv.kernels.triton.card import AbsentCard
from benchmarks.gpu import grid, precompile
from pagedkv.kernels.triton import ahead
from pagedkv.kernels.triton import backend as paged

cells = [cell for cell in grid.core() if cell.id in ("decode/A/b1/4k/p16", "append/A/1x4k")]
checks, wrong = precompile.collect(precompile.case_calls(90))
assert not wrong, wrong
every, _ = precompile.collect(partial(precompile.call, cell) for cell in grid.everything())
text = pathlib.Path(grid.__file__).parents[2].joinpath("docs", "benchmarks.md").read_text()
assert f"The {len(every)} kernels of the cells" in text, len(every)
assert f"The {len({*checks} - {*every})} other kernels" in text, len({*checks} - {*every})
assert {"_score_columns", "_prefill_hopper"} < {job.kernel for job in checks}
assert len(set(checks)) == len(checks)
jobs, wrong = precompile.collect(partial(precompile.call, cell) for cell in cells)
assert not wrong, wrong
names = {job.kernel for job in jobs}
assert names == {"_decode_hopper", "_merge", "_cut_rows", "_write_kv"}, names
ahead.start(90)
for job in jobs:
    if job.kernel in ("_write_kv", "_cut_rows"):
        done = ahead.build(job)
        assert done.error is None, done
        assert not done.cached, done


class First(AbsentCard):  # a device with another number has nothing in memory
    def get_current_device(self):
        return 0


driver.set_active(First(90))
hits = {}
knobs.compilation.listener = lambda *, src, cache_hit, **_: hits.update({src.name: cache_hit})
q, pages = torch.zeros(3, 32, 128).bfloat16(), torch.zeros(2, 8, 16, 128).bfloat16()
lens, starts = torch.tensor([7, 9, 9], dtype=torch.int32), torch.arange(4, dtype=torch.int32)
paged.plan(lens, starts, q, pages, num_new=[1, 1, 1], max_kv=900)
packed = torch.zeros(5, 48, 128).bfloat16()
k, v = packed[:, 32:40], packed[:, 40:]
paged.write_kv(k, v, pages, pages.clone(), torch.arange(5))
assert hits == {"_cut_rows": True, "_write_kv": True}, hits
"""
    forked(program, TRITON_INTERPRET="0", TRITON_CACHE_DIR=str(tmp_path))


def test_what_does_not_compile_is_told(monkeypatch, capsys) -> None:
    job = precompile.Job("ours", "kernel", (), (), ())
    monkeypatch.setattr(precompile, "collect", lambda *_: ([job], ["a cell is wrong"]))
    done = [Done(job, 1.0, False, "ours is wrong")]
    monkeypatch.setattr(precompile, "compile_all", lambda *_, **options: done)
    assert precompile.main([]) == ["a cell is wrong", "ours is wrong"]
    assert "a cell is wrong\nours is wrong\n" in capsys.readouterr().out


def test_a_call_that_cannot_be_listed_hides_no_other(forked) -> None:
    program = """
from functools import partial
from benchmarks.gpu import grid, precompile

calls = [partial(precompile.call, cell) for cell in grid.core()[:1]]
jobs, wrong = precompile.collect([lambda: 1 / 0, *calls])
assert wrong == ["not listed: ZeroDivisionError: division by zero"], wrong
assert "_decode_hopper" in {job.kernel for job in jobs}
"""
    forked(program, TRITON_INTERPRET="0")


def test_a_kernel_has_one_hash_whatever_was_compiled_before(forked) -> None:
    """Or what is compiled ahead, in another order, would not be found."""
    found = set()
    for order in ("decode, prefill", "prefill, decode"):
        program = f"from pagedkv.kernels.triton import {order}\n"
        program += f"print([getattr(x, '_' + x.__name__[23:]).cache_key for x in ({order})][::"
        program += "1])" if order.startswith("decode") else "-1])"
        found.add(forked(program, TRITON_INTERPRET="0"))
    assert len(found) == 1
