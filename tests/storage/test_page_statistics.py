"""Measures of pages for policies: attention mass, when they were attended, likeness of keys."""

import numpy as np
import pytest
import torch

from pagedkv import LayerGroup, PagedKVCache, paged_attention
from pagedkv.retention import Importance, KeyDiff, LeastRecentlyAttended, Policy, Semantic, Sinks
from pagedkv.retention.policy import HALF_LIFE
from pagedkv.storage.page_statistics import EVERY, LAST_QUERIES
from tests.cases import in_few_bits, one_group

HEADS, P, D = 2, 4, 4
EACH_LAYER = (LayerGroup((0,)), LayerGroup((1,)))


class Spy(Policy):
    """Keeps what it was told, and gives the oldest pages up."""

    recent = 0

    def __init__(self, *needs):
        self.needs, self.told = needs, []

    def keep_scores(self, pages):
        self.told.append(pages)
        return pages.position


def cache_of(policy, budget, **fields):
    base = {"max_tokens": 256, "max_sequence_length": 10_000, "groups": EACH_LAYER}
    config = one_group(retention=policy, budget=budget, **{**base, **fields})
    return PagedKVCache(config, device="cpu", debug=True)


def feed(cache, seq, q, k, v):
    """One step of one sequence; `[layers, n, heads, D]`."""
    with cache.step([seq], num_new=q.shape[1]) as step:
        for layer in range(len(q)):
            paged_attention(q[layer], k[layer], v[layer], step, layer)


def random_qkv(n, layers=2):
    return torch.randn(3, layers, n, HEADS, D)


def weights_of(q, k):
    """Causal attention of the last `len(q)` tokens, mean over heads: `[n, s]`."""
    scores = torch.einsum("qhd,khd->hqk", q, k) / D**0.5
    hidden = torch.arange(len(k)) > torch.arange(len(k) - len(q), len(k))[:, None]
    return scores.masked_fill(hidden, -torch.inf).softmax(-1).mean(0)


def likeness_of(k, size=P):
    """Mean cosine of a page's keys to the mean direction of all: `[layers, n, H, D]` of keys."""
    unit = torch.nn.functional.normalize(k, dim=-1)
    mean = torch.nn.functional.normalize(unit.mean(1, keepdim=True), dim=-1)
    return (unit * mean).sum(-1).mean(-1).reshape(len(k), -1, size).mean(2)


def by_page(weights):
    return weights.reshape(*weights.shape[:-1], -1, P).sum(-1)


# ------------------------------------------------------------------ attention


def test_a_prompts_last_queries_say_what_its_pages_are_worth():
    spy = Spy("mass")
    cache, n = cache_of(spy, budget=8), 100
    q, k, v = random_qkv(n)
    feed(cache, cache.add(), q, k, v)
    (told,) = spy.told
    for layer in range(2):
        weights = weights_of(q[layer], k[layer])[-LAST_QUERIES:].sum(0)
        assert np.allclose(told.mass[told.owner == layer], by_page(weights), rtol=1e-4)


