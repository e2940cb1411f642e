"""A process alone asks nobody."""

import pytest
import torch.distributed as dist

from tests.batch.generating import generator
from tests.hf.tiny import generate, padded, prompts, tiny

COLLECTIVE = "broadcast broadcast_object_list all_reduce all_gather_object new_group barrier"


def test_nothing_of_torch_distributed_is_called(monkeypatch):
    def called(*args, **kwargs):
        pytest.fail("a process alone made a collective call")

    for name in COLLECTIVE.split():
        monkeypatch.setattr(dist, name, called)
    from pagedkv import PagedCache

    model, some = tiny(), prompts(5, 23, 9)
    sizes = {"max_tokens": 64, "host_tokens": 64, "retention": "keydiff", "verify_width": 2}
    with generator(model, **sizes) as batched:
        batched.generate(iter(some), max_new_tokens=12, do_sample=True, num_return_sequences=2)
        assert batched.stats.preemptions > 0
        batched.score([[5, 6]], [[[7, 8], [9]]])
    with PagedCache(model, max_tokens=256) as cache:
        generate(model, padded(some[:1]), cache, max_new_tokens=4)
