"""Calls that the Triton backend refuses leave the pages as they were."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from pagedkv import CacheConfig, PagedKVCache, attend_again, paged_attention
from pagedkv.attention.api import gather_kv
from pagedkv.errors import GradModeError
from tests.effort import each_value
from tests.kernels.triton_cases import misaligned

G, D, T = 2, 16, 8


def cache_for(backend="triton", groups=G, layers=1):
    config = CacheConfig(
        num_layers=layers,
        num_kv_heads=groups,
        head_dim=D,
        dtype="float32",
        max_tokens=64,
        page_size=4,
    )
    return PagedKVCache(config, device="cpu", backend=backend, debug=True)


def tensors(heads=4, groups=G):
    torch.manual_seed(0)
    return torch.randn(T, heads, D), torch.randn(T, groups, D), torch.randn(T, groups, D)


WRONG = {
    "too many query heads": ({"q": tensors(260)[0]}, {}, NotImplementedError, "at most 128"),
    "misaligned queries": ({"q": misaligned(tensors()[0])}, {}, ValueError, "^q: .*16 bytes"),
    "queries with odd strides": (
        {"q": torch.randn(T, 4, D + 8)[..., :D]}, {}, ValueError, "^q: .*multiples of 16"),
    "queries with gaps": ({"q": torch.randn(T, 4, 2 * D)[..., ::2]}, {}, ValueError, "^q: "),
    "misaligned keys": ({"k": misaligned(tensors()[1])}, {}, ValueError, "^k: .*16 bytes"),
    "sinks with gaps": ({}, {"sinks": torch.zeros(8)[::2]}, ValueError, "^sinks: .*strides"),
    "misaligned sinks": (
        {}, {"sinks": misaligned(torch.zeros(4))}, ValueError, "^sinks: .*16 bytes"),
    "a bias with gaps": (
        {}, {"distance_bias": torch.zeros(T, 4, 8)[..., ::2]}, ValueError,
        "^distance_bias: .*strides"),
    "a softcap without digits": ({}, {"softcap": 1e9}, NotImplementedError, "^softcap: .*torch"),
    "a text as scale": ({}, {"scale": "one"}, TypeError, "^scale: expected a number, got str"),
    "a complex scale": ({}, {"scale": 1j}, TypeError, "^scale: expected a number, got complex"),
    "a scale that is none": ({}, {"scale": float("nan")}, ValueError, "^scale: .*finite.* nan"),
    "a list of sinks": ({}, {"sinks": [0.0] * 4}, TypeError, "^sinks: .* tensor, got list"),
    "several softcaps": ({}, {"softcap": torch.ones(2)}, TypeError, "^softcap: expected a number"),
    "a softcap that is none": ({}, {"softcap": -1.0}, ValueError, "^softcap: expected a positive"),
    "sinks of other heads": ({}, {"sinks": torch.zeros(3)}, ValueError, "^sinks: .*shape"),
    "sinks that learn": (
        {}, {"sinks": torch.zeros(4, requires_grad=True)}, GradModeError, "^sinks: "),
    "other queries": ({"q": tensors()[0][:-1]}, {}, ValueError, "^q: expected shape"),
    "queries of another dtype": ({"q": tensors()[0].double()}, {}, TypeError, "^q: .*float64"),
    "queries elsewhere": ({"q": tensors()[0].to("meta")}, {}, ValueError, "^q: .*device"),
    "queries that learn": (
        {"q": tensors()[0].requires_grad_()}, {}, GradModeError, "^q: requires gradients"),
    "keys of one head": ({"k": tensors()[1][:, :1]}, {}, ValueError, "^k: expected shape"),
    "values that learn": (
        {"v": tensors()[2].requires_grad_()}, {}, GradModeError, "^v: requires gradients"),
    "negated keys": (
        {"k": torch.randn(T, G, D, dtype=torch.complex64).conj().imag}, {}, ValueError, "^k: "),
}  # fmt: skip


@pytest.mark.parametrize(("before", "case"), each_value([0, 1], WRONG))
def test_what_is_refused_was_not_written(case, before):
    """Also in a layer after another whose launches were bound for it."""
    change, options, error, message = WRONG[case]
    cache, good = cache_for(layers=2), dict(zip("qkv", tensors()))
    step = cache.prepare([cache.add()], num_new=T)
    for _ in range(before):
        paged_attention(*good.values(), step, 0)
    with pytest.raises(error, match=message):
        paged_attention(*(good | change).values(), step, 1, **options)
    assert all(x.isnan().all() for x in gather_kv(step, 1)[0]), "debug pages hold NaN until then"
    assert step.wrote == [0] * before
    cache.abort(step)
    cache.check()


@pytest.mark.parametrize(
    ("fields", "backend"),
    [
        *(({"read_tokens": 16}, backend) for backend in ("torch", "c", "triton")),
        ({"kv_format": "int4", "head_dim": 32, "page_size": 16}, "triton"),
    ],
    ids=str,
)
def test_the_last_queries_see_what_they_see_among_all(fields, backend):
    """A staging page in front of coded ones, and pages without bounds, that fill in this step."""
    sizes = {"head_dim": 16, "page_size": 4, **fields}
    config = CacheConfig(1, G, dtype="float32", max_tokens=512, max_sequences=4, **sizes)
    cache = PagedKVCache(config, device="cpu", backend=backend, debug=True)
    seqs, last = [cache.add() for _ in range(3)], [1, 0, 10]
    for new in ([20, 45, 10], [39, 1, 50]):
        with cache.step(seqs, num_new=new) as step:
            q, k, v = (torch.randn(sum(new), n, config.head_dim) for n in (4, G, G))
            out = paged_attention(q, k, v, step, 0)
            ends = [x[len(x) - n :] for x, n in zip(q.split(new), last)]
            again = attend_again(torch.cat(ends), step, 0, num_queries=last)
            expected = torch.cat([x[len(x) - n :] for x, n in zip(out.split(new), last)])
            torch.testing.assert_close(again, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("last", [None, [1, 5], [3, 1]])
def test_both_backends_attend_again_alike(last):
    found = []
    for backend in ("triton", "torch"):
        cache = cache_for(backend)
        seqs = [cache.add(), cache.add()]
        for _ in range(2):
            with cache.step(seqs, num_new=[3, 5]) as step:
                q, k, v = tensors()
                paged_attention(q, k, v, step, 0)
                n = T if last is None else sum(last)
                found.append(attend_again(q.flip(0)[:n], step, 0, num_queries=last))
    torch.testing.assert_close(found[:2], found[2:])


@pytest.mark.parametrize(
    "options",
    [
        {"scale": 1, "softcap": 30},
        {"scale": np.float32(0.3), "softcap": np.float64(2.5)},
        {"scale": torch.tensor(0.3), "softcap": torch.tensor([4.0])},
    ],
    ids=str,
)
def test_any_number_is_a_scale_or_a_softcap_on_both_backends(options):
    found = []
    for backend in ("triton", "torch"):
        cache = cache_for(backend)
        with cache.step([cache.add()], num_new=T) as step:
            found.append(paged_attention(*tensors(), step, 0, **options))
    torch.testing.assert_close(*found)
