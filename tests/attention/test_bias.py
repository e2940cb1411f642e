"""Biases by distance through a cache: what they alone need are places of tokens in their texts.

Kernels are held to the truth in `tests/kernels`; here are the ways on which a place could be lost:
windows that drop pages, prefixes that rows share, chunks, and steps cut anywhere.
"""

import pytest
import torch

from pagedkv import CacheConfig, LayerGroup, PagedKVCache, attend_again, paged_attention
from pagedkv.attention import on_c
from tests.attention.texts import attention
from tests.effort import each_value

H, G, D, P = 4, 2, 16, 4
BACKENDS = ["torch", "c", "triton"]
KINDS = {"all": LayerGroup((0,)), "window": LayerGroup((0,), 9)}
KINDS["chunks"] = LayerGroup((0,), 8, chunked=True)


def a_cache(backend, group=KINDS["all"], **fields):
    if backend == "triton":
        pytest.importorskip("triton")
    fields = {"max_tokens": 512, "page_size": P, "dtype": "float32", "groups": (group,)} | fields
    return PagedKVCache(CacheConfig(1, G, D, **fields), device="cpu", backend=backend, debug=True)


@pytest.fixture
def shares(monkeypatch):
    """Prefixes are worth sharing, however short."""
    pytest.importorskip("triton")
    from pagedkv.kernels.triton import shared_prefix

    monkeypatch.setattr(shared_prefix, "LAUNCH_WORTH_BYTES", 0)
    monkeypatch.setattr(on_c, "TORCH_WORTH_BYTES", 0)


def drawn(tokens, seed):
    made = torch.Generator().manual_seed(seed)
    q, k, v, _ = torch.randn(tokens, H + 2 * G + 1, D, generator=made).split([H, G, G, 1], 1)
    return q, k, v, torch.randn(tokens, H, 6, generator=made)


