"""Who attends on a processor: C, but for steps whose rows share prefixes that are worth a product.

What these tests alone find: a step that goes to the wrong one, what comes out differently, and a
layer that is served by what another has left of its call (`kernels/c/bound.py`).
"""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from pagedkv import CacheConfig, LayerGroup, PagedKVCache, paged_attention
from pagedkv.attention import on_c, on_torch
from pagedkv.errors import ClosedStepError
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
    monkeypatch.setattr(on_c, "TORCH_WORTH_BYTES", worth)
    mine = outputs("c", 5, 90, 1)
    assert len(gathered) == (worth == 1)
    torch.testing.assert_close(mine, outputs("torch", 5, 90, 1), rtol=1e-4, atol=1e-5)


def test_rows_of_several_new_tokens_and_a_single_row_stay_with_c(gathered, monkeypatch):
    monkeypatch.setattr(on_c, "TORCH_WORTH_BYTES", 1)
    outputs("c", 5, 90, 3)
    outputs("c", 1, 90, 1)
    assert not gathered


LAYERS = 3
CONFIGS = {
    "dense": {},
    "bfloat16": {"dtype": "bfloat16"},
    "two groups": {"groups": (LayerGroup((0, 2)), LayerGroup((1,), window=7))},
    "latents": {
        "groups": (LayerGroup(tuple(range(LAYERS)), num_kv_heads=1, v_head_dim=8, v_is_k=True),)
    },
    "int8": {"kv_format": "int8"},
    "chosen pages": {"read_tokens": 16},
}
TERMS = {
    "scales": lambda layer: {"scale": 0.1 + layer},
    "softcap": lambda layer: {"softcap": 5.0},
    "caps of one layer": lambda layer: {"softcap": 5.0} if layer == 1 else {},
    "sinks of one layer": lambda layer: {"sinks": torch.ones(H)} if layer == 1 else {},
    "slopes of one layer": lambda layer: {"alibi_slopes": torch.ones(H)} if layer == 1 else {},
    "sums of one layer": lambda layer: {"return_lse": True} if layer == 1 else {},
}


def plainly(layer):
    return {}


def qkv(config, layer, tokens, axes=(0, 0)):
    """q, k and v, which lie in memory with two axes swapped."""
    heads, _, v_dim, v_is_k = config.shapes[config.group_of[layer]]
    made = torch.randn(tokens, H + 2 * heads, D).to(getattr(torch, config.dtype))
    made = made.transpose(*axes).contiguous().transpose(*axes)
    q, k, v = made.split([H, heads, heads], dim=1)
    return q, k, k[..., :v_dim] if v_is_k else v


def layers(terms, axes=lambda layer: (0, 0), **fields):
    """All layers' results in some steps, and how many layers were bound."""
    sizes = {"page_size": 4, "max_tokens": 256}
    config = CacheConfig(LAYERS, G, D, **{"dtype": "float32", **sizes, **fields})
    cache, found, bound = PagedKVCache(config, device="cpu", backend="c"), [], 0
    torch.manual_seed(0)
    seqs = cache.add(), cache.add()
    for new in ([5, 20], [1, 1], [3, 1]):
        with cache.step(seqs, num_new=new) as step:
            for layer in range(LAYERS):
                given = qkv(config, layer, sum(new), axes(layer))
                found.append(paged_attention(*given, step, layer, **terms(layer)))
                group = config.group_of[layer]
                bound += step.kept(("bound", group)) is not None
        for layer in range(LAYERS):
            found += cache.gather(seqs[0], layer)
    return found, bound


