"""Products of 8 bits a weight: those of the rounded numbers, and of each row what it is alone."""

import pytest
import torch

from pagedkv.kernels.c import eight_bits as module
from pagedkv.kernels.c.eight_bits import holds, pack, product
from tests.kernels.c.calls import check_eight_bits

MISSING = module.why_not(torch.float32)
pytestmark = pytest.mark.skipif(bool(MISSING), reason=MISSING or "there is the instruction")


def test_products_are_of_the_rounded_numbers_and_a_row_is_what_it_is_alone():
    check_eight_bits()


def test_bits_do_not_depend_on_threads():
    packed, x = pack(torch.randn(100, 64)), torch.randn(20, 64)
    before, one = torch.get_num_threads(), product(x, packed, None)
    torch.set_num_threads(3)
    try:
        assert torch.equal(product(x, packed, None), one)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_row_with_what_is_no_number_comes_out_as_none(value):
    x = torch.ones(3, 64)
    x[1, 40] = value
    out = product(x, pack(torch.randn(20, 64)), None)
    assert out.isnan().all(1).tolist() == [False, True, False]


def test_the_least_numbers_of_a_row_are_zeros():
    x = torch.full((2, 32), 2.0**-81)
    x[1] = 2.0**-126  # and below, what a process may take for 0
    assert torch.equal(product(x, pack(torch.randn(20, 32)), None), torch.zeros(2, 20))


def test_matrices_that_8_bits_would_not_hold_are_for_others():
    weight = torch.randn(20, 64)
    assert holds(weight)
    assert not holds(weight[:, :40])
    assert not holds(weight.bfloat16())
    assert not holds(torch.zeros(20, 64))
    for value in (float("nan"), float("inf"), 1e8):
        weight[3, 4] = value
        assert not holds(weight)
    assert not holds(torch.full((20, 64), 1e-3))  # whose scales are no normal halves
