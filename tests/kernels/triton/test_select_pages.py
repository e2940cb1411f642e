"""Pages are scored alike by the kernel and in plain torch."""

import pytest
import torch

pytest.importorskip("triton")

from pagedkv.kernels.torch import select_pages as sparse
from pagedkv.kernels.triton import select_pages as choose
from tests.attention.test_select_pages import outputs
from tests.effort import each_pair, slow
from tests.kernels.shapes import chosen_by_twins, page_choice


@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul:RuntimeWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 32), (8, 1, 64), (3, 3, 80)])
def test_scores_are_those_of_the_twin(dtype, heads, kv_heads, dim):
    case = page_choice(heads, kv_heads, dim, dtype)
    got, expected = choose.score_columns(*case), sparse.score_columns(*case)
    assert torch.equal(got.isinf(), expected.isinf())
    assert torch.equal(got[got.isinf()], expected[expected.isinf()])
    finite = ~got.isinf()
    # Ranges are up to 15 wide here; bfloat16 rounds each and the queries by 2**-9.
    slack = 1e-3 if dtype == torch.float32 else 15 * 2**-7 * dim**0.5
    assert torch.allclose(got[finite], expected[finite], atol=slack)


# Finds what the scores' test and whole walks do not: equal scores, columns of several blocks, rows
# that choose nothing beside rows that do.
@pytest.mark.parametrize(
    ("count", "decoding", "block"), each_pair([3, 20, 69], [True, False], [4096, 32])
)
@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul:RuntimeWarning")
def test_tables_hold_the_pages_of_the_highest_scores(count, decoding, block, monkeypatch):
    monkeypatch.setattr(choose, "CHOICE", block)
    got, expected = chosen_by_twins(page_choice(4, 2, 32, torch.float32), count, decoding)
    assert torch.equal(got, expected)


# Behind a row's end the bounds of some page are read, NaN maybe, and their scores left out.
@pytest.mark.filterwarnings("ignore:invalid value encountered in multiply:RuntimeWarning")
@pytest.mark.parametrize("kv_format", ["dense", *slow("fp8", "int4")])
def test_triton_reads_the_same_pages(kv_format):
    both = outputs("torch", kv_format), outputs("triton", kv_format)
    assert all(torch.allclose(a, b, atol=2e-5) for a, b in zip(*both))
