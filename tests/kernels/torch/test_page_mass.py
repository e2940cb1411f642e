"""The attention that pages get is what a softmax over all of a row's slots gives them."""

import numpy as np
import pytest
import torch

from pagedkv.kernels.scoring import Scoring
from pagedkv.kernels.torch import page_mass as mass
from pagedkv.kernels.torch.page_mass import page_mass
from tests.kernels.steps import step_of
from tests.kernels.truth import mass_of

H, G, P, D = 6, 2, 4, 8

ROWS = {  # and of each row how many of its last queries are watched
    "decode": ([(1, 9), (1, 4), (1, 17)], [1, 1, 1]),
    "one slot": ([(1, 1)], [1]),
    "prompt": ([(11, 11)], [11]),
    "the end of a chunk": ([(7, 23)], [3]),
    "mixed": ([(1, 8), (6, 14), (1, 5), (2, 12)], [1, 4, 0, 2]),
    "nobody": ([(1, 3), (1, 6)], [0, 0]),
}
TERMS = {"plain": {}, "softcap": {"softcap": 2.0}, "sinks": {"sinks": True}}


@pytest.mark.parametrize("kind", TERMS)
@pytest.mark.parametrize("name", ROWS)
def test_mass_is_the_softmax_summed_over_a_page(name, kind, monkeypatch):
    monkeypatch.setattr(mass, "BATCH_BYTES", 4 * G * D * 20)  # so that rows do not all go together
    rows, queries = ROWS[name]
    sizes = {"heads": H, "groups": G, "dim": D, "page": P, "scale": 0.4, "device": "cpu"}
    step = step_of(rows, **sizes, **TERMS[kind])
    asked = *np.array(rows).T, np.array(queries)
    scoring = Scoring(**step.options)
    actual = page_mass(step.q, step.k_pages, step.table, *asked, scoring)
    # Sums of at most 17 slots times 11 queries, and a product over D channels before.
    allowed = 11 * (17 + D) * torch.finfo(torch.float32).eps
    assert (actual - mass_of(step, queries)).abs().max() < allowed
    if kind != "sinks":
        assert np.allclose(actual.sum(1), queries, rtol=1e-5)
