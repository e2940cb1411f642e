"""The checks for a GPU as far as a machine without one can tell, and the twin they rest on."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

# The repository root stays off sys.path, where a folder called kernels lies.
ROOT = Path(__file__).resolve().parents[2]
package = ModuleType("benchmarks")
package.__path__ = [str(ROOT / "benchmarks")]
sys.modules.setdefault("benchmarks", package)

from benchmarks.gpu import chosen, correctness, grid, ours, plots, precompile, steps  # noqa: E402
from pagedkv.kernels import choose, decode, paged, reference  # noqa: E402

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
ROWS = [(1, 1), (1, 40), (0, 9), (5, 33), (20, 30), (3, 2), (1, 0), (17, 17)]
SHAPES = correctness.shapes()


@pytest.fixture(autouse=True)
def _interpreter():
    if DEVICE == "cuda":
        yield
        return
    from tests.kernels import interpreter

    interpreter.install()
    yield
    interpreter.uninstall()


def test_kernels_pass(capsys: pytest.CaptureFixture[str]) -> None:
    assert correctness.main(DEVICE) == []
    assert " 0 failed" in capsys.readouterr().out


def test_a_wrong_kernel_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = paged.paged_attention

    def wrong(*args, scale, **options):
        return right(*args, scale=scale * 1.01, **options)

    monkeypatch.setattr(paged, "paged_attention", wrong)
    shape = steps.Shape(2, 1, 16, 16, torch.float32)
    with pytest.raises(AssertionError, match="off by"):
        correctness.agree(shape, DEVICE, correctness.SMALL["decode"])


@pytest.mark.parametrize("change", [lambda x: x * 1.001, lambda x: x.flip(-1)])
def test_wrong_scores_of_pages_are_found(change, monkeypatch: pytest.MonkeyPatch) -> None:
    shape, rows = steps.Shape(2, 1, 16, 3, torch.float32), correctness.SMALL["decode"]
    chosen.score(shape, DEVICE, rows)
    right = choose.score_columns
    monkeypatch.setattr(choose, "score_columns", lambda *args: change(right(*args)))
    with pytest.raises(AssertionError, match=r"off by|are infinite"):
        chosen.score(shape, DEVICE, rows)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_twin_is_the_reference(shape: steps.Shape) -> None:
    small = shape._replace(dim=16, groups=2)
    step = steps.make_step(small, ROWS, "cpu")
    tensors = step.k_pages, step.v_pages, step.table, step.kv_lens, step.starts
    true = reference.paged_attention(
        step.q.double(), *(x.cpu() for x in tensors), sinks=step.sinks, **step.options
    )
    found = steps.twin(step)
    torch.testing.assert_close(found.out, true[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found.lse, true[1], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", correctness.DTYPES, ids=str)
def test_rounding_passes_and_a_missing_key_does_not(dtype: torch.dtype) -> None:
    step = steps.make_step(steps.Shape(2, 2, 64, 16, dtype), [(1, 90), (4, 30)], "cpu")
    true = steps.twin(step)
    out, lse = true.out.to(dtype), true.lse.float()
    steps.check(step, out, lse)
    shorter = step.kv_lens - 1
    seen = replace(step, rows=[(new, n - 1) for new, n in step.rows], kv_lens=shorter)
    less = steps.twin(seen)
    with pytest.raises(AssertionError, match="output is off"):
        steps.check(step, less.out.to(dtype), lse)
    with pytest.raises(AssertionError, match="log-sum-exp is off"):
        steps.check(step, out, less.lse.float())
    out[0, 0, 0] = torch.nan
    with pytest.raises(AssertionError, match="off by nan"):
        steps.check(step, out, lse)


def test_other_bits_are_found() -> None:
    zero = torch.zeros(3)
    correctness.same("equal", (zero, zero.clone()))
    with pytest.raises(AssertionError, match="other bits"):
        correctness.same("signs", (zero, -zero))


def test_shapes_cover_every_pair_with_a_dtype() -> None:
    wanted = {
        "page": correctness.PAGES,
        "ratio": correctness.RATIOS,
        "dim": correctness.DIMS,
        "terms": correctness.TERMS,
        "layout": steps.LAYOUTS,
    }
    for dtype in correctness.DTYPES:
        for name, values in wanted.items():
            assert {getattr(x, name) for x in SHAPES if x.dtype == dtype} == set(values), name
    groups = [case.group for case in correctness.cases("meta")]
    assert 180 <= len(groups) <= 280
    assert {"decode", "verify", "prefill", "mixed", "empty", "alone"} <= set(groups)
    assert {"write", "coded", "replay", "prefix", "score", "copy", "huge"} <= set(groups)


def test_styles_change_the_plan_and_nothing_else() -> None:
    cell = next(cell for cell in grid.core() if cell.id == "shared/A/n64/8k+64")
    case = grid.make_case(cell.shrunk(), DEVICE, torch.float32)
    known = ours.prepare(case, "ours")()
    before = decode.tuning
    for name in ours.variants(case):
        torch.testing.assert_close(ours.prepare(case, name)(), known, rtol=1e-4, atol=1e-5)
    assert decode.tuning is before
    assert ours.variants(case)[:2] == ["ours", "ours-apart"]
    assert ours.vllm_style(case)["splits"] == 16
    many = replace(cell, new=cell.new * 8, kv_lens=cell.kv_lens * 8)
    assert ours.vllm_style(replace(case, cell=many))["splits"] == 1


def test_variants_are_listed_and_found_by_calls(tmp_path: Path) -> None:
    """What is compiled ahead is what a call with tensors of real sizes asks for."""
    program = """
