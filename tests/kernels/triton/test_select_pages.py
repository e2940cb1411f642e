"""Pages are scored alike by the kernel and in plain torch."""

import pytest
import torch

pytest.importorskip("triton")

from pagedkv import PagedKVCache
from pagedkv.kernels.torch import select_pages as sparse
from pagedkv.kernels.triton import select_pages as choose
from tests.attention.test_select_pages import config, feed, text
from tests.effort import slow


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 32), (8, 1, 64), (3, 3, 80)])
def test_scores_are_those_of_the_twin(dtype, heads, kv_heads, dim):
    columns, size = 70, 16
    pages = 5 * columns
    source = torch.Generator().manual_seed(0)
    bounds = torch.rand(pages, kv_heads, dim, 2, generator=source).half()
    bounds[..., 1] -= 0.5
    lens = torch.tensor([1, 16, 17, 500, 70 * size], dtype=torch.int32)
    ids = torch.randperm(pages, generator=source).int().view(5, columns)
    for row, length in zip(ids, lens.tolist()):
        row[-(-length // size) :] = 10**6  # of nobody
        row[0] = pages + 5  # a staging page
    bounds[ids[3, 30:32].long()] = torch.nan  # the newest, not complete
    q = torch.randn(5, heads, dim, generator=source).to(dtype)
    got = choose.score_columns(q, bounds, ids, lens, size)
    expected = sparse.score_columns(q, bounds, ids, lens, size)
    assert torch.equal(got.isinf(), expected.isinf())
    assert torch.equal(got[got.isinf()], expected[expected.isinf()])
    finite = ~got.isinf()
    # Ranges are up to 15 wide here; bfloat16 rounds each and the queries by 2**-9.
    slack = 1e-3 if dtype == torch.float32 else 15 * 2**-7 * dim**0.5
    assert torch.allclose(got[finite], expected[finite], atol=slack)


# Behind a row's end the bounds of some page are read, NaN maybe, and their scores left out.
@pytest.mark.filterwarnings("ignore:invalid value encountered in multiply:RuntimeWarning")
@pytest.mark.parametrize("kv_format", ["dense", *slow("fp8", "int4")])
def test_triton_reads_the_same_pages(kv_format):
    whole, lengths = [text(120, seed) for seed in range(3)], [110, 90, 30]
    outs = []
    for backend in ("torch", "triton"):
        cache = PagedKVCache(config(kv_format), device="cpu", backend=backend, debug=True)
        seqs = [cache.add() for _ in whole]
        feed(cache, seqs, [x[:, :, :n] for x, n in zip(whole, lengths)])
        one = [x[:, :, n : n + 1] for x, n in zip(whole, lengths)]
        outs.append(feed(cache, seqs, one))  # all decode
        some = [one[0], whole[1][:, :, 91:94], whole[2][:, :, 31:60]]  # and not all
        outs[-1] += feed(cache, seqs, some)
    assert all(torch.allclose(a, b, atol=2e-5) for a, b in zip(*outs))
