"""The checks for a card as far as a machine without one can tell, and the twin they rest on."""

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from pagedkv.kernels import reference
from pagedkv.kernels.triton import backend as paged
from pagedkv.kernels.triton import select_pages as choose
from tests.effort import ALL, sampled
from tests.kernels import correctness, shapes
from tests.kernels.steps import DEVICE, EACH, LAYOUTS, Step, coded, step_of
from tests.kernels.truth import check, twin

ROWS = [(1, 1), (1, 40), (0, 9), (5, 33), (20, 30), (3, 2), (1, 0), (17, 17)]
SHAPES = shapes.shapes()


def of_reference(step: Step) -> tuple[torch.Tensor, torch.Tensor]:
    tensors = step.k_pages, step.v_pages, step.table, step.kv_lens, step.starts
    return reference.paged_attention(step.q.double(), *tensors, **step.options)


@sampled
def test_kernels_pass() -> None:
    """Other tests find a kernel that is wrong, this one a case: the fast tests try one a group."""
    every = list(correctness.cases(DEVICE))
    assert len({case.title for case in every}) == len(every) > 20
    few = DEVICE == "cpu" and not ALL
    some = {case.group: case for case in every[::-1]}.values()
    told = {case.title: correctness.outcome(case, DEVICE) for case in (some if few else every)}
    assert set(told.values()) == {correctness.PASSED}, told


def test_a_wrong_kernel_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = paged.paged_attention

    def wrong(*args, scale, **options):
        return right(*args, scale=scale * 1.01, **options)

    monkeypatch.setattr(paged, "paged_attention", wrong)
    shape = shapes.Shape(2, 1, 16, 16, torch.float32)
    with pytest.raises(AssertionError, match="off by"):
        correctness.agree(shape, DEVICE, shapes.SMALL["decode"])


@pytest.mark.parametrize("change", [lambda x: x * 1.001, lambda x: x.flip(-1)])
def test_wrong_scores_of_pages_are_found(change, monkeypatch: pytest.MonkeyPatch) -> None:
    shape, rows = shapes.Shape(2, 1, 16, 3, torch.float32), shapes.SMALL["decode"]
    correctness.score(shape, DEVICE, rows)
    right = choose.score_columns
    monkeypatch.setattr(choose, "score_columns", lambda *args: change(right(*args)))
    with pytest.raises(AssertionError, match=r"off by|are infinite"):
        correctness.score(shape, DEVICE, rows)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_twin_is_the_reference(shape: shapes.Shape) -> None:
    small = shape._replace(dim=16, groups=2)
    step = small.step(ROWS, "cpu")
    true = of_reference(step)
    found = twin(step)
    torch.testing.assert_close(found.out, true[0], rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found.lse, true[1], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("pair", [*EACH, ("int8", "int4_token"), ("dense", "fp8")], ids="/".join)
def test_the_twin_is_the_reference_over_coded_pages(pair: tuple[str, str]) -> None:
    step = coded(step_of(ROWS, dim=32, window=30, device="cpu"), *pair)
    for found, true in zip(twin(step), of_reference(step)):
        torch.testing.assert_close(found, true, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", shapes.DTYPES, ids=str)
def test_rounding_passes_and_a_missing_key_does_not(dtype: torch.dtype) -> None:
    step = step_of([(1, 90), (4, 30)], dim=64, dtype=dtype, device="cpu")
    true = twin(step)
    out, lse = true.out.to(dtype), true.lse.float()
    check(step, (out, lse))
    shorter = step.kv_lens - 1
    seen = replace(step, rows=[(new, n - 1) for new, n in step.rows], kv_lens=shorter)
    less = twin(seen)
    with pytest.raises(AssertionError, match="output is off"):
        check(step, (less.out.to(dtype), lse))
    with pytest.raises(AssertionError, match="log-sum-exp is off"):
        check(step, (out, less.lse.float()))
    out[0, 0, 0] = torch.nan
    with pytest.raises(AssertionError, match="off by nan"):
        check(step, (out, lse))


def test_other_bits_are_found() -> None:
    zero = torch.zeros(3)
    correctness.same("equal", (zero, zero.clone()))
    with pytest.raises(AssertionError, match="other bits"):
        correctness.same("signs", (zero, -zero))


def test_shapes_cover_every_pair_with_a_dtype() -> None:
    wanted = {
        "page": shapes.PAGES,
        "ratio": shapes.RATIOS,
        "dim": shapes.DIMS,
        "terms": shapes.TERMS,
        "layout": LAYOUTS,
    }
    for dtype in shapes.DTYPES:
        for name, values in wanted.items():
            found = [getattr(x, name) for x in SHAPES if x.dtype == dtype]
            assert all(value in found for value in values), name
            assert all(value in values for value in found), name
    groups = [case.group for case in correctness.cases("meta")]
    assert 180 <= len(groups) <= 310
    assert {"decode", "verify", "prefill", "mixed", "empty", "alone"} <= set(groups)
    assert {"write", "coded", "replay", "prefix", "score", "copy", "huge", "wide"} <= set(groups)
