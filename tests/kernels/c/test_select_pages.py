"""Pages are scored in C as in plain torch, and of the same scores the same are chosen.

What these cases alone find: a column of another part, row or head, a bound that is no number and is
lost among other heads, and a choice that is one too many or too few where scores are equal.
"""

import math

import pytest
import torch

from pagedkv.kernels.c import select_pages as module
from pagedkv.kernels.c.library import missing
from tests.attention.test_select_pages import FORMATS, outputs
from tests.effort import few
from tests.kernels.c.calls import check_choice
from tests.kernels.shapes import DTYPES

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing() or "there is a library")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 32), (8, 1, 64), (3, 3, 80)])
def test_scores_and_choices_are_those_of_the_twin_and_of_each_row_alone(
    dtype, heads, kv_heads, dim
):
    check_choice(dtype, heads, kv_heads, dim)


def test_of_equal_scores_the_first_are_chosen():
    inf = math.inf
    scores = torch.tensor([[[0.0, -0.0, 1.0, 0.0, -1.0], [-inf, inf, 3.0, inf, -inf]]])
    assert module.choose_columns(scores, 3).tolist() == [[[0, 1, 2], [1, 2, 3]]]
    assert module.choose_columns(scores, 5).tolist() == [[[0, 1, 2, 3, 4]] * 2]


@pytest.mark.parametrize("kv_format", few(FORMATS, "dense", "int4"), ids=str)
def test_the_same_pages_are_read_as_by_torch(kv_format):
    both = outputs("torch", kv_format), outputs("c", kv_format)
    assert all(torch.allclose(a, b, atol=2e-5) for a, b in zip(*both))