import torch
from triton import knobs
from triton.runtime import driver
from benchmarks.fake_driver import FakeGPU
from benchmarks.gpu import grid, precompile
from pagedkv.kernels import paged

cells = [cell for cell in grid.core() if cell.id in ("decode/A/b1/1k/p16", "append/A/1x4k")]
everything = precompile.collect(grid.core())
assert 100 < len(everything) < 400, len(everything)
assert "_score_columns" in {job.kernel for job in everything}
assert len(set(everything)) == len(everything)
jobs = precompile.collect(cells, with_correctness=False)
names = {job.kernel for job in jobs}
assert names == {"_decode", "_merge", "_cut_rows", "_write_kv"}, names
precompile.start(90)
for job in jobs:
    if job.kernel in ("_write_kv", "_cut_rows"):
        done = precompile.build(job)
        assert done.error is None, done
        assert not done.cached, done


class First(FakeGPU):  # a device with another number has nothing in memory
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
    env = os.environ | {"TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path)}
    env |= {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-P", "-c", program]
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_what_does_not_compile_is_told_and_that_of_peers_fails_nothing(monkeypatch, capsys) -> None:
    jobs = [precompile.Job(module, module, (), (), ()) for module in ("ours", precompile.PEERS)]
    done = [precompile.Done(job, 1.0, False, f"{job.module} is wrong") for job in jobs]
    monkeypatch.setattr(precompile, "collect", lambda *_: jobs)
    monkeypatch.setattr(precompile, "compile_all", lambda *_: done)
    assert precompile.main([]) == ["ours is wrong"]
    assert "ours is wrong\npeers is wrong" in capsys.readouterr().out


def test_a_kernel_has_one_hash_whatever_was_compiled_before() -> None:
    """Or what is compiled ahead, in another order, would not be found."""
    found = set()
    for order in ("decode, prefill", "prefill, decode"):
        program = f"from pagedkv.kernels import {order}\n"
        program += f"print([getattr(x, '_' + x.__name__[16:]).cache_key for x in ({order})][::"
        program += "1])" if order.startswith("decode") else "-1])"
        env = os.environ | {"TRITON_INTERPRET": "0", "PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-P", "-c", program]
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        found.add(done.stdout)
    assert len(found) == 1


def test_plots(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    ways = {"ours": {"times": {"graph_cold": 10.0}}, "peer": {"missing": "not here"}}
    ways["read"] = {"times": {"graph_cold": 9.0}}
    record = {"kind": "attend", "bytes": 10**6, "flops": 10**7, "ways": ways}
    cells = {"decode": record, "prefill": record | {"flops": 10**10}}
    machine = {"device": "a card", "date": "today", "commit": "abc"}
    run = {"machine": machine, "ceilings": {"read_gbs": 4000.0, "matmul_tflops": 700.0}}
    results = {"runs": [run], "cells": cells}
    assert plots.points(results, False) == {"ours": [(10**6, 100.0)]}
    assert plots.points(results, True) == {"ours": [(10**10, 1000.0)]}
    plots.draw(results, tmp_path / "roofline.png")
    assert (tmp_path / "roofline.png").stat().st_size > 10_000
