"""Recognisable contents of pages, and steps that write them.

Keys and values are a pure function of (salt, tokens up to and including their own, layer, head).
Sharing a page between equal prefixes is then legal, and every other way to end up with a wrong page
shows as wrong contents.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch

from pagedkv import CacheConfig, PagedKVCache, write_kv

WORD = (1 << 64) - 1
SALTS = (b"", b"other tenant")


def roots(salt: bytes) -> int:
    return int.from_bytes(salt.ljust(8, b"\x5a")[:8], "little") ^ len(salt)


def hash_on(before: int, tokens: Iterable[int]) -> list[int]:
    """Hashes of a text's prefixes that end in each of `tokens`; `before` is the last one so far."""
    hashes = []
    for token in tokens:
        before = ((before ^ (before >> 29)) * 0x9E3779B97F4A7C15 + 2 * int(token) + 1) & WORD
        hashes.append(before)
    return hashes


def _mix(x: np.ndarray) -> np.ndarray:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


@cache
def _places(layer: int, size: int) -> np.ndarray:
    """A number for each element of a token's K and V, `[2, 1, size]`."""
    at = np.arange(2 * size, dtype=np.uint64) + np.uint64((layer + 1) << 32)
    return _mix(at).reshape(2, 1, size)


def kv_of_hashes(
    hashes: Sequence[int], layer: int, config: CacheConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V `[n, G, D]` of the tokens with these prefix hashes.

    Eight significant bits a number, so that every dtype holds them exactly.
    """
    heads, *dims, v_is_k = config.shapes[config.group_of[layer]]
    rows = np.asarray(hashes, dtype=np.uint64)
    bits = _mix(rows[None, :, None] + _places(layer, heads * max(dims))) >> np.uint64(56)
    numbers = (bits.astype(np.float32) - 128) / 16
    shape = (2, len(hashes), heads, max(dims))
    both = torch.from_numpy(numbers.reshape(shape)).to(getattr(torch, config.dtype))
    k, v = (x[..., :dim] for x, dim in zip(both, dims))
    return k, k[..., : dims[1]] if v_is_k else v


def kv_of(
    tokens: Sequence[int], layer: int, config: CacheConfig, salt: bytes = b""
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V `[n, G, D]` of a whole text in one layer."""
    return kv_of_hashes(hash_on(roots(salt), tokens), layer, config)


def moved(
    k: torch.Tensor, v: torch.Tensor, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V on a device; a V that is a part of K stays one."""
    if device == k.device:
        return k, v
    is_part, k = v.data_ptr() == k.data_ptr(), k.to(device)
    return k, k[..., : v.shape[2]] if is_part else v.to(device)


def write_step(
    cache: PagedKVCache,
    step: Any,
    texts: Sequence[Sequence[int]],
    salt: bytes = b"",
    layers: Iterable[int] | None = None,
) -> None:
    """Writes every layer's K and V of a step.

    texts: each sequence's whole text, the new tokens included.
    """
    for layer in range(cache.config.num_layers) if layers is None else layers:
        parts = [
            [x[len(text) - new :] for x in kv_of(text, layer, cache.config, salt)]
            for text, new in zip(texts, step.num_new.tolist(), strict=True)
        ]
        k, v = (torch.cat(x) for x in zip(*parts, strict=True))
        if cache.config.shapes[step.group_of(layer)].v_is_k:
            v = k[..., : v.shape[2]]
        write_kv(*moved(k, v, cache.placement.layers[layer]), step, layer)


def advance(
    cache: PagedKVCache, texts: dict[int, Sequence[int]], salt: bytes = b"", **commit: Any
) -> None:
    """One step in which each sequence grows to the text given, ids and all."""
    new = [list(text[cache.length(seq) :]) for seq, text in texts.items()]
    step = cache.prepare(list(texts), tokens=new)
    write_step(cache, step, list(texts.values()), salt)
    cache.commit(step, **commit)


def start(
    cache: PagedKVCache, text: Sequence[int], salt: bytes = b"", max_tokens: int | None = None
) -> int:
    """A sequence with this prompt, computed and committed."""
    seq = cache.add(text, salt=salt, max_tokens=max_tokens)
    advance(cache, {seq: text}, salt)
    return seq


def assert_contents(
    cache: PagedKVCache, seq: int, tokens: Sequence[int], salt: bytes = b""
) -> None:
    """Every layer of a sequence holds what `kv_of` says (the last `stored` tokens of it)."""
    assert cache.length(seq) == len(tokens)
    for layer in range(cache.config.num_layers):
        for actual, expected in zip(
            cache.gather(seq, layer), kv_of(tokens, layer, cache.config, salt), strict=True
        ):
            stored = actual.shape[0]
            assert stored <= len(tokens)
            assert torch.equal(actual.cpu(), expected[len(tokens) - stored :]), (seq, layer)


class Boom(Exception):
    """Raised inside a step on purpose."""
