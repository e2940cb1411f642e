"""Caches with recurrent states, and states that tell which text they are of.

The state of a text is a function of its salt and its ids, so that any state of another length, or
of another text, shows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from pagedkv import CacheConfig, PagedKVCache, write_kv
from pagedkv.config import StateLayer
from tests.cases import Case, in_few_bits, one_group, two_groups
from tests.contents import assert_contents, hash_on, kv_of, roots

STATES = (
    StateLayer((((3, 2), "bfloat16"), ((2, 2, 2), "float32"))),
    StateLayer((((5,), "float16"),)),
)


def with_states(config: CacheConfig, max_states: int = 0) -> CacheConfig:
    return replace(config, states=STATES, max_states=max_states)


FEW = {"max_tokens": 256, "max_sequences": 8}
CASES = [
    Case(name, with_states(config, slots), True)
    for name, config, slots in (
        ("many", one_group(max_tokens=4096, max_sequences=12, host_tokens=4096), 200),
        ("few", one_group(**FEW, host_tokens=128), 4),
        ("fewer", one_group(**FEW, page_size=3, host_tokens=64), 2),
        ("one", one_group(max_tokens=64, max_sequences=6, page_size=1), 1),
        ("few pages", one_group(max_tokens=36, max_sequences=6, page_size=3, host_tokens=30), 5),
        ("window", two_groups(6, max_tokens=64, page_size=4, host_tokens=64), 6),
        ("states-int4", in_few_bits("int4", max_tokens=128, max_sequences=6, host_tokens=64), 5),
        ("budget", one_group(max_tokens=48, page_size=2, retention="fifo", budget=8), 5),
        ("growing", one_group(max_tokens=64, growth_step=8, head_dim=8), 4),
    )
]


def state_of(text: Sequence[int], layer: int, salt: bytes = b"") -> list[torch.Tensor]:
    """Returns a state layer's state after a text; zeros before its first token."""
    tensors = STATES[layer].tensors
    if not text:
        return [torch.zeros(shape, dtype=getattr(torch, dtype)) for shape, dtype in tensors]
    seed = hash_on(roots(salt), text)[-1] ^ layer
    source = torch.Generator().manual_seed(seed & ((1 << 62) - 1))
    return [torch.randn(s, generator=source).to(getattr(torch, d)) for s, d in tensors]


def write_states(step: Any, texts: Sequence[Sequence[int]], salts: Sequence[bytes]) -> None:
    """Checks the states before a step and hands in those after it."""
    for layer in range(len(STATES)):
        for side, shorten in (("before", True), ("after", False)):
            rows = []
            for text, salt, new in zip(texts, salts, step.num_new.tolist(), strict=True):
                rows.append(state_of(text[: len(text) - new * shorten], layer, salt))
            stacked = [torch.stack(each) for each in zip(*rows, strict=True)]
            if side == "after":
                step.write_state(layer, stacked, donate=layer == 0)
            else:
                for actual, expected in zip(step.read_state(layer), stacked, strict=True):
                    assert torch.equal(actual, expected), "a state of another length or text"
                    actual.fill_(float("nan"))  # it is the reader's own


def write_all(
    cache: PagedKVCache, step: Any, texts: Sequence[Sequence[int]], salts: Sequence[bytes]
) -> None:
    """Writes all layers in a step.

    texts: each sequence's whole text, the new tokens included.
    """
    for layer in range(cache.config.num_layers):
        parts = [
            [x[len(text) - new :] for x in kv_of(text, layer, cache.config, salt)]
            for text, salt, new in zip(texts, salts, step.num_new.tolist(), strict=True)
        ]
        write_kv(*(torch.cat(x) for x in zip(*parts, strict=True)), step, layer)
    write_states(step, texts, salts)


def grow(cache: PagedKVCache, texts: dict[int, Sequence[int]], salt: bytes = b"") -> None:
    """One step in which each sequence grows to the text given, ids and all."""
    new = [list(text[cache.length(seq) :]) for seq, text in texts.items()]
    with cache.step(list(texts), new) as step:
        write_all(cache, step, list(texts.values()), [salt] * len(texts))


def begin(cache: PagedKVCache, text: Sequence[int], salt: bytes = b"", **fields: Any) -> int:
    seq = cache.add(text, salt=salt, **fields)
    grow(cache, {seq: text}, salt)
    return seq


def assert_state(
    cache: PagedKVCache, seq: int, text: Sequence[int], salt: bytes = b"", **fields: Any
) -> None:
    """Pages and states of a sequence are those of a text."""
    assert_contents(cache, seq, text, salt)
    for layer in range(len(STATES)):
        found = cache.read_state(seq, layer)
        for actual, expected in zip(found, state_of(text, layer, salt), strict=True):
            assert torch.equal(actual[0], expected)
