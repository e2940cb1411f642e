"""Formats as they are without pages: every token by itself, its own attention included.

Nothing here is offered by the library. It shows what groups of tokens and exact newest pages are
good for: K and V are coded and decoded on their way into dense pages.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from pagedkv.batch.packed import PackedCache, PackedModel
from pagedkv.cache.cache import PagedKVCache
from pagedkv.kernels.formats import E4M3_MAX, decode, encode

Code = Callable[[Tensor, int, str], Tensor]  # K or V [1, G, T, D], layer, which of them


def plain(format: str) -> Code:
    """Codes every token by itself before it is written, its own attention included.

    What a format costs without what pages add: neither groups of tokens, nor exact newest pages.
    """
    kind = {"fp8": "fp8", "int8": "int8", "int4": "int4_token"}[format]
    scales: dict[tuple[int, str], Tensor] = {}

    def code(x: Tensor, layer: int, half: str) -> Tensor:
        scale = None
        if kind == "fp8":  # static: what the first tokens need, and twice that
            need = x.float().abs().amax((0, 2, 3)) * 2 / E4M3_MAX
            scale = scales.setdefault((layer, half), need.log2().ceil().exp2()[:, None, None])
        return decode(*encode(x, kind, scale), kind, x.dtype)

    return code


class CodedCache(PackedCache):
    """Codes K and V on their way into the pages."""

    def __init__(self, model: Any, kv: PagedKVCache, code: Code) -> None:
        super().__init__(model, kv)
        self.code = code

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        k, v = self.code(key_states, layer_idx, "k"), self.code(value_states, layer_idx, "v")
        return super().update(k, v, layer_idx, *args, **kwargs)


class CodedModel(PackedModel):
    def __init__(self, model: Any, kv: PagedKVCache, code: Code) -> None:
        super().__init__(model, cache=kv)
        self._carrier = CodedCache(model, kv, code)
