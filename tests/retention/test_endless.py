"""A cache of fixed size, a text without end: constant memory, exact attention to what stays."""

import pytest
import torch

from pagedkv import LayerGroup, PagedKVCache, paged_attention
from pagedkv.retention import POLICIES, Fifo, KeyDiff, Sinks
from tests.cases import one_group

HEADS, D, LAYERS = 2, 8, 2
POLICIES_HERE = {"sinks": Sinks(Fifo()), "keydiff": Sinks(KeyDiff(recent=32)), "lru": "lru"}


@pytest.mark.slow
@pytest.mark.parametrize("name", POLICIES_HERE)
def test_twenty_thousand_tokens_in_constant_memory_with_exact_attention(name):
    n, budget = 20_000, 128
    config = one_group(
        **{"head_dim": D, "page_size": 16, "max_tokens": 192, "max_sequence_length": n + 1},
        groups=(LayerGroup((0,)), LayerGroup((1,))),
        **{"retention": POLICIES_HERE[name], "budget": budget},
    )
    cache = PagedKVCache(config, device="cpu")
    # A tiny recurrent model: what it puts out is what it takes in, so that errors would add up.
    mix = torch.randn(LAYERS, 3, HEADS * D, HEADS, D) / (HEADS * D) ** 0.5
    k, v = torch.empty(2, LAYERS, n, HEADS, D)
    x, seq, live = torch.randn(1, HEADS * D), cache.add(), set()
    for position in range(n):
        with cache.step([seq], num_new=1) as step:
            assert step.positions.tolist() == [position]
            for layer in range(LAYERS):
                q, k_new, v_new = rotated(x, mix[layer], position)
                k[layer, position], v[layer, position] = k_new[0], v_new[0]
                out = paged_attention(q, k_new, v_new, step, layer)
                if position % 97 == 0 or position > n - 50:
                    kept = [*cache.positions(seq, layer).tolist(), position]
                    expected = dense(q[0], k[layer, kept], v[layer, kept])
                    assert (out[0] - expected).abs().max() < 1e-5
                x = x + out.reshape(1, -1)
            x = torch.tanh(x + torch.sin(torch.tensor(position * 0.7)))
        if position > 2 * budget:
            live.add(cache.stats().live)
            assert len(cache.positions(seq, 0)) < budget + 16
    cache.check()
    assert cache.length(seq) == n
    # Eight whole pages a layer, and the one being written, but for the moment it was filled.
    assert live == {LAYERS * 8, LAYERS * 9}
    assert cache.positions(seq, 0)[:4].tolist() == [0, 1, 2, 3]


def rotated(x, weights, position):
    """Queries, keys and values, the first two turned by their position: `[1, HEADS, D]` each."""
    q, k, v = torch.einsum("bi,tihd->tbhd", x, weights)
    angle = position / 100 ** (torch.arange(D // 2) / (D // 2))
    cos, sin = angle.cos(), angle.sin()

    def turn(y):
        a, b = y.chunk(2, -1)
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    return turn(q), turn(k), v


def dense(q, k, v):
    """One query's attention to `[s, HEADS, D]`, in float64."""
    scores = torch.einsum("hd,khd->hk", q.double(), k.double()) / D**0.5
    return torch.einsum("hk,khd->hd", scores.softmax(-1), v.double())


def test_every_policy_runs_under_a_text_without_end():
    for name in POLICIES:
        config = one_group(page_size=4, max_tokens=192, max_sequence_length=400, retention=name)
        cache = PagedKVCache(config, device="cpu", debug=True)
        seq = cache.add()
        for _ in range(30):
            with cache.step([seq], num_new=12) as step:
                for layer in range(2):
                    paged_attention(*torch.randn(3, 12, 2, 4), step, layer)
        cache.check()
        assert cache.length(seq) == 360
        assert cache.stats().live <= 45
