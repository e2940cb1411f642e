"""Attention over coded pages, of every pair of formats, against the float64 truth about them."""

import pytest
import torch

pytest.importorskip("triton")

from pagedkv.kernels import decode
from tests.kernels.coded_cases import PAIRS, coded
from tests.kernels.triton_cases import HALF, check, step_of


@pytest.fixture(autouse=True)
def _small_parts(monkeypatch):
    """Small texts are split and merged, on a card as well."""
    tuning = decode.tuning
    monkeypatch.setattr(decode, "tuning", lambda *args: tuning(*args)._replace(split=64, splits=4))


SINGLE = [(1, 1), (1, 16), (1, 17), (1, 33), (1, 64), (1, 130), (1, 0)]
DRAFTS = [(1, 1), (4, 4), (7, 37), (5, 97), (16, 130), (2, 17)]
CHUNKS = [(17, 17), (40, 150), (33, 64), (70, 71), (18, 5)]


@pytest.mark.parametrize("dtype", [torch.float32, *HALF], ids=str)
@pytest.mark.parametrize("pair", PAIRS, ids="-".join)
def test_every_pair_of_formats_agrees_with_the_twin(pair, dtype):
    for rows in (SINGLE, DRAFTS, CHUNKS):
        check(coded(step_of(rows, dtype=dtype, dim=64), *pair))
