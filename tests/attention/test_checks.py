"""Mistakes of a layer's caller are refused by name, and nothing is written."""

import numpy as np
import pytest
import torch
from torch.autograd import forward_ad

from pagedkv import attend_again, attend_pages, paged_attention, tree_of, write_kv, write_pages
from pagedkv.attention.own_plan import AttentionPlan
from pagedkv.errors import ClosedStepError, GradModeError
from pagedkv.kernels.c.library import missing
from tests.attention.texts import Sizes, cache_for, text

BACKENDS = ["torch", *([] if missing() else ["c"])]
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
    ("change", "error", "match"),
    [
        ({"q": torch.tensor(1.0)}, ValueError, r"q: expected shape \[T, H, D\], got \[\]"),
        ({"q": torch.zeros(8, 4, 0)}, ValueError, r"q: expected shape .*got \[8, 4, 0\]"),
        ({"q": torch.zeros(8, 4, 24)}, ValueError, r"q: expected shape .*got \[8, 4, 24\]"),
        ({"q": torch.zeros(8, 0, 16)}, ValueError, "q: expected a multiple of 2 heads, got 0"),
        ({"q": torch.zeros(8, 4, 16).half()}, TypeError, "q: expected dtype .*32, got .*float16"),
        ({"v": torch.zeros(8, 2, 8)}, ValueError, r"v: expected shape .*got \[8, 2, 8\]"),
        ({"k": None}, TypeError, "k: expected a dense tensor, got NoneType"),
        ({"step": None}, TypeError, "step: expected what `prepare` returned, got NoneType"),
        ({"layer": [0]}, TypeError, "layer: expected an int, got list"),
        ({"layer": False}, TypeError, "layer: expected an int, got bool"),
        ({"return_lse": "no"}, TypeError, "return_lse: expected True or False, got str"),
        ({"scale": "1"}, TypeError, "scale: expected a number, got str"),
        ({"scale": True}, TypeError, "scale: expected a number, got bool"),
        ({"scale": 1e40}, ValueError, "scale: expected a finite number of float32, .* got 1e.40"),
        ({"scale": -1e-46}, ValueError, "scale: expected a finite number of float32"),
        ({"softcap": 1e40}, ValueError, "softcap: expected a finite number of float32"),
        ({"softcap": 1e-46}, ValueError, "softcap: expected a finite number of float32"),
        ({"sinks": torch.zeros(4).double()}, ValueError, "sinks: expected float32, .*float64"),
        ({"scale": torch.ones((), requires_grad=True)}, GradModeError, "scale: requires gradients"),
    ],
)
def test_what_has_no_meaning_is_refused_by_name_in_the_first_layer_and_in_the_next(
    change, error, match
):
    sizes = Sizes(dim=16)
    t = text(sizes, 8, seed=0)
    for backend, before in [(b, n) for b in BACKENDS for n in (0, 1)]:
        cache = cache_for(sizes, layers=2, backend=backend)
        step = cache.prepare([cache.add()], num_new=8)
        given = {"q": t.q[0], "k": t.k[0], "v": t.v[0], "step": step, "layer": before}
        for layer in range(before):
            paged_attention(**given | {"layer": layer})
        with pytest.raises(error, match=f"^{match}"):
            paged_attention(**given | change)
        assert step.wrote == [0][:before]


def test_a_closed_step_is_not_written_in_and_numpys_numbers_are_layers_too():
    sizes = Sizes(dim=16)
    t, cache = text(sizes, 8, seed=0), cache_for(sizes)
    with cache.step([cache.add()], num_new=8) as step:
        write_kv(t.k[0], t.v[0], step, np.int64(0))
    with pytest.raises(ClosedStepError):
        write_kv(t.k[0], t.v[0], step, 0)


def test_what_requires_gradients_is_taken_where_none_are_recorded():
    sizes = Sizes(dim=16)
    t, cache = text(sizes, 8, seed=0), cache_for(sizes)
    with torch.no_grad(), cache.step([cache.add()], num_new=8) as step:
        paged_attention(t.q[0].requires_grad_(), t.k[0].requires_grad_(), t.v[0], step, 0)


@pytest.mark.parametrize("none", [0, 0.0, np.float32(0), torch.tensor(0.0)], ids=repr)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_softcap_of_nothing_is_none_at_every_door(none, backend):
    sizes = Sizes(dim=16)
    t, cache = text(sizes, 8, seed=0), cache_for(sizes, backend=backend)
    step = cache.prepare([cache.add()], num_new=8)
    plain = paged_attention(t.q[0], t.k[0], t.v[0], step, 0)
    pools, plan = own(backend)
    for found in (
        paged_attention(t.q[0], t.k[0], t.v[0], step, 0, softcap=none),
        attend_again(t.q[0], step, 0, softcap=none),
    ):
        torch.testing.assert_close(found, plain)
    capless = attend_pages(t.q[0], *pools, plan)
    assert torch.equal(attend_pages(t.q[0], *pools, plan, softcap=none), capless)


def own(backend):
    """Pages of a caller, and a plan of one row of eight tokens."""
    pools = torch.randn(2, 3, 16, 2, 16, generator=torch.Generator().manual_seed(3))
    where = torch.tensor([[1]]), torch.tensor([8])
    return pools, AttentionPlan(*where, page_size=16, seqlen_q=8, backend=backend)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["q", "k", "v", "sinks"])
def test_tangents_are_refused_and_not_dropped(name, backend):
    """Those of dual tensors and of `torch.func.jvp`; nothing is written."""
    sizes = Sizes(heads=4, groups=2, dim=16)
    t, cache = text(sizes, 8, seed=0), cache_for(sizes, layers=2, backend=backend)
    step = cache.prepare([cache.add()], num_new=8)
    new = {"q": t.q[0], "k": t.k[0], "v": t.v[0]}
    given, (pools, plan) = new | {"sinks": torch.zeros(4)}, own(backend)
    paged_attention(**new, step=step, layer=0)
    before = pools.clone()

    def refused(x):
        given[name] = x
        calls = [lambda: paged_attention(**new | {name: x}, step=step, layer=1)]
        if name in "kv":
            calls += [lambda: write_kv(given["k"], given["v"], step, 1)]
            calls += [lambda: write_pages(given["k"], given["v"], *pools, plan)]
        else:
            calls += [lambda: attend_pages(given["q"], *pools, plan, sinks=given["sinks"])]
            calls += [lambda: attend_again(given["q"], step, 0, sinks=given["sinks"])]
        for call in calls:
            with pytest.raises(GradModeError, match=f"^{name}: has a tangent"):
                call()
        return x

    x = given[name]
    with torch.no_grad(), forward_ad.dual_level():
        refused(forward_ad.make_dual(x, torch.ones_like(x)))
    torch.func.jvp(refused, (x,), (torch.ones_like(x),))
    assert step.wrote == [0]
    assert torch.equal(pools, before)


@pytest.mark.parametrize("parents", [None, 3, [3], [[None]], [[0.0]]], ids=repr)
def test_parents_that_are_no_rows_of_integers_are_refused_by_name(parents):
    cache = cache_for(Sizes(dim=16))
    step = cache.prepare([cache.add()], num_new=1)
    with pytest.raises(TypeError, match=r"^parents: expected integers for each row, got"):
        tree_of(step, parents)


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
