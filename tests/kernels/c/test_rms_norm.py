"""Norms in C: right to rounding, and of each row what it is alone."""

import pytest
import torch

from pagedkv.kernels.c.library import missing
from pagedkv.kernels.c.rms_norm import TYPES, rms_norm, why_not
from pagedkv.kernels.torch import rms_norm as twin
from tests.kernels.c.calls import check_norms

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing() or "there is a library")


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_norms_are_right_and_a_row_is_what_it_is_alone(dtype):
    check_norms(dtype)


@pytest.mark.parametrize("threads", [2, 3])
def test_bits_do_not_depend_on_threads(threads):
    x, weight = torch.randn(90, 400), torch.randn(400)
    before, one = torch.get_num_threads(), rms_norm(x, weight, 1e-6, 0.0, True)
    torch.set_num_threads(threads)
    try:
        assert torch.equal(rms_norm(x, weight, 1e-6, 0.0, True), one)
    finally:
        torch.set_num_threads(before)


def test_rows_that_are_not_contiguous_have_the_same_bits_and_keep_torchs_strides():
    """One row of Q, of fused Q, K and V, is contiguous; several are not."""
    x, weight = torch.randn(4, 5, 3 * 40), torch.randn(40)
    for some in (x[..., 40:80], x[..., :40].contiguous().transpose(0, 1)):
        out = rms_norm(some, weight, 1e-6, 0.0, True)
        assert torch.equal(out, rms_norm(some.contiguous(), weight, 1e-6, 0.0, True))
        assert torch.equal(out[:1, :1], rms_norm(some[:1, :1], weight, 1e-6, 0.0, True))
        assert out.stride() == (some * 2).stride()


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_what_is_no_number_stays_in_its_row(dtype):
    x = torch.ones(3, 40, dtype=dtype)
    x[1, 33] = float("nan")
    out = rms_norm(x, torch.ones(40, dtype=dtype), 1e-6, 0.0, True)
    assert out.isnan().all(1).tolist() == [False, True, False]


def test_other_dtypes_are_for_torch():
    assert why_not(torch.float16) == "expected float32 or bfloat16, got float16"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_is_no_number_comes_out_where_it_does_of_torch(dtype):
    """The probe of a model's norms takes this for granted."""
    x, weight = torch.randn(3, 40).to(dtype), torch.randn(40).to(dtype)
    x[:, 7] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    for how in ((1e-5, added, rounds) for added in (0.0, 1.0) for rounds in (True, False)):
        mine, its = rms_norm(x, weight, *how), twin.rms_norm(x, weight, *how)
        assert torch.equal(mine.isnan(), its.isnan())
        assert torch.equal(mine.nan_to_num(), its.nan_to_num())
