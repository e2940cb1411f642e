"""Who attends on a processor: C, but for steps whose rows share prefixes that are worth a product.

What these tests alone find: a step that goes to the wrong one, and what comes out differently.
"""

import pytest
import torch

from pagedkv import CacheConfig, PagedKVCache, paged_attention
from pagedkv.attention import on_c, on_torch
from pagedkv.kernels.c.library import missing

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing() or "there is a library")

H, G, D = 6, 2, 16


def outputs(backend, rows, prefix, new):
    """Returns the attention of `rows` forks of a prefix, and how they are planned."""
    config = CacheConfig(1, G, D, "float32", max_tokens=4096, page_size=4)
    cache = PagedKVCache(config, device="cpu", backend=backend)
    drawn = torch.Generator().manual_seed(0)

    def fed(seqs, count):
        with cache.step(seqs, num_new=count) as step:
            q, k, v = (torch.randn(step.num_tokens, n, D, generator=drawn) for n in (H, G, G))
            return paged_attention(q, k, v, step, 0)

    first = cache.add()
    fed([first], prefix)
    return fed(cache.fork(first, rows), new)


@pytest.fixture
def gathered(monkeypatch):
    """How often torch attends."""
    calls = []
    attend = on_torch.attend
    monkeypatch.setattr(on_torch, "attend", lambda *args: calls.append(args) or attend(*args))
    return calls


@pytest.mark.parametrize("worth", [1, 1 << 40])
def test_rows_behind_a_long_prefix_are_attended_by_torch_and_agree(worth, gathered, monkeypatch):
    monkeypatch.setattr(on_c, "WORTH_BYTES", worth)
    mine = outputs("c", 5, 90, 1)
    assert len(gathered) == (worth == 1)
    torch.testing.assert_close(mine, outputs("torch", 5, 90, 1), rtol=1e-4, atol=1e-5)


def test_rows_of_several_new_tokens_and_a_single_row_stay_with_c(gathered, monkeypatch):
    monkeypatch.setattr(on_c, "WORTH_BYTES", 1)
    outputs("c", 5, 90, 3)
    outputs("c", 1, 90, 1)
    assert not gathered
