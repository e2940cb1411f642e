"""Rows that share their first pages: found where they are, and attended to the same result."""

import math
import random

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pagedkv.kernels import prefixes, reference
from pagedkv.kernels.prefixes import WORTH_BYTES, _runs, find_prefixes
from pagedkv.kernels.scoring import Scoring
from pagedkv.kernels.torch import backend as gather
from pagedkv.kernels.torch.buckets import cut_step, scratch_elements

G, D = 2, 16
TOKEN_BYTES = 2 * G * D * 4


@pytest.fixture
def always(monkeypatch):
    """However little is spared, it is worth it."""
    monkeypatch.setattr(prefixes, "WORTH_BYTES", 1)


def step_of(families, page_size, dtype, seed=0):
    """A decode step on a poisoned pool.

    Args:
        families: of each family of rows the pages all of them share, and each row's length.
    """
    generator = torch.Generator().manual_seed(seed)
    total = sum(pages + sum(-(-n // page_size) for n in lens) for pages, lens in families)
    ids = iter(torch.randperm(total, generator=generator).tolist())
    rows, lengths = [], []
    for pages, lens in families:
        shared = [next(ids) for _ in range(pages)]
        for length in lens:
            rest = -(-length // page_size) - pages
            rows.append(shared + [next(ids) for _ in range(rest)])
            lengths.append(length)
    table = np.full((len(rows), max(map(len, rows))), total + 99)
    k_pages, v_pages = (
        torch.full((total, page_size, G, D), math.nan, dtype=dtype).transpose(1, 2) for _ in "kv"
    )
    for i, (row, length) in enumerate(zip(rows, lengths, strict=True)):
        table[i, : len(row)] = row
        for column, page in enumerate(row):
            filled = min(page_size, length - column * page_size)
            for pages in (k_pages, v_pages):
                noise = torch.randn(G, filled, D, generator=generator).to(dtype)
                pages[page, :, :filled] = noise
    return k_pages, v_pages, table, np.array(lengths)


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
def test_attention_in_two_parts_agrees_with_the_reference(case, dtype):
    P = 16
    k_pages, v_pages, table, lens = step_of(FAMILIES[case], P, dtype)
    new = np.ones(len(lens), int)
    q = torch.randn(len(lens), 3 * G, D, generator=torch.Generator().manual_seed(1)).to(dtype)
    shared = find_prefixes(new, lens, table, P, TOKEN_BYTES)
    assert len(shared) == sum(pages > 0 for pages, _ in FAMILIES[case])
    buckets = cut_step(new, lens, P, None, TOKEN_BYTES, shared)
    elements = scratch_elements(buckets, G * D, P)
    scratch = torch.full((2, elements), math.nan, dtype=dtype)
    on_device = torch.from_numpy(table).int()
    out, _ = gather.paged_attention(
        q, q[:, :G], q[:, :G], k_pages, v_pages, on_device, buckets, scratch, Scoring(0.3)
    )
    truth, _ = reference.paged_attention(
        q.double(),
        k_pages.double(),
        v_pages.double(),
        on_device,
        torch.from_numpy(lens),
        torch.arange(len(lens) + 1),
        scale=0.3,
    )
    # Some 150 roundings of sums of order one; in bfloat16 the two parts are rounded as well.
    unit = torch.finfo(dtype).eps / 2
    atol = 150 * 2**-24 * 4 if dtype == torch.float32 else 8 * unit
    torch.testing.assert_close(out.double(), truth, rtol=0, atol=atol)


def test_a_prefix_that_spares_little_is_left_alone():
    _, _, table, lens = step_of([(3, [49, 60])], 16, torch.float32)
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
