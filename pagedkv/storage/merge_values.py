"""Averages the values of evicted tokens into the most similar tokens that stay."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from pagedkv.arrays import Ints
from pagedkv.config import CacheConfig
from pagedkv.kernels.sending import sent

from . import Storage


def merge_values(
    storage: Storage, config: CacheConfig, base: Ints, group: int, gone: Ints, receivers: Ints
) -> Callable[[], None]:
    """Averages the values of pages that leave into pages that stay, for every KV head on its own.

    A token that receives m values gets the mean of these and its own value. Tokens are compared by
    the cosine of their keys; keys stay as they are.

    Args:
        base: first page of each group.
        gone: whole pages of one table of a group, which leave.
        receivers: whole pages of the same table, which stay.

    Returns:
        A function that writes the means into the receivers, in place.
    """
    size, gone, receivers = storage.page_size, gone - base[group], receivers - base[group]
    merged = []
    for layer in config.groups[group].layers:
        old_keys, old_values = (x.transpose(0, 1) for x in _read(storage, layer, gone))
        keys, values = (x.transpose(0, 1) for x in _read(storage, layer, receivers))  # [G, s, D]
        similar = _unit(old_keys) @ _unit(keys).transpose(1, 2)
        receiver = similar.argmax(-1)  # [G, tokens that go]
        ones = keys.new_ones(receiver.shape)
        taken = keys.new_ones(keys.shape[:2]).scatter_add_(1, receiver, ones)
        index = receiver.unsqueeze(-1).expand_as(old_values)
        means = values.scatter_add(1, index, old_values) / taken.unsqueeze(-1)
        by_page = means.unflatten(1, (-1, size)).transpose(0, 1)  # [receivers, G, P, D]
        merged.append((layer, by_page.to(storage.dtype)))

    def write() -> None:
        for layer, values in merged:
            storage.layer(layer)[1][sent(receivers, values.device)] = values

    return write


def _read(storage: Storage, layer: int, pages: Ints) -> tuple[Tensor, Tensor]:
    k, v = storage.read(layer, pages, pages.size * storage.page_size)
    return k.float(), v.float()


def _unit(keys: Tensor) -> Tensor:
    return torch.nn.functional.normalize(keys, dim=-1)