def test_while_decoding_every_16th_step_stands_for_all():
    spy = Spy("mass")
    cache, n = cache_of(spy, budget=64, groups=EACH_LAYER), 80
    q, k, v = random_qkv(n)
    seq = cache.add()
    for i in range(n):
        feed(cache, seq, *(x[:, i : i + 1] for x in (q, k, v)))
    told = spy.told[0]  # when the 17th page was filled
    length = int(told.length[0])
    expected = np.zeros((2, length // P))
    for layer in range(2):
        for step in range(EVERY - 1, length, EVERY):
            expected[layer] *= 0.5 ** (EVERY / HALF_LIFE)
            weights = weights_of(q[layer, step : step + 1], k[layer, : step + 1])[0]
            seen = torch.zeros(length)
            seen[: step + 1] = weights
            expected[layer] += EVERY * by_page(seen).numpy()
    assert np.allclose(told.mass, expected.reshape(-1), rtol=1e-4)


def test_steps_of_several_tokens_are_looked_at_once_in_16_tokens():
    spy = Spy("mass")
    cache, n = cache_of(spy, budget=56), 60
    q, k, v = random_qkv(n)
    seq, looked = cache.add(), []
    for start in range(0, n, 4):
        with cache.step([seq], num_new=4) as step:
            looked.append(step.queries is not None)
            for layer in range(2):
                new = (x[layer, start : start + 4] for x in (q, k, v))
                paged_attention(*new, step, layer)
    assert looked == [i % 4 == 3 for i in range(n // 4)]
    for layer in range(2):
        seen = torch.zeros(n)
        for stop in range(EVERY, n, EVERY):
            seen *= 0.5 ** (EVERY / HALF_LIFE)
            seen[:stop] += 4 * weights_of(q[layer, stop - 4 : stop], k[layer, :stop]).sum(0)
        told = spy.told[0].mass[spy.told[0].owner == layer]
        assert np.allclose(told, by_page(seen)[: len(told)], rtol=1e-4)


def test_a_page_is_attended_when_it_gets_more_than_an_equal_share():
    spy = Spy("attended")
    cache = cache_of(spy, budget=32, groups=(LayerGroup((0, 1)),))
    seq, n = cache.add(), 33
    key = torch.zeros(2, n, HEADS, D)
    key[:, 4:8] = 5.0  # the second page
    query = torch.ones(2, n, HEADS, D)
    for i in range(n):
        feed(cache, seq, *(x[:, i : i + 1] for x in (query, key, key)))
    for _ in range(n, 36):
        feed(cache, seq, *(x[:, :1] for x in (query, key, key)))
    assert spy.told[0].attended.tolist() == [0, 2 * EVERY, *[0] * 7]


def test_layers_of_a_group_share_the_mean_of_their_mass():
    spy = Spy("mass")
    cache, n = cache_of(spy, budget=8, groups=(LayerGroup((0, 1)),)), 24
    q, k, v = random_qkv(n)
    feed(cache, cache.add(), q, k, v)
    weights = [weights_of(q[layer], k[layer]).sum(0) for layer in range(2)]
    assert np.allclose(spy.told[0].mass, by_page(sum(weights) / 2), rtol=1e-4)


def test_a_page_that_is_handed_out_again_starts_without_mass():
    spy = Spy("mass")
    cache, n = cache_of(spy, budget=8, max_tokens=32), 20
    for _ in range(2):
        q, k, v = random_qkv(n)
        seq = cache.add()
        feed(cache, seq, q, k, v)
        cache.free(seq)
    weights = weights_of(q[0], k[0]).sum(0)
    assert np.allclose(spy.told[1].mass[:5], by_page(weights), rtol=1e-4)


def test_a_copied_page_keeps_its_mass():
    spy = Spy("mass")
    cache, n = cache_of(spy, budget=8), 19
    q, k, v = random_qkv(n + 1)
    seq = cache.add()
    feed(cache, seq, *(x[:, :n] for x in (q, k, v)))
    twin = cache.fork(seq)[0]
    # One token each: not looked at, so what is told was learned before the copy.
    feed(cache, twin, *(x[:, n:] for x in (q, k, v)))
    weights = weights_of(q[0, :n], k[0, :n]).sum(0)
    copied = torch.nn.functional.pad(weights, (0, 1))
    assert spy.told[-1].position.tolist() == [16, 16]
    assert np.allclose(spy.told[-1].mass[0], by_page(copied)[4], rtol=1e-4)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_staging_pages_of_every_dtype_are_looked_at(dtype):
    config = in_few_bits("int4", retention="importance", dtype=dtype, max_tokens=256)
    cache = PagedKVCache(config, device="cpu", debug=True)
    seq, x = cache.add(), torch.randn(40, HEADS, 32).to(getattr(torch, dtype))
    with cache.step([seq], num_new=40) as step:
        for layer in range(2):
            paged_attention(x, x, x, step, layer)
    assert cache.length(seq) == 40


def test_nothing_is_looked_at_for_a_policy_that_asks_for_nothing():
    cache = cache_of("sinks", budget=16)
    step = cache.prepare([cache.add()], num_new=8)
    assert step.queries is None


# ------------------------------------------------------------------ keys


@pytest.mark.parametrize("groups", [EACH_LAYER, (LayerGroup((0, 1)),)], ids=["apart", "together"])
def test_likeness_is_the_mean_cosine_to_the_mean_direction(groups):
    spy = Spy("likeness")
    cache, n = cache_of(spy, budget=8, groups=groups), 22
    q, k, v = random_qkv(n)
    feed(cache, cache.add(), q, k, v)
    expected = likeness_of(k[:, : n // P * P])
    both = expected.flatten() if len(groups) == 2 else expected.mean(0)
    # Means are kept in float16, of numbers up to one.
    assert np.allclose(spy.told[0].likeness, both, rtol=0, atol=2 * torch.finfo(torch.float16).eps)


def test_keys_that_were_cut_and_written_anew_are_looked_at_anew():
    spy = Spy("likeness")
    cache = cache_of(spy, budget=8, groups=(LayerGroup((0, 1)),))
    seq = cache.add()
    first, second = random_qkv(12), random_qkv(6)
    feed(cache, seq, *first)
    cache.truncate(seq, 10)
    feed(cache, seq, *second)
    k = torch.cat([first[1][:, 4:10], second[1]], 1)  # the first page is gone
    expected = likeness_of(k).mean(0)
    assert np.allclose(spy.told[1].likeness, expected, atol=2 * torch.finfo(torch.float16).eps)


def test_statistics_of_a_staging_page_are_those_of_the_coded_page_it_becomes():
    spy = Spy("mass", "likeness")
    sizes = {"max_tokens": 128, "max_sequence_length": 1000}
    config = in_few_bits("int4", retention=spy, budget=32, **sizes)
    cache, n = PagedKVCache(config, device="cpu"), 48
    seq, (q, k, v) = cache.add(), torch.randn(3, 2, n, 2, 32)
    for i in range(n):  # no page is filled by one step
        feed(cache, seq, *(x[:, i : i + 1] for x in (q, k, v)))
    weights = torch.zeros(n)
    for stop in range(EVERY, n + 1, EVERY):
        part = [
            weights_of(q[layer, stop - 1 : stop] * (D / 32) ** 0.5, k[layer, :stop])[0]
            for layer in range(2)
        ]
        weights *= 0.5 ** (EVERY / HALF_LIFE)
        weights[:stop] += EVERY * sum(part) / 2
    expected = weights.reshape(-1, 16).sum(1)
    assert spy.told[0].position.tolist() == [0, 16, 32]
    assert np.allclose(spy.told[0].mass, expected, rtol=0.1)  # keys of 4 bits
    assert np.allclose(spy.told[0].likeness, likeness_of(k, 16).mean(0), atol=0.02)


def test_keys_that_were_coded_into_a_page_of_somebody_else_are_looked_at_anew():
    spy = Spy("likeness")
    config = in_few_bits("int4", retention=spy, budget=48, max_tokens=96, max_sequences=1)
    cache, n = PagedKVCache(config, device="cpu"), 80
    for k in torch.randn(2, 2, n, 2, 32):
        seq = cache.add()
        for start in range(0, n, 8):
            feed(cache, seq, *(k[:, start : start + 8],) * 3)
        cache.free(seq)
    expected = likeness_of(k[:, 16:], 16).mean(0)  # the first page is gone
    assert spy.told[-1].position.tolist() == [16, 32, 48, 64]
    assert np.allclose(spy.told[-1].likeness, expected, atol=0.01)


def test_keydiff_keeps_the_pages_whose_keys_are_unlike_the_others():
    cache = cache_of(KeyDiff(recent=0), budget=8)
    k = torch.ones(2, 24, HEADS, D) + 0.1 * torch.randn(2, 24, HEADS, D)
    k[:, 8:12] *= -1
    k[1, 12:16, :, ::2] *= -1
    seq = cache.add()
    feed(cache, seq, k, k, k)
    assert set(range(8, 12)) <= set(cache.positions(seq, 0).tolist())
    assert cache.positions(seq, 1).tolist() == list(range(8, 16))


def test_importance_keeps_the_pages_that_were_attended_to():
    cache = cache_of(Sinks(Importance(recent=0), 1), budget=12)
    q, k, v = random_qkv(24)
    k[:, 12:16] = 4 * q[:, -1:]
    q[:] = q[:, -1:]
    seq = cache.add()
    feed(cache, seq, q, k, v)
    for layer in range(2):
        kept = set(cache.positions(seq, layer).tolist())
        assert {0, 1, 2, 3, 12, 13, 14, 15} <= kept
        assert len(kept) == 12


@pytest.mark.parametrize("policy", [KeyDiff, Importance])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_keys_that_are_no_numbers_cost_their_own_sequence_and_no_other(policy, bad):
    cache = cache_of(policy(recent=0), budget=8)
    q, k, v = random_qkv(20)
    broken = k.clone()
    broken[:, 5] = bad
    seqs = [cache.add(), cache.add()]
    with cache.step(seqs, num_new=20) as step:
        for layer in range(2):
            rows = (torch.cat([a[layer], b[layer]]) for a, b in ((q, q), (k, broken), (v, v)))
            paged_attention(*rows, step, layer)
    alone = cache_of(policy(recent=0), budget=8)
    feed(alone, one := alone.add(), q, k, v)
    for layer in range(2):
        expected = alone.positions(one, layer)
        assert cache.positions(seqs[0], layer).tolist() == expected.tolist()
        assert cache.positions(seqs[1], layer).size == 8
    cache.check()


def test_lru_keeps_what_was_attended_to_last():
    cache = cache_of(LeastRecentlyAttended(recent=0), budget=4, groups=(LayerGroup((0, 1)),))
    k = torch.zeros(2, 20, HEADS, D)
    k[:, :4] = 3.0
    seq = cache.add()
    feed(cache, seq, torch.ones_like(k), k, k)
    assert cache.positions(seq, 0).tolist() == [0, 1, 2, 3]


# ------------------------------------------------------------------ merging


def test_semantic_averages_the_values_that_go_into_the_most_similar_that_stay():
    cache = cache_of(Semantic(recent=0), budget=8, groups=(LayerGroup((0, 1)),))
    q, k, v = random_qkv(12)
    seq = cache.add()
    feed(cache, seq, q, k, v)
    kept = cache.positions(seq, 0).tolist()
    gone = sorted(set(range(12)) - set(kept))
    assert len(gone) == 4
    for layer in range(2):
        keys, values = cache.gather(seq, layer)
        assert torch.equal(keys, k[layer, kept])
        unit = torch.nn.functional.normalize(k[layer], dim=-1)
        for head in range(HEADS):
            heirs = (unit[gone, head] @ unit[kept, head].T).argmax(1)
            for i, place in enumerate(kept):
                parts = [v[layer, place, head]]
                parts += [v[layer, gone[j], head] for j in range(4) if heirs[j] == i]
                assert torch.allclose(values[i, head], torch.stack(parts).mean(0), atol=1e-6)


def test_pages_that_took_over_values_are_found_by_nobody():
    cache = cache_of(Sinks(Semantic(recent=0), 1), budget=8)
    tokens = list(range(16))
    seq = cache.add(tokens)
    q, k, v = random_qkv(16)
    with cache.step([seq], tokens=[tokens]) as step:
        for layer in range(2):
            paged_attention(q[layer], k[layer], v[layer], step, layer)
    first = [x[:P].clone() for x in cache.gather(seq, 0)]
    assert cache.length(cache.add(tokens)) == P  # the sink page, which took over nothing
    assert torch.equal(first[1], v[0, :P])
    cache.check()


def test_values_are_not_merged_into_pages_that_others_own():
    cache = cache_of(Semantic(recent=0), budget=8, groups=(LayerGroup((0, 1)),))
    q, k, v = random_qkv(16)
    seq = cache.add()
    feed(cache, seq, *(x[:, :8] for x in (q, k, v)))
    twin = cache.fork(seq)[0]
    feed(cache, seq, *(x[:, 8:] for x in (q, k, v)))
    assert cache.positions(seq, 0).tolist() == list(range(8))
    assert torch.equal(cache.gather(twin, 0)[1], v[0, :8])
    assert torch.equal(cache.gather(seq, 0)[1], v[0, :8])
