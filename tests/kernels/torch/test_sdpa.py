"""Errors of torch are mended: overflow on a CPU, and cuDNN, whose switch others find as it was."""

import math
from contextlib import ExitStack

import pytest
import torch
import torch.nn.functional as F
from torch.backends.cuda import (
    cudnn_sdp_enabled,
    enable_cudnn_sdp,
    flash_sdp_enabled,
    math_sdp_enabled,
    mem_efficient_sdp_enabled,
)

from pagedkv import CacheConfig, PagedKVCache, paged_attention
from pagedkv.kernels.torch import backend as gather
from pagedkv.kernels.torch.sdpa import attend, without_cudnn

CARD = torch.device("cuda")
HEADS, DIM = 2, 16


def others():
    return flash_sdp_enabled(), mem_efficient_sdp_enabled(), math_sdp_enabled()


@pytest.fixture
def asked(monkeypatch):
    """Treats calls as those of a card, and notes whether each found cuDNN enabled."""
    found, attend = [], F.scaled_dot_product_attention

    def noted(*args, **options):
        found.append(cudnn_sdp_enabled())
        return attend(*args, **options)

    monkeypatch.setattr(F, "scaled_dot_product_attention", noted)
    return found


@pytest.mark.parametrize("before", [True, False])
def test_cudnn_is_off_inside_and_as_it_was_afterwards(before):
    known = others()
    enable_cudnn_sdp(before)
    try:
        with without_cudnn(CARD):
            inside = cudnn_sdp_enabled(), others()
        assert inside == (False, known)
        assert (cudnn_sdp_enabled(), others()) == (before, known)
    finally:
        enable_cudnn_sdp(True)


def test_a_call_that_fails_leaves_cudnn_as_it_was():
    with pytest.raises(KeyError), without_cudnn(CARD):
        raise KeyError
    assert cudnn_sdp_enabled()


def test_cudnn_stays_off_until_the_last_of_two_threads_has_left():
    first, second = ExitStack(), ExitStack()
    first.enter_context(without_cudnn(CARD))
    second.enter_context(without_cudnn(CARD))
    first.close()
    assert not cudnn_sdp_enabled()
    second.close()
    assert cudnn_sdp_enabled()


def test_nothing_changes_on_other_devices():
    for name in ("cpu", "mps"):
        with without_cudnn(torch.device(name)):
            assert cudnn_sdp_enabled()


def test_a_compiler_sees_no_break_and_leaves_cudnn_out_as_well():
    found = []

    class Run(torch.fx.Interpreter):
        def call_function(self, target, args, kwargs):
            if target is F.scaled_dot_product_attention:
                found.append(cudnn_sdp_enabled())
            return super().call_function(target, args, kwargs)

    def attend(q):
        with without_cudnn(CARD):
            return F.scaled_dot_product_attention(q, q, q)

    q, known = torch.randn(1, 2, 4, DIM), others()
    compiled = torch.compile(attend, backend=lambda graph, _: Run(graph).run, fullgraph=True)
    assert torch.equal(compiled(q), F.scaled_dot_product_attention(q, q, q))
    assert found == [False]
    assert (cudnn_sdp_enabled(), others()) == (True, known)


@pytest.mark.parametrize("read_tokens", [None, 64])
def test_every_attention_of_the_torch_backend_leaves_cudnn_out(read_tokens, asked, monkeypatch):
    devices = []

    def as_on_a_card(device):
        devices.append(device)
        return without_cudnn(CARD)

    def torchs(q, k, v, scale, causal=False, mask=None):
        return F.scaled_dot_product_attention(
            q, k, v, mask, is_causal=causal, scale=scale, enable_gqa=True
        )

    monkeypatch.setattr(gather, "without_cudnn", as_on_a_card)
    monkeypatch.setattr(gather, "attend", torchs)  # which on a CPU calls what lies below
    config = CacheConfig(
        1, HEADS, DIM, "float32", max_tokens=1024, page_size=16, read_tokens=read_tokens
    )
    cache = PagedKVCache(config, device="cpu", backend="torch")
    seqs = [cache.add(), cache.add()]
    # Prompts, decoding rows, rows behind a past.
    for counts in ([90, 90], [1, 1], [5, 7]):
        step = cache.prepare(seqs, num_new=counts)
        k, v = torch.randn(2, sum(counts), HEADS, DIM)
        paged_attention(torch.cat([k, v], 1), k, v, step, 0)
        cache.commit(step)
        assert asked
        assert not any(asked)
        asked.clear()
    assert devices == [torch.device("cpu")] * 3
    assert cudnn_sdp_enabled()


@pytest.mark.parametrize("masked", [False, True])
def test_a_key_that_overflowed_is_not_answered_by_zeros(masked):
    """In float16 the sum of such weights is infinite, and their products zeros."""
    drawn = torch.Generator().manual_seed(0)
    q, k, v = torch.randn(3, 1, 2, 64, 16, generator=drawn).half()
    k[:, 0, :, 0] = math.inf
    mask = torch.zeros(64, 64).masked_fill_(torch.ones(64, 64).triu(1).bool(), -math.inf)
    terms = {"mask": mask.half()[None, None]} if masked else {"causal": True}
    out = attend(q, k, v, 0.25, **terms)
    assert out[:, 0].isnan().all()
    assert out[:, 1].isfinite().all()
