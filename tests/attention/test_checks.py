"""Mistakes of a layer's caller are refused by name, and nothing is written."""

import pytest
import torch

from pagedkv import attend_again, paged_attention, write_kv
from pagedkv.errors import ClosedStepError
from tests.attention.texts import Sizes, cache_for, text

LATENT = Sizes(heads=4, groups=1, dim=20, v_dim=16, v_is_k=True)


@pytest.mark.parametrize(
    "v_of",
    [
        lambda k: k[..., :16].clone(),
        lambda k: k[..., 4:],
        lambda k: k.flatten()[: 16 * len(k)].view(-1, 1, 16),
        lambda k: k.flatten()[: 16 * len(k)].view(16, 1, -1).transpose(0, 2),
    ],
    ids=["a copy", "the last columns", "rows after another", "columns after another"],
)
def test_values_that_are_not_the_first_columns_of_keys_are_refused(v_of):
    cache, k, q = cache_for(LATENT), torch.randn(5, 1, 20), torch.randn(5, 4, 20)
    step = cache.prepare([cache.add()], num_new=5)
    for call in (write_kv, lambda *kv: paged_attention(q, *kv)):
        with pytest.raises(ValueError, match=r"v: expected a view of k, k\[..., :16\]"):
            call(k, v_of(k), step, 0)
    assert step.wrote == []
    paged_attention(q, k, k[..., :16], step, 0)


def test_what_is_no_dense_tensor_is_refused_by_name():
    sizes = Sizes(dim=16)
    t, cache = text(sizes, 8, seed=0), cache_for(sizes)
    step, given = cache.prepare([cache.add()], num_new=8), {"q": t.q[0], "k": t.k[0], "v": t.v[0]}
    for name in given:
        for wrong in (given[name].tolist(), given[name].to_sparse(), None):
            with pytest.raises(TypeError, match=f"{name}: expected a dense tensor, got"):
                paged_attention(**{**given, name: wrong}, step=step, layer=0)
    chosen = {"indices": torch.arange(8)[:, None]}  # would read what nobody wrote
    with pytest.raises(TypeError, match="k: expected a dense tensor, got NoneType"):
        paged_attention(t.q[0], None, None, step, 0, **chosen)
    with pytest.raises(TypeError, match="sinks: expected a dense tensor, got"):
        paged_attention(**given, step=step, layer=0, sinks=torch.ones(sizes.heads).to_sparse())
    assert step.wrote == []


def test_a_view_of_keys_may_lie_anyhow_in_memory():
    cache, seen = cache_for(LATENT), []
    q, k = torch.randn(5, 4, 20), torch.randn(5, 1, 20)
    apart = torch.randn(20, 3, 5).permute(2, 1, 0)[:, :1].copy_(k)
    for keys in (k, apart):
        with cache.step([cache.add()], num_new=5) as step:
            seen.append(paged_attention(q, keys, keys[..., :16], step, 0))
    torch.testing.assert_close(*seen)
    with cache.step([cache.add()], num_new=1) as step:  # whose strides say nothing
        one = torch.randn(20)
        write_kv(one.view(1, 1, 20), one.as_strided((1, 1, 16), (7, 9, 1)), step, 0)


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"layer": 1}, "layer: expected one that has written in this step, got 1"),
        ({"num_queries": [2, -1]}, r"num_queries: expected 0 to \[4, 4\] .*got \[2, -1\]"),
        ({"num_queries": [0, 0]}, "num_queries: expected .*at least one in all"),
        ({"num_queries": [2, 5]}, "num_queries: expected"),
        ({"num_queries": [2]}, "num_queries: expected"),
        ({"num_queries": [2.0, 2.0]}, r"num_queries: expected .* got \[2.0, 2.0\]"),
        ({"num_queries": [2, 1]}, r"q: expected shape \[T, H, D\] = \[3, H, 16\]"),
    ],
)
def test_what_cannot_be_attended_again_is_refused(arguments, match):
    sizes = Sizes(dim=16)
    t, cache = text(sizes, 8, seed=0), cache_for(sizes, layers=2)
    step = cache.prepare([cache.add(), cache.add()], num_new=4)
    paged_attention(t.q[0], t.k[0], t.v[0], step, 0)
    with pytest.raises(ValueError, match=match):
        attend_again(t.q[0], step, **{"layer": 0, **arguments})
    attend_again(t.q[0], step, 0)
    assert step.wrote == [0]
    cache.abort(step)
    with pytest.raises(ClosedStepError):
        attend_again(t.q[0], step, 0)
