"""Launches of a layer are bound for the layers after it, which compute the same bits."""

from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("triton")

from pagedkv import CacheConfig, LayerGroup, PagedKVCache, paged_attention
from pagedkv.attention import on_triton
from pagedkv.errors import ClosedStepError
from pagedkv.kernels.triton import launch
from tests.effort import few

H, G, D, LAYERS = 4, 2, 32, 3
CONFIGS = {
    "dense": {},
    "float16": {"dtype": "float16"},
    "fp8": {"kv_format": "fp8"},
    "int8": {"kv_format": "int8"},
    "int4": {"kv_format": "int4"},
    "a window": {"groups": (LayerGroup(tuple(range(LAYERS)), window=20),)},
    "two groups": {"groups": (LayerGroup((0, 2)), LayerGroup((1,), window=20))},
    "latents": {
        "groups": (LayerGroup(tuple(range(LAYERS)), num_kv_heads=1, v_head_dim=16, v_is_k=True),)
    },
    "chosen pages": {"read_tokens": 64},
}
TERMS = {
    "alike": lambda layer: {},
    "scales": lambda layer: {"scale": 0.1 + layer},
    "softcap": lambda layer: {"softcap": 5.0},
    "sinks": lambda layer: {"sinks": torch.full((H,), float(layer))},
    "sinks of one layer": lambda layer: {"sinks": torch.ones(H)} if layer == 1 else {},
    "slopes": lambda layer: {"alibi_slopes": torch.full((H,), 0.1 + layer)},
    "slopes of one layer": lambda layer: {"alibi_slopes": torch.ones(H)} if layer == 1 else {},
    "caps of one layer": lambda layer: {"softcap": 5.0} if layer == 1 else {},
}
STEPS = [[5, 20], [1, 1], [3, 1], [17, 1]]  # new tokens of both rows


def a_cache(**fields):
    sizes = {"page_size": 16, "max_tokens": 512, "max_sequences": 4}
    fields = {"num_layers": LAYERS, "num_kv_heads": G, "head_dim": D, **sizes, **fields}
    config = CacheConfig(**{"dtype": "float32", **fields})
    return PagedKVCache(config, device="cpu", backend="triton", debug=True)


def inputs(config, layer, tokens):
    """q, k and v, slices of one tensor as a fused projection makes them."""
    heads, _, v_dim, v_is_k = config.shapes[config.group_of[layer]]
    made = torch.randn(tokens, H + 2 * heads, D).to(getattr(torch, config.dtype))
    q, k, v = made.split([H, heads, heads], dim=1)
    return q, k, k[..., :v_dim] if v_is_k else v


def run(cache, terms, asked=False):
    """Outputs of all layers in all steps, and log-sum-exps if asked for."""
    torch.manual_seed(0)
    seqs, found = [cache.add(), cache.add()], []
    for new in STEPS:
        with cache.step(seqs, num_new=new) as step:
            for layer in range(LAYERS):
                qkv = inputs(cache.config, layer, sum(new))
                out = paged_attention(*qkv, step, layer, return_lse=asked, **terms(layer))
                found += out if asked else [out]
    return found


@pytest.fixture
def bound_calls(monkeypatch):
    """Layers that were served by what was bound."""
    calls = []

    def again(call):
        found = bind(call)
        if found is not None:
            calls.append(call.layer)
        return found

    bind = on_triton.again
    monkeypatch.setattr(on_triton, "again", again)
    return calls


def compare(config, terms, monkeypatch, asked=False):
    ours = run(a_cache(**config), terms, asked)
    with monkeypatch.context() as patched:
        patched.setattr(on_triton, "again", lambda call: None)
        ordinary = run(a_cache(**config), terms, asked)
    for one, other in zip(ours, ordinary, strict=True):
        assert torch.equal(one, other)
        assert one.stride() == other.stride()


@pytest.mark.parametrize("name", few(CONFIGS, "two groups", "chosen pages"))
def test_bound_layers_compute_the_same_bits(name, monkeypatch, bound_calls):
    compare(CONFIGS[name], TERMS["alike"], monkeypatch)
    if name not in ("chosen pages", "int4", "fp8"):  # whose layers are bound in some steps
        groups = len(CONFIGS[name].get("groups", "1"))
        assert len(bound_calls) == len(STEPS) * (LAYERS - groups)
    assert bound_calls