def biased(q, k, bias, slopes, length):
    """Scores of the last query of a text, by the formula."""
    k = k[:length].double().repeat_interleave(H // G, 1)
    scores = torch.einsum("hd,mhd->hm", q[length - 1].double(), k) * D**-0.5
    distance = torch.arange(length - 1, -1, -1)
    scores -= slopes.double()[:, None] * distance
    near = distance < bias.shape[2]
    scores[:, near] += bias[length - 1].double()[:, distance[near]]
    return scores


@pytest.mark.parametrize(("kind", "backend"), each_value(KINDS, BACKENDS))
def test_places_are_those_in_the_text_whatever_was_dropped_shared_or_cut(kind, backend, shares):
    group, slopes = KINDS[kind], torch.tensor([0.5, 0.1, 0.0, -0.2])
    cache, common = a_cache(backend, group), 88
    texts = [drawn(104, seed) for seed in (1, 2)]
    for x, y in zip(*texts):
        y[:common] = x[:common]
    first, found = cache.add(), [{}, {}]

    def step(seqs, begin, new):
        parts = [[x[begin : begin + new] for x in texts[i]] for i in range(len(seqs))]
        q, k, v, bias = (torch.cat(x) for x in zip(*parts))
        with cache.step(seqs, num_new=new) as opened:
            terms = {"alibi_slopes": slopes, "distance_bias": bias}
            out, lse = paged_attention(q, k, v, opened, 0, return_lse=True, **terms)
            if kind == "all":
                again = attend_again(q, opened, 0, **terms)
                torch.testing.assert_close(again, out, rtol=1e-5, atol=1e-6)
        for i in range(len(seqs)):
            for t in range(new):
                found[i][begin + t] = out[i * new + t], lse[i * new + t]

    step([first], 0, 20)
    step([first], 20, common - 20)
    seqs = [first, *cache.fork(first)]
    at = common
    for new in (1, 1, 3, 7, 1, 3):
        step(seqs, at, new)
        at += new
    for (q, k, v, bias), rows in zip(texts, found):
        for place, (out, lse) in rows.items():
            scores = biased(q, k, bias, slopes, place + 1)
            begin = {"all": 0, "window": max(0, place - 8), "chunks": place // 8 * 8}[kind]
            scores = scores[:, begin:]
            values = v[begin : place + 1].double().repeat_interleave(H // G, 1)
            exact = torch.einsum("hm,mhd->hd", scores.softmax(-1), values)
            torch.testing.assert_close(out.double(), exact, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(lse.double(), scores.logsumexp(-1), rtol=1e-5, atol=1e-5)
    cache.check()


@pytest.mark.parametrize("backend", BACKENDS)
def test_minus_infinity_hides_tokens_at_its_distance_and_no_others(backend):
    cache, q, k, v, bias = a_cache(backend), *drawn(12, 1)
    bias[..., [1, 5]] = -torch.inf
    seq, found = cache.add(), []
    for new in (11, 1):  # a prompt, a token
        begin = cache.length(seq)
        parts = [x[begin : begin + new] for x in (q, k, v, bias)]
        with cache.step([seq], num_new=new) as step:
            found.append(paged_attention(*parts[:3], step, 0, distance_bias=parts[3]))
    for n in (1, 4, 11, 12):
        weights = biased(q, k, bias, torch.zeros(H), n).softmax(-1)
        exact = torch.einsum("hm,mhd->hd", weights, v[:n].double().repeat_interleave(H // G, 1))
        torch.testing.assert_close(torch.cat(found)[n - 1].double(), exact, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_slopes_of_zero_and_a_table_of_zeros_change_nothing(backend):
    q, k, v, _ = drawn(30, 1)
    zeros = {
        "alibi_slopes": torch.zeros(H),
        "distance_bias": torch.zeros(1, H, 5).expand(30, -1, -1),
    }
    exact, _ = attention(q, k, v, 0)
    for terms in (zeros, {"alibi_slopes": zeros["alibi_slopes"]}):
        cache = a_cache(backend)
        with cache.step([cache.add()], num_new=30) as step:
            out = paged_attention(q, k, v, step, 0, **terms)
        torch.testing.assert_close(out.double(), exact, rtol=1e-5, atol=1e-6)


REFUSED = {
    "retention": ({"retention": "keydiff", "budget": 128}, {}, r"without a policy.*'keydiff'"),
    "pages that are chosen": ({"read_tokens": 16}, {}, "reads all pages, got read_tokens=16"),
    "tokens that are chosen": (
        {}, {"indices": torch.zeros(5, 1, dtype=torch.int64)}, "indices: expected None"),
}  # fmt: skip


@pytest.mark.parametrize("why", REFUSED)
def test_where_places_are_lost_a_bias_is_refused_and_nothing_is_written(why):
    fields, more, says = REFUSED[why]
    cache, (q, k, v, bias) = a_cache("c", **fields), drawn(5, 1)
    for terms in ({"alibi_slopes": torch.ones(H)}, {"distance_bias": bias}):
        step = cache.prepare([cache.add()], num_new=5)
        with pytest.raises(ValueError, match=says):
            paged_attention(q, k, v, step, 0, **terms, **more)
        assert not step.wrote
        cache.abort(step)


def test_a_layer_with_a_window_has_a_bias_beside_layers_whose_pages_a_policy_evicts():
    (q, k, v, _), found = drawn(30, 1), []
    groups = LayerGroup((0,)), LayerGroup((1,), 9)
    for fields in ({}, {"retention": "keydiff", "budget": 128}):
        sizes = {"max_tokens": 512, "page_size": P, "dtype": "float32", "groups": groups}
        cache = PagedKVCache(CacheConfig(2, G, D, **sizes, **fields), device="cpu")
        with cache.step([cache.add()], num_new=30) as step:
            paged_attention(q, k, v, step, 0)
            found.append(paged_attention(q, k, v, step, 1, alibi_slopes=torch.ones(H)))
    assert torch.equal(*found)
