"""Threads with caches of their own, compared with the model alone."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch

from pagedkv import PagedKVCache
from pagedkv.hf import PagedCache
from tests.hf.forwards import IDS
from tests.hf.tiny import FAMILIES, attention_of, named, prompts, tiny
from tests.hf.zoo import built

SIZES = {"page_size": 4, "max_tokens": 2048}
PLAIN = {"max_new_tokens": 10, "do_sample": False}
ROWS = [[3 + 7 * i, 4, 5, 6, 7][: 2 + i % 4] for i in range(8)]


def case(family: str = "llama"):
    """A model, a prompt for each of four threads, and what the model alone says to them."""
    return _made(family)


@cache  # told apart by all that is given, so nothing of it has a default
def _made(family: str):
    model = tiny(family) if family in FAMILIES else built(family)
    asked = [torch.stack(prompts(9 + i)) for i in range(4)]
    return model, asked, [model.generate(ids, **PLAIN) for ids in asked]


@cache
def rows_alone():
    model = case()[0]
    return [model.generate(torch.tensor([row]), **PLAIN)[0, len(row) :].tolist() for row in ROWS]


@contextmanager
def shared(model) -> Iterator[PagedKVCache]:
    """The pages of a model, which nobody holds any of afterwards, nor waits for."""
    before = attention_of(model)
    gc.freeze()  # what is there by now: a collector looks through it for a quarter of a second
    with PagedCache(model, **SIZES) as keeper:
        yield keeper.kv
        gc.collect()
        assert keeper.stats().sequences == 0
        keeper.kv.check()
        assert keeper.kv.lock.forward is None
        assert not keeper.kv.turns._jobs
    assert attention_of(model) == before
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())


def answers(place: int, times: int = 1, family: str = "llama", **options) -> None:
    """Generates with new caches; each answer has to be the model's alone."""
    model, asked, expected = case(family)
    for _ in range(times):
        with PagedCache(model, **SIZES) as own:
            found = model.generate(asked[place], **named(own), **{**PLAIN, **options})
        assert torch.equal(found, expected[place])


@torch.no_grad()
def forward(model, own):
    return model(IDS, **named(own)).logits
