"""The torch backend against the float64 twin, in both memory layouts, on pools full of NaN."""

import math

import numpy as np
import pytest
import torch

from pagedkv.kernels import reference
from pagedkv.kernels.scoring import Scoring
from pagedkv.kernels.torch import backend as gather
from pagedkv.kernels.torch.buckets import BUCKET_BYTES, cut_step, scratch_elements
from tests.kernels.steps import LAYOUTS, pages_of, step_of
from tests.kernels.truth import twin

G, D, N = 2, 16, 24

CASES = {
    "decode, rows alike": [(1, 17)] * 3,
    "decode, similar rows": [(1, 17), (1, 18), (1, 19), (1, 17)],
    "decode, very different rows": [(1, 1), (1, 40), (1, 5)],
    "a page exactly, one less, one more": [(1, 16), (1, 15), (1, 17)],
    "first chunks": [(7, 7), (7, 7), (16, 16)],
    "chunks after a past": [(5, 21), (5, 21), (3, 40)],
    "everything at once": [(1, 30), (9, 9), (1, 1), (4, 12)],
}


@pytest.mark.parametrize("layout", LAYOUTS[:2])
@pytest.mark.parametrize("window", [None, 1, 6, 64])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("case", CASES)
def test_attention_agrees_with_its_twin(case, page_size, window, layout):
    sizes = {"heads": 3 * G, "groups": G, "dim": D, "page": page_size, "layout": layout}
    step = step_of(CASES[case], **sizes, scale=0.3, window=window, device="cpu")
    new, lens = np.array(step.rows).T
    pools = step.k_pages, step.v_pages
    k, v = (
        torch.cat([step.contents(row, x, x.dtype)[-n:] for row, n in enumerate(step.num_new)])
        for x in pools
    )
    buckets = cut_step(new, lens, page_size, window, token_bytes=2 * G * D * 4)
    scratch = torch.full((2, scratch_elements(buckets, G * D, page_size)), math.nan)
    true = twin(step)
    for return_lse in (False, True):
        out, lse = gather.paged_attention(
            *(step.q, k, v, *pools, step.table, buckets, scratch, Scoring(0.3, window)),
            return_lse=return_lse,
        )
        # Sums of at most 40 terms of order one, twice (scores, output): some 100 roundings.
        torch.testing.assert_close(out.double(), true.out, rtol=0, atol=100 * 2**-24 * 4)
        if return_lse:
            torch.testing.assert_close(lse.double(), true.lse, rtol=0, atol=100 * 2**-24 * 4)


def test_a_bucket_ends_where_its_keys_no_longer_fit_the_processors_cache():
    lens = np.full(64, 1000)
    token_bytes = BUCKET_BYTES // 4000
    buckets = cut_step(np.ones(64, int), lens, 16, None, token_bytes)
    assert {b.count for b in buckets} == {4}


def test_rows_of_different_length_share_a_bucket_only_with_little_padding():
    counts = [b.count for b in cut_step(np.ones(4, int), np.array([100, 95, 100, 9]), 16, None, 64)]
    assert counts == [3, 1]


@pytest.mark.parametrize("layout", LAYOUTS[:2])
def test_write_puts_every_token_into_its_slot_and_touches_no_other(layout):
    pools = pages_of(layout, (N, G, 4, D), torch.float32, "cpu")
    twins = [pages.clone() for pages in pools]
    slots = torch.randperm(N * 4)[:13]
    k, v = torch.randn(2, 13, G, D)
    gather.write_kv(k, v, *pools, slots)
    reference.write_kv(k, v, *twins, slots)
    for pages, expected in zip(pools, twins):
        assert torch.equal(pages.nan_to_num(7), expected.nan_to_num(7))


@pytest.mark.parametrize("layout", LAYOUTS[:2])
def test_copy_moves_whole_pages_of_all_layers(layout):
    pools = [pages_of(layout, (N, G, 4, D), torch.float32, "cpu")[0] for _ in range(3)]
    pages = torch.stack(pools).nan_to_num(0)
    pages += torch.arange(pages.numel(), dtype=torch.float32).view(pages.shape)
    expected = pages.clone()
    source, target = torch.tensor([3, 0, 5]), torch.tensor([7, 8, 1])
    gather.copy_pages(pages, source, target)
    reference.copy_pages(expected, source, target)
    assert torch.equal(pages, expected)
