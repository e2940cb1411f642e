"""The attention that pages get is what a softmax over all of a row's slots gives them."""

import math

import numpy as np
import pytest
import torch

from pagedkv.kernels.scoring import Scoring
from pagedkv.kernels.torch import page_mass as mass
from pagedkv.kernels.torch.page_mass import page_mass

H, G, P, D = 6, 2, 4, 8

ROWS = {
    "decode": ([1, 1, 1], [9, 4, 17], [1, 1, 1]),
    "one slot": ([1], [1], [1]),
    "prompt": ([11], [11], [11]),
    "the end of a chunk": ([7], [23], [3]),
    "mixed": ([1, 6, 1, 2], [8, 14, 5, 12], [1, 4, 0, 2]),
    "nobody": ([1, 1], [3, 6], [0, 0]),
}


def pages_of(lens, shuffle=True):
    """A pool with NaN in every slot that is not a row's, and its page table."""
    columns = -(-max(lens) // P)
    order = torch.randperm(len(lens) * columns)
    k_pages = torch.full((len(order) + 3, G, P, D), math.nan)
    table = torch.full((len(lens), columns), 999, dtype=torch.int32)  # beyond the end: anything
    keys = []
    for row, length in enumerate(lens):
        k = torch.randn(length, G, D)
        for column in range(-(-length // P)):
            page = int(order[row * columns + column])
            part = k[column * P : (column + 1) * P]
            k_pages[page, :, : len(part)] = part.transpose(0, 1)
            table[row, column] = page
        keys.append(k)
    return k_pages, table, keys


def expected_mass(q, keys, new, queries, columns, scale, softcap, sinks):
    """Computes the mass by plain loops, in float64."""
    mass = torch.zeros(len(keys), columns, dtype=torch.float64)
    ends = np.cumsum(new)
    for row, k in enumerate(keys):
        for back in range(queries[row]):
            query = q[ends[row] - 1 - back].double()
            for head in range(H):
                seen = k[: len(k) - back, head // (H // G)].double()
                scores = seen @ query[head] * scale
                if softcap is not None:
                    scores = softcap * torch.tanh(scores / softcap)
                if sinks is not None:
                    scores = torch.cat([scores, sinks[head].double()[None]])
                weights = scores.softmax(-1)[: len(seen)]
                for slot, weight in enumerate(weights):
                    mass[row, slot // P] += weight / H
    return mass


@pytest.mark.parametrize("kind", ["plain", "softcap", "sinks"])
@pytest.mark.parametrize("name", ROWS)
def test_mass_is_the_softmax_summed_over_a_page(name, kind, monkeypatch):
    monkeypatch.setattr(mass, "BATCH_BYTES", 4 * G * D * 20)  # so that rows do not all go together
    new, lens, queries = (np.asarray(x) for x in ROWS[name])
    k_pages, table, keys = pages_of(lens.tolist())
    q = torch.randn(int(new.sum()), H, D)
    softcap = 2.0 if kind == "softcap" else None
    sinks = torch.randn(H) if kind == "sinks" else None
    scoring = Scoring(0.4, None, softcap, sinks)
    actual = page_mass(q, k_pages, table, new, lens, queries, scoring)
    expected = expected_mass(q, keys, new, queries, table.shape[1], 0.4, softcap, sinks)
    # Sums of at most 17 slots times 11 queries, and a product over D channels before.
    allowed = 11 * (17 + D) * torch.finfo(torch.float32).eps
    assert (actual - expected).abs().max() < allowed
    if sinks is None:
        assert np.allclose(actual.sum(1), queries, rtol=1e-5)
