"""The torch backend against its twins, in both memory layouts, on a pool full of NaN."""

import math

import numpy as np
import pytest
import torch

from pagedkv.kernels import reference
from pagedkv.kernels.scoring import Scoring
from pagedkv.kernels.torch import backend as gather
from pagedkv.kernels.torch.buckets import BUCKET_BYTES, cut_step, scratch_elements

G, D, N = 2, 16, 24
LAYOUTS = ("slots outermost", "heads outermost")


def pages_of(layout: str, page_size: int) -> torch.Tensor:
    """A poisoned pool `[N, G, P, D]`, in the layout of a CPU or of a card."""
    if layout == "slots outermost":
        return torch.full((N, page_size, G, D), math.nan).transpose(1, 2)
    return torch.full((N, G, page_size, D), math.nan)


def step_of(layout, page_size, new, kv_lens, generator):
    """A step whose rows have random K and V in random pages: everything a backend is given."""
    new, kv_lens = np.asarray(new), np.asarray(kv_lens)
    k_pages, v_pages = pages_of(layout, page_size), pages_of(layout, page_size)
    counts = -(-kv_lens // page_size)
    ids = torch.randperm(N, generator=generator)
    table = torch.full((len(new), int(counts.max())), N + 99, dtype=torch.int32)
    used = 0
    for row, (count, length) in enumerate(zip(counts, kv_lens, strict=True)):
        mine = ids[used : used + int(count)]
        used += int(count)
        table[row, : int(count)] = mine.int()
        slots = (mine[:, None] * page_size + torch.arange(page_size)).flatten()[: int(length)]
        k, v = torch.randn(2, int(length), G, D, generator=generator)
        reference.write_kv(k, v, k_pages, v_pages, slots)
    starts = torch.from_numpy(np.concatenate([[0], np.cumsum(new)]))
    return new, kv_lens, k_pages, v_pages, table, starts


def newest(pages, table, new, kv_lens, page_size):
    """The K or V of the new tokens, packed: what the model has in its hands."""
    rows = []
    for row, length in enumerate(kv_lens.tolist()):
        ids = table[row, : -(-length // page_size)]
        rows.append(reference.gather_pages(pages, ids, length - int(new[row]), length))
    return torch.cat(rows)


CASES = {
    "decode, rows alike": ([1, 1, 1], [17, 17, 17]),
    "decode, similar rows": ([1, 1, 1, 1], [17, 18, 19, 17]),
    "decode, very different rows": ([1, 1, 1], [1, 40, 5]),
    "a page exactly, one less, one more": ([1, 1, 1], [16, 15, 17]),
    "first chunks": ([7, 7, 16], [7, 7, 16]),
    "chunks after a past": ([5, 5, 3], [21, 21, 40]),
    "everything at once": ([1, 9, 1, 4], [30, 9, 1, 12]),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("window", [None, 1, 6, 64])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("case", CASES)
def test_attention_agrees_with_its_twin(case, page_size, window, layout):
    new, lens = CASES[case]
    if sum(-(-n // page_size) for n in lens) > N:
        lens = [min(n, page_size * N // len(lens)) for n in lens]
        new = [min(a, b) for a, b in zip(new, lens, strict=True)]
    generator = torch.Generator().manual_seed(1)
    new, lens, k_pages, v_pages, table, starts = step_of(layout, page_size, new, lens, generator)
    q = torch.randn(int(new.sum()), 3 * G, D, generator=generator)
    k, v = (newest(x, table, new, lens, page_size) for x in (k_pages, v_pages))
    buckets = cut_step(new, lens, page_size, window, token_bytes=2 * G * D * 4)
    scratch = torch.full((2, scratch_elements(buckets, G * D, page_size)), math.nan)
    truth, sums = reference.paged_attention(
        q.double(),
        k_pages.double(),
        v_pages.double(),
        table,
        torch.from_numpy(lens),
        starts,
        scale=0.3,
        window=window,
    )
    for return_lse in (False, True):
        out, lse = gather.paged_attention(
            q, k, v, k_pages, v_pages, table, buckets, scratch, Scoring(0.3, window),
            return_lse=return_lse,
        )  # fmt: skip
        # Sums of at most 40 terms of order one, twice (scores, output): some 100 roundings.
        torch.testing.assert_close(out.double(), truth, rtol=0, atol=100 * 2**-24 * 4)
        if return_lse:
            torch.testing.assert_close(lse.double(), sums, rtol=0, atol=100 * 2**-24 * 4)


def test_a_bucket_ends_where_its_keys_no_longer_fit_the_processors_cache():
    lens = np.full(64, 1000)
    token_bytes = BUCKET_BYTES // 4000
    buckets = cut_step(np.ones(64, int), lens, 16, None, token_bytes)
    assert {b.count for b in buckets} == {4}


def test_rows_of_different_length_share_a_bucket_only_with_little_padding():
    counts = [b.count for b in cut_step(np.ones(4, int), np.array([100, 95, 100, 9]), 16, None, 64)]
    assert counts == [3, 1]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_write_puts_every_token_into_its_slot_and_touches_no_other(layout):
    generator = torch.Generator().manual_seed(2)
    k_pages, v_pages = pages_of(layout, 4), pages_of(layout, 4)
    twin_k, twin_v = k_pages.clone(), v_pages.clone()
    slots = torch.randperm(N * 4, generator=generator)[:13]
    k, v = torch.randn(2, 13, G, D, generator=generator)
    gather.write_kv(k, v, k_pages, v_pages, slots)
    reference.write_kv(k, v, twin_k, twin_v, slots)
    assert torch.equal(k_pages.nan_to_num(7), twin_k.nan_to_num(7))
    assert torch.equal(v_pages.nan_to_num(7), twin_v.nan_to_num(7))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_copy_moves_whole_pages_of_all_layers(layout):
    pages = torch.stack([pages_of(layout, 4).nan_to_num(0) for _ in range(3)])
    pages += torch.arange(pages.numel(), dtype=torch.float32).view(pages.shape)
    twin = pages.clone()
    source, target = torch.tensor([3, 0, 5]), torch.tensor([7, 8, 1])
    gather.copy_pages(pages, source, target)
    reference.copy_pages(twin, source, target)
    assert torch.equal(pages, twin)