@pytest.mark.parametrize("name", few(TERMS, "caps of one layer"))
def test_terms_of_each_layer_are_its_own(name, monkeypatch, bound_calls):
    compare({}, TERMS[name], monkeypatch, asked=True)
    assert bound_calls or name.endswith("of one layer")


def test_a_log_sum_exp_that_was_asked_for_stays(monkeypatch):
    cache = a_cache()
    with cache.step([cache.add()], num_new=3) as step:
        kept = []
        for layer in range(LAYERS):
            _, lse = paged_attention(*inputs(cache.config, layer, 3), step, layer, return_lse=True)
            kept.append((lse, lse.clone()))
    assert all(torch.equal(*both) for both in kept)
    assert len({lse.data_ptr() for lse, _ in kept}) == LAYERS


def test_one_tensor_for_queries_and_keys_is_not_mixed_up_later(monkeypatch):
    """Its uses cannot be told apart by what was launched."""
    found = []
    for again in (on_triton.again, lambda call: None):
        monkeypatch.setattr(on_triton, "again", again)
        torch.manual_seed(0)
        cache = a_cache()
        with cache.step([cache.add()], num_new=4) as step:
            one, *others = torch.randn(4, 4, G, D)
            found += [paged_attention(one, one, one, step, 0), paged_attention(*others, step, 1)]
            found.append(paged_attention(one, one, others[0], step, 2))
    assert all(torch.equal(a, b) for a, b in zip(found[:3], found[3:], strict=True))


def test_a_view_of_the_pages_is_refused_in_every_layer():
    cache = a_cache()
    step = cache.prepare([cache.add()], num_new=16)
    q, k, v = torch.randn(3, 16, G, D)
    mine = step.storage.layer(1)[0][0].transpose(0, 1)
    assert mine.shape == k.shape
    for layer in range(2):
        with pytest.raises(ValueError, match=r"^k: expected memory of its own"):
            paged_attention(q, mine, v, step, layer)
        paged_attention(q, torch.empty_strided(k.shape, mine.stride()).copy_(k), v, step, layer)


def test_a_step_that_is_over_serves_nobody():
    cache = a_cache()
    q, k, v = torch.randn(3, 2, G, D)
    with cache.step([cache.add()], num_new=2) as step:
        for layer in range(LAYERS):
            paged_attention(q, k, v, step, layer, return_lse=True)
    compiled = torch.ops.pagedkv.paged_attention
    for call in (partial(paged_attention, step=step), partial(compiled, handle=step.handle)):
        with pytest.raises(ClosedStepError):
            call(q, k, v, layer=1)


def test_steps_that_are_watched_are_not_bound(bound_calls):
    cache = a_cache(retention="importance", budget=80)
    with cache.step([cache.add()], num_new=20) as step:
        assert step.queries is not None
        for layer in range(LAYERS):
            paged_attention(*inputs(cache.config, layer, 20), step, layer)
    assert not bound_calls


@pytest.mark.parametrize(("tokens", "kernels"), [(100, 3), (20, 2)], ids=["split", "whole"])
def test_a_layer_launches_two_kernels_and_a_third_where_rows_are_split(
    tokens, kernels, monkeypatch
):
    launched, launch_it = [], launch.Launcher.__call__

    def again(self, *args):
        launched.append(self.kernel.fn.__name__)  # and no more: the interpreter has operators

    def call(self, *args):
        again(self)
        launch_it(self, *args)

    monkeypatch.setattr(launch.Launcher, "__call__", call)
    monkeypatch.setattr(launch.Launcher, "again", again)
    cache = a_cache()
    seqs = [cache.add(), cache.add()]
    with cache.step(seqs, num_new=[tokens, 3], layers=()):
        pass
    step = cache.prepare(seqs, num_new=1)
    assert launched == []
    layers = ["_write_kv", "_decode", "_merge"][:kernels]
    for layer in range(LAYERS):
        qkv = inputs(cache.config, layer, 2)
        with Operators() as operators:
            paged_attention(*qkv, step, layer)
        assert launched == (layers if layer else ["_cut_rows", *layers])
        launched.clear()
    cache.commit(step)
    assert launched == []
    assert operators.names == ["aten.empty_like.default"], "the last layer's output"


class Operators(TorchDispatchMode):
    """Notes down torch's operators by name."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))
