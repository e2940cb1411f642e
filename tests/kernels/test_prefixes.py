"""Rows that share their first pages: found where they are, and attended to the same result."""

import math
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedkv.kernels import prefixes
from pagedkv.kernels.prefixes import WORTH_BYTES, _runs, find_prefixes
from pagedkv.kernels.scoring import Scoring
from pagedkv.kernels.torch import backend as gather
from pagedkv.kernels.torch.buckets import cut_step, scratch_elements
from tests.kernels import steps
from tests.kernels.truth import twin

G, D, P = 2, 16, 16
TOKEN_BYTES = 2 * G * D * 4


@pytest.fixture
def always(monkeypatch):
    """However little is spared, it is worth it."""
    monkeypatch.setattr(prefixes, "WORTH_BYTES", 1)


def step_of(families, dtype):
    """A decode step on a poisoned pool.

    Args:
        families: of each family of rows the pages all of them share, and each row's length.
    """
    step = steps.step_of(
        [(1, length) for _, lens in families for length in lens],
        **{"heads": 3 * G, "groups": G, "dim": D, "page": P, "layout": "slots outermost"},
        **{"dtype": dtype, "scale": 0.3, "device": "cpu"},
    )
    first = 0
    for pages, lens in families:
        family = slice(first, first + len(lens))
        step.table[family, :pages] = step.table[first, :pages].clone()
        first = family.stop
    return step


FAMILIES = {
    "all of one": [(3, [49, 60, 64, 50])],
    "two, and one alone": [(2, [40, 33]), (0, [20]), (4, [65, 80, 80])],
    "nothing shared": [(0, [10, 20, 30])],
    "an own part of one token": [(3, [49, 49])],
    "own parts of very different length": [(2, [33, 140, 34])],
}


@pytest.mark.usefixtures("always")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", FAMILIES)
def test_attention_in_two_parts_agrees_with_the_twin(case, dtype):
    step = step_of(FAMILIES[case], dtype)
    new, lens = np.array(step.rows).T
    shared = find_prefixes(new, lens, step.table.numpy(), P, TOKEN_BYTES)
    assert len(shared) == sum(pages > 0 for pages, _ in FAMILIES[case])
    buckets = cut_step(new, lens, P, None, TOKEN_BYTES, shared)
    scratch = torch.full((2, scratch_elements(buckets, G * D, P)), math.nan, dtype=dtype)
    q, pools = step.q, (step.k_pages, step.v_pages)
    out, _ = gather.paged_attention(
        q, q[:, :G], q[:, :G], *pools, step.table, buckets, scratch, Scoring(0.3)
    )
    # Some 150 roundings of sums of order one; in bfloat16 the two parts are rounded as well.
    unit = torch.finfo(dtype).eps / 2
    atol = 150 * 2**-24 * 4 if dtype == torch.float32 else 8 * unit
    torch.testing.assert_close(out.double(), twin(step).out, rtol=0, atol=atol)


def test_a_prefix_that_spares_little_is_left_alone():
    table, lens = np.array([[1, 2, 3, 4], [1, 2, 3, 5]]), np.array([49, 60])
    assert find_prefixes(np.ones(2, int), lens, table, 16, TOKEN_BYTES) == []
    large = WORTH_BYTES // (3 * 16)
    assert find_prefixes(np.ones(2, int), lens, table, 16, large) != []


@pytest.mark.usefixtures("always")
def test_a_page_that_is_being_written_is_no_prefix():
    table = np.array([[1, 2, 3], [1, 2, 3]])
    for length, pages in [(33, 2), (48, 2), (32, 1), (17, 1)]:
        found = find_prefixes(np.ones(2, int), np.full(2, length), table, 16, TOKEN_BYTES)
        assert [prefix.num_pages for prefix in found] == [pages]
    assert find_prefixes(np.ones(2, int), np.full(2, 16), table, 16, TOKEN_BYTES) == []


@pytest.mark.usefixtures("always")
def test_rows_with_several_new_tokens_take_no_part():
    table = np.array([[1, 2, 3]] * 4)
    found = find_prefixes(np.array([1, 1, 5, 1]), np.full(4, 48), table, 16, TOKEN_BYTES)
    assert found == [(slice(0, 2), 2)]


def test_of_nested_prefixes_the_one_that_spares_most_is_taken(monkeypatch):
    monkeypatch.setattr(prefixes, "WORTH_BYTES", 4 * 16 * TOKEN_BYTES)
    document = list(range(10, 60))
    table = np.array([[1, *range(100, 150)], [1, *document], [1, *document], [1, *document]])
    lens = np.full(4, 51 * 16)
    found = find_prefixes(np.ones(4, int), lens, table, 16, TOKEN_BYTES)
    assert found == [(slice(1, 4), 50)]


@settings(max_examples=200)
@given(st.integers(0, 10**6))
def test_runs_are_shared_by_their_rows_and_none_that_is_worth_it_is_left(seed):
    source = random.Random(seed)
    common = [source.choice([0, 0, 1, 2, 5, 30]) for _ in range(source.randint(1, 12))]
    worth = source.choice([1, 4, 40])
    found = _runs(common, worth)
    taken = [False] * (len(common) + 1)
    for rows, pages in found:
        assert pages == min(common[rows.start : rows.stop - 1])
        assert (rows.stop - rows.start - 1) * pages >= worth
        assert not any(taken[rows])
        taken[rows] = [True] * (rows.stop - rows.start)
    spared = [(b - a) * min(common[a:b]) for b in range(len(common) + 1) for a in range(b)]
    most = max((rows.stop - rows.start - 1) * pages for rows, pages in found) if found else 0
    assert most == (max(spared) if max(spared) >= worth else 0)
    for i, pages in enumerate(common):
        assert pages < worth or taken[i] or taken[i + 1]


def test_thousands_of_runs_are_no_matter():
    assert len(_runs([50, 0] * 3000, 1)) == 3000
