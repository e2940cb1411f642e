"""Products with packed matrices: right to rounding, and of each row what it is alone."""

from itertools import product as product_of

import pytest
import torch

from pagedkv.kernels.c.library import missing
from pagedkv.kernels.c.packed_product import pack, product, why_not
from tests.kernels.c.calls import KINDS, check_numbers, check_pairs, check_products

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing() or "there is a library")


@pytest.mark.parametrize("kept", KINDS, ids=str)
def test_products_are_right_and_a_row_is_what_it_is_alone(kept):
    check_products(kept)


def test_rows_of_bfloat16_are_right_and_what_they_are_alone():
    check_pairs()


@pytest.mark.parametrize("threads", [2, 3])
def test_bits_do_not_depend_on_threads(threads):
    weight, x = torch.randn(100, 40), torch.randn(20, 40)
    packed, before = pack(weight), torch.get_num_threads()
    one = product(x, packed, None)
    torch.set_num_threads(threads)
    try:
        assert torch.equal(pack(weight).panels[:3], packed.panels[:3])
        assert torch.equal(product(x, packed, None), one)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("flushed", [False, True])
@pytest.mark.parametrize("dtype", KINDS[:2], ids=str)
def test_every_number_of_16_bits_is_kept_and_multiplied_as_it_is(dtype, flushed):
    check_numbers(dtype, flushed)


LOST = {
    "a bit more": 1 + 2**-11,
    "above the largest half": 65536.0 + 2**8 + 1,
    "below the least half": 2.0**-24 + 2.0**-33,
    "a sum of small halves": 2.0**-14 + 2.0**-25,
}


@pytest.mark.parametrize("value", LOST)
def test_one_weight_that_16_bits_do_not_hold_keeps_all_at_32(value):
    for place, kept in product_of((0, 63, 640, 70 * 20 - 1), KINDS[:2]):
        weight = torch.randn(70, 20).to(kept).float()
        weight.view(-1)[place] = LOST[value]
        packed = pack(weight)
        assert packed.panels.dtype == torch.float32
        assert torch.equal(product(torch.eye(20), packed, None).T, weight)


def test_what_is_no_number_comes_out_as_none():
    weight = torch.ones(3, 4)
    weight[1, 2], weight[2, 0] = float("nan"), float("-inf")
    out = product(torch.ones(2, 4), pack(weight), None)
    assert out.isnan().tolist() == [[False, True, False]] * 2
    assert out[:, 2].isneginf().all()


def test_halves_of_no_finite_value_are_what_they_were():
    """Beside a weight that bfloat16 does not hold, so that float16 is taken."""
    weight = torch.tensor([[1 + 2**-10, 0.0], [float("inf"), 0.0], [float("-inf"), 0.0]])
    packed = pack(weight)
    assert packed.panels.dtype == torch.float16
    out = product(torch.tensor([[1.0, 1.0]]), packed, None)
    assert torch.equal(out, weight[:, 0][None])


def test_matrices_lie_on_the_processor_whatever_the_default_device_is():
    weight = torch.randn(3, 4)
    with torch.device("meta"):  # without bytes, which C would read
        assert pack(weight).panels.is_cpu


def test_other_dtypes_are_for_others():
    assert why_not(torch.float32) is None
    assert why_not(torch.float16) == "expected float32 or bfloat16, got float16"
