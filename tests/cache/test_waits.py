"""Nothing in a step waits for the device: what the host sends, it sends without waiting."""

import numpy as np
import pytest
import torch

from pagedkv import PagedKVCache, paged_attention
from pagedkv.kernels import sending
from pagedkv.models import StateLayer
from tests.cases import in_few_bits, latent, one_group, two_groups
from tests.devices import A, Devices, let_grow

STATES = tuple(StateLayer((((2, 3), "float32"),)) for _ in range(2))
CONFIGS = {
    "dense": one_group(max_tokens=256),
    "a window": two_groups(max_tokens=256),
    "latents": latent(max_tokens=256),
    "int8": in_few_bits("int8", max_tokens=256),
    "fp8": in_few_bits("fp8", max_tokens=256),
    "int4": in_few_bits("int4", max_tokens=512),
    "watched": one_group(max_tokens=256, retention="importance", budget=72),
    "compared": one_group(max_tokens=256, retention="keydiff", budget=72),
    "choosing pages": one_group(max_tokens=256, read_tokens=16),
    "host pages": one_group(max_tokens=256, host_tokens=256),
    "host pages of int4": in_few_bits("int4", max_tokens=512, host_tokens=256),
    "states": one_group(max_tokens=256, states=STATES),
}


@pytest.fixture
def devices(monkeypatch):
    with Devices() as devices:
        let_grow(devices, monkeypatch)
        yield devices


def a_step(cache, seqs, new):
    """A step of so many tokens a row, with attention in all layers."""
    with cache.step(seqs, num_new=new) as step:
        for layer in range(len(cache.config.states)):
            step.write_state(layer, step.read_state(layer))
        for layer in range(cache.config.num_layers):
            heads, *dims, v_is_k = cache.config.shapes[cache.config.group_of[layer]]
            sizes = [(2 * heads, dims[0]), *((heads, dim) for dim in dims)]
            q, k, v = (torch.zeros(step.num_tokens, *size, device=A) for size in sizes)
            paged_attention(q, k, k[..., : dims[1]] if v_is_k else v, step, layer)


@pytest.mark.parametrize("kind", CONFIGS)
def test_no_step_waits_for_the_device(kind, devices):
    config = CONFIGS[kind]
    cache = PagedKVCache(config, device=A, backend="torch")
    seq, other = cache.add(), cache.add()
    a_step(cache, [seq], 18)  # one that has neighbours fills pages end to end
    devices.waited.clear()
    a_step(cache, [seq, other], [1, 17])
    (copy,) = cache.fork(seq)  # whose page is copied before it is written
    for _ in range(config.page_size + 1):  # fills pages
        a_step(cache, [seq, other, copy], 1)
    if config.host_tokens:
        cache.free(copy)
        cache.offload(other)
        cache.restore(other)
        a_step(cache, [seq, other], 1)
    assert _without_backend(devices.waited) == {}


def _without_backend(waited):
    """Returns the waits that count on a card, whose backend is the other one."""
    torch_backend = "kernels/torch/backend", "kernels/torch/gather"
    return {name: n for name, n in waited.items() if not name.startswith(torch_backend)}


def test_a_copy_that_is_waited_for_would_be_seen(devices, monkeypatch):
    """So that the test above can fail."""
    cache = PagedKVCache(one_group(), device=A, backend="torch")
    seq = cache.add()
    a_step(cache, [seq], 5)
    storage = cache._storage
    monkeypatch.setattr(storage, "_ids", lambda pages: torch.from_numpy(pages).to(A))
    devices.waited.clear()
    a_step(cache, [seq, *cache.fork(seq)], 1)
    assert sum(devices.waited.values()) >= 2


def test_what_goes_to_a_card_is_pinned_and_not_waited_for(monkeypatch):
    calls = []
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda x: calls.append("pinned") or x)
    monkeypatch.setattr(torch.Tensor, "to", lambda x, *at, **how: calls.append((at, how)) or x)
    sending.sent(np.arange(3), torch.device("cuda"))
    assert calls == ["pinned", ((torch.device("cuda"),), {"non_blocking": True})]