def assert_same(monkeypatch, terms, serves=True, **how):
    mine, bound = layers(terms, **how)
    assert bool(bound) == serves
    monkeypatch.setattr(on_c, "_bound", lambda *_: None)
    for one, other in zip(mine, layers(terms, **how)[0], strict=True):
        for a, b in zip(*(x if isinstance(x, tuple) else (x,) for x in (one, other)), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("name", CONFIGS)
def test_bound_layers_compute_the_same_bits(name, monkeypatch):
    assert_same(monkeypatch, plainly, name != "int8", **CONFIGS[name])


@pytest.mark.parametrize("name", TERMS)
def test_terms_of_each_layer_are_its_own(name, monkeypatch):
    assert_same(monkeypatch, TERMS[name])


def test_a_layer_of_another_layout_is_not_served_by_addresses(monkeypatch):
    assert_same(monkeypatch, plainly, axes=lambda layer: (0, layer % 2))
    assert_same(monkeypatch, plainly, False, axes=lambda layer: (1, 2))


def negated(x):
    """The same values, of which memory has the negatives: what `x.conj().imag` gives."""
    return torch._neg_view(-x)


@pytest.mark.parametrize("fields", [{}, {"kv_format": "int8"}, {"read_tokens": 16}], ids=str)
def test_values_of_which_memory_has_the_negatives_are_those_that_are_meant(fields):
    config = CacheConfig(1, G, D, "float32", max_tokens=256, page_size=4, **fields)
    cache = PagedKVCache(config, device="cpu", backend="c")
    seqs = cache.add(), cache.add()
    for new in (30, 1):
        found, given = [], (torch.randn(new, n, D) for n in (H, G, G))
        given, sinks = [*given], torch.randn(H)
        for seq, as_given in zip(seqs, (lambda x: x, negated)):
            with cache.step([seq], num_new=new) as step:
                terms = {"sinks": as_given(sinks)}
                found.append(paged_attention(*map(as_given, given), step, 0, **terms))
        assert torch.equal(*found)


def test_tensors_without_elements_in_memory_are_refused():
    config = CacheConfig(2, G, D, "float32", max_tokens=64, page_size=4)
    cache = PagedKVCache(config, device="cpu", backend="c")
    step = cache.prepare([cache.add()], num_new=4)
    q, (k, v) = torch.randn(4, H, D), torch.randn(2, 4, G, D)
    nowhere = FakeTensorMode().from_tensor(q), torch._efficientzerotensor(q.shape)
    for layer in range(2):  # the second is bound
        for wrong in nowhere:
            with pytest.raises(TypeError, match="elements in memory"):
                paged_attention(wrong, k, v, step, layer)
        paged_attention(q, k, v, step, layer)


def test_bound_layers_refuse_what_others_do():
    config = CacheConfig(2, G, D, "float32", max_tokens=64, page_size=4)
    cache = PagedKVCache(config, device="cpu", backend="c")
    q, (k, v) = torch.randn(4, H, D), torch.randn(2, 4, G, D)
    step = cache.prepare([cache.add()], num_new=4)
    paged_attention(q, k, v, step, 0)
    mine = step.storage.layer(1)[0][0].transpose(0, 1)
    assert mine.stride() == k.stride()
    with pytest.raises(RuntimeError, match="single memory location"):
        paged_attention(q, mine, v, step, 1)
    with pytest.raises(ValueError, match=r"^k: expected shape"):
        paged_attention(q, k[:3], v, step, 1)
    paged_attention(q, k, v, step, 1)
    cache.commit(step)
    with pytest.raises(ClosedStepError):
        paged_attention(q, k, v, step, 1)


def test_a_value_that_is_no_part_of_its_key_is_refused_in_a_bound_layer():
    config = CacheConfig(LAYERS, G, D, "float32", max_tokens=64, page_size=4, **CONFIGS["latents"])
    cache = PagedKVCache(config, device="cpu", backend="c")
    q, k, v = qkv(config, 0, 4)
    step = cache.prepare([cache.add()], num_new=4)
    paged_attention(q, k, v, step, 0)
    with pytest.raises(ValueError, match="expected a view of k"):
        paged_attention(q, k, torch.empty_strided(v.shape, v.stride()), step, 1)
