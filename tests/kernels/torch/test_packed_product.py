"""Products with a packed matrix are right within their rounding, or none are made."""

import pytest
import torch
from torch.nn import functional

from pagedkv.kernels.torch import packed_product
from pagedkv.kernels.torch.packed_product import DTYPES, OPERATORS, pack, product, why_not
from tests.effort import few

SHAPES = [(1, 1), (7, 5), (48, 32), (33, 130), (576, 1536)]
ROWS = [1, 2, 16, 17, 300]


@pytest.fixture(autouse=True)
def _asked_anew():
    why_not.cache_clear()
    yield
    why_not.cache_clear()


def drawn(dtype, *shapes):
    return [torch.randn(shape).to(dtype) for shape in shapes]


def assert_product(x, weight, bias):
    """Within the rounding of a sum in float32, which is rounded once more to its dtype."""
    got = product(x, pack(weight), bias)
    given = [x.double(), weight.double(), None if bias is None else bias.double()]
    exact = functional.linear(*given)
    size = functional.linear(*(one if one is None else one.abs() for one in given))
    summed = (weight.shape[1] + 1) * 2.0**-24 * size
    bound = summed + torch.finfo(x.dtype).eps / 2 * (exact.abs() + summed)
    assert got.dtype == x.dtype
    assert got.shape == exact.shape
    assert ((got.double() - exact).abs() <= bound).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("rows", few(ROWS, 2, 17))
@torch.inference_mode()
def test_products_are_those_of_float64_but_for_rounding(shape, rows, dtype):
    x, weight, bias = drawn(dtype, (rows, shape[1]), shape, shape[:1])
    assert_product(x, weight, bias)
    assert_product(x[None], weight, None)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@torch.inference_mode()
def test_rows_may_lie_in_memory_in_any_way(dtype):
    weight, wide, turned = drawn(dtype, (9, 6), (5, 12), (6, 4))
    for x in (wide[:, ::2], turned.T, wide[:1, :6].expand(7, 6)):
        assert_product(x, weight, None)


def test_a_packed_matrix_is_one_of_its_own():
    x, weight = drawn(torch.float32, (3, 8), (4, 8))
    packed = pack(weight)
    before = product(x, packed, None)
    weight.zero_()
    assert torch.equal(product(x, packed, None), before)
    assert packed.nbytes == weight.nbytes


def test_other_dtypes_are_refused():
    assert why_not(torch.float16) == "expected float32 or bfloat16, got float16"
    assert why_not(torch.float32) is None


@pytest.mark.parametrize("name", OPERATORS)
def test_a_missing_operator_is_named(name, monkeypatch):
    monkeypatch.setattr(packed_product, "OPERATORS", (f"{name}_of_another_torch",))
    assert why_not(torch.float32) == f"this torch has no operator mkldnn.{name}_of_another_torch"


def test_an_operator_that_fails_or_is_wrong_is_not_used(monkeypatch):
    def fails(x, packed, bias):
        raise RuntimeError("mkldnn_linear: no such instructions\nmore")

    monkeypatch.setattr(packed_product, "product", fails)
    said = "mkldnn._linear_pointwise failed: mkldnn_linear: no such instructions"
    assert why_not(torch.float32) == said
    why_not.cache_clear()
    monkeypatch.setattr(packed_product, "product", lambda x, p, b: 1.01 * product(x, p, b))
    assert why_not(torch.bfloat16) == "mkldnn._linear_pointwise gave wrong products"
