"""Pages in the dtype the model computes in.

K and V are one allocation each per layer group, logical `[L, N, G, P, D]` with the layer outermost
(`docs/decisions/0002-layer-outermost.md`); a V that is a part of K is a view of it. On a CPU the
heads of a slot are contiguous (NHD), so that a token is one contiguous row; on CUDA the slots of a
head are contiguous (HND), so that a tile is one run.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Collection
from dataclasses import replace
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from pagedkv.arrays import Ints
from pagedkv.config import CacheConfig
from pagedkv.errors import BudgetExceeded
from pagedkv.kernels import reference
from pagedkv.kernels.formats import is_view_of_k
from pagedkv.kernels.sending import sent
from pagedkv.kernels.torch import backend as torch_kernels

from .key_bounds import PageBounds
from .memory import PageMemory, available_memory, memory_errors

Parts = dict[str, Tensor]  # bytes of pages by name, `[L, n, G, ...]` each: axis 1 runs over pages

DTYPES = {name: getattr(torch, name) for name in ("float32", "float16", "bfloat16")}


class DenseStorage:
    """K and V of all pages, methods that move them, and scratch for the torch backend's gathering.

    Args:
        layers: the layers whose pages these are; default all. Groups keep their numbers.

    Raises:
        NotImplementedError: the backend has no kernels for the dtype or the head dim.
        BudgetExceeded: the pages do not fit; nothing was allocated.
    """

    def __init__(
        self,
        config: CacheConfig,
        device: torch.device,
        backend: str,
        layers: Collection[int] | None = None,
    ) -> None:
        self.device = device
        self._kernels = _page_kernels(backend)
        self.dtype = DTYPES[config.dtype]
        self.page_size = config.page_size
        _require_fit(config, device, layers)
        config = config.part(layers)
        self.groups = config.groups
        self.memory = PageMemory(config, device)
        with torch.inference_mode(False):  # pages must be usable outside of inference mode, too
            self._make_pages(config)
            self.bounds = PageBounds(config, self)
        self._scratch = torch.empty(2, 0, dtype=self.dtype, device=device)
        if backend == "triton":
            for group in config.groups:
                for layer in group.layers[:2]:  # the second tells of all behind it
                    self._kernels.check_pages(*self.layer(layer), self.dtype)

    def _make_pages(self, config: CacheConfig) -> None:
        self.k: list[Tensor] = []
        self.v: list[Tensor] = []
        # Views are kept: making one costs a small kernel's launch, and layers ask in every step.
        self._layers: dict[int, tuple[Any, Any]] = {}
        for group, members in enumerate(config.groups):
            shape, counts = config.shapes[group], (len(members.layers), config.num_pages(group))
            k = self._allocate(*counts, shape.num_kv_heads, shape.head_dim, group=group)
            if shape.v_is_k:
                v = k[..., : shape.v_head_dim]
            else:
                v = self._allocate(*counts, shape.num_kv_heads, shape.v_head_dim, group=group)
            self.k.append(k)
            self.v.append(v)
            self._layers.update({layer: (k[i], v[i]) for i, layer in enumerate(members.layers)})

    def _allocate(
        self,
        layers: int,
        pages: int,
        heads: int,
        width: int,
        dtype: torch.dtype | None = None,
        group: int | None = None,
    ) -> Tensor:
        """Allocates pages `[L, N, G, P, width]`, by default in the dtype of the model.

        Args:
            group: the group with which the pages grow; None for pages that exist from the start.
        """
        size, dtype = self.page_size, dtype or self.dtype
        if self.device.type == "cpu":
            shape = (layers, pages, size, heads, width)
            return self.memory.empty(group, shape, dtype).transpose(2, 3)
        return self.memory.empty(group, (layers, pages, heads, size, width), dtype)

    def _ids(self, pages: Ints) -> Tensor:
        return sent(pages, self.device)

    def on(self, device: torch.device) -> DenseStorage:
        """Returns the storage of the layers that are on a device."""
        return self

    @property
    def nbytes(self) -> int:
        """Bytes of all pages that exist."""
        return self.memory.nbytes

    def layer(self, layer: int) -> tuple[Any, Any]:
        """Returns views of a layer's K and V pages: `[N, G, P, D]`, or `kernels.formats.Pages`."""
        return self._layers[layer]

    def copy_pages(self, group: int, source: Ints, target: Ints) -> None:
        """Copies pages of one group in all its layers."""
        ids = self._ids(source), self._ids(target)
        for pages in self._parts(group, 0).values():
            self._kernels.copy_pages(pages, *ids)

    def copy_slots(self, group: int, source: Ints, target: Ints) -> None:
        """Copies slots of one group in all its layers, all at once; not for staging pages."""
        (page, at), (into, to) = (
            map(self._ids, divmod(x, self.page_size)) for x in (source, target)
        )
        for pages in self._parts(group, 0).values():
            pages[:, into, :, to] = pages[:, page, :, at]

    def code_pages(self, group: int, source: Ints, target: Ints) -> None:
        """Codes staging pages of one group; only formats that have them."""
        raise NotImplementedError("dense pages are not coded")

    def calibrates(self, layer: int) -> bool:
        """Whether some static scales of a layer may not be set yet."""
        return False

    def calibrate(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Sets static scales before K and V are written, if the format has them."""

    def read(self, layer: int, pages: Ints, tokens: int) -> tuple[Tensor, Tensor]:
        """Copies K and V of the first `tokens` slots of a row of pages: `[tokens, G, D]`."""
        ids = self._ids(pages)
        k, v = (reference.gather_pages(x, ids, 0, tokens) for x in self.layer(layer))
        return k, v

    # Parts are bytes that leave pages and come back. Code that carries them knows only names and
    # axis 1. The pages of one call have one kind: 1 for staging pages, else 0.

    def take_out(
        self, group: int, pages: Ints, kind: int = 0, device: torch.device | None = None
    ) -> Parts:
        """Copies all bytes of some pages, in every layer of their group.

        Args:
            pages: `[n]`, ids within the group.
            kind: the kind of the copies; coded pages can be decoded to kind 1.
            device: the device of the copies; default host memory.
        """
        ids, taken = self._ids(pages), {}
        for name, tensor in self._parts(group, kind).items():
            # Copied in the order of memory, so that each page of a layer is one run.
            runs = tensor if tensor.is_contiguous() else tensor.transpose(2, 3)
            part = runs.index_select(1, ids).to(device or "cpu")
            taken[name] = part if runs is tensor else part.transpose(2, 3)
        return taken

    def put_in(self, group: int, pages: Ints, parts: Parts, kind: int = 0) -> None:
        """Overwrites pages of the same kind with the parts that `take_out` returned."""
        ids = self._ids(pages)
        for name, tensor in self._parts(group, kind).items():
            tensor.index_copy_(1, ids, parts[name].to(self.device))
        if kind == 0:
            self.bounds.update(group, pages)

    def layout(
        self, group: int, kind: int, pages: int, page_size: int
    ) -> dict[str, tuple[torch.dtype, list[int]]]:
        """Returns dtype and shape of the parts of `pages` pages."""
        laid = {}
        for name, tensor in self._parts(group, kind).items():
            layers, _, heads, size, *rest = tensor.shape
            size = page_size if size == self.page_size else size
            laid[name] = tensor.dtype, [layers, pages, heads, size, *rest]
        return laid

    def blank(self, parts: Parts, first_slot: int) -> None:
        """Writes zeros into the last page's slots from `first_slot` on; not for coded pages."""
        for part in parts.values():
            part[:, -1, :, first_slot:] = 0

    def repage(self, parts: Parts, skip: int, tokens: int, page_size: int) -> Parts:
        """Copies tokens into pages of another size, for formats that code tokens one by one.

        Args:
            skip: how many slots to leave out in front.
            tokens: how many slots to copy; slots behind them become zeros.
        """
        laid = {}
        for name, part in parts.items():
            layers, _, heads, _, *rest = part.shape
            flat = part.transpose(1, 2).reshape(layers, heads, -1, *rest)
            pages = -(-tokens // page_size)
            new = part.new_zeros(layers, heads, pages * page_size, *rest)
            new[:, :, :tokens] = flat[:, :, skip : skip + tokens]
            laid[name] = new.view(layers, heads, pages, page_size, *rest).transpose(1, 2)
        return laid

    def statics(self, group: int) -> Parts:
        """Returns the static scales of a group, `[L, G]` each; all its bytes depend on them."""
        return {}

    def adopt(self, group: int, parts: Parts, statics: Parts) -> tuple[Parts, Parts]:
        """Converts parts that depend on another storage's statics to parts and statics of this."""
        return parts, {}

    def set_statics(self, group: int, statics: Parts) -> None:
        """Sets the static scales of a group."""

    def _parts(self, group: int, kind: int) -> dict[str, Tensor]:
        k, v = self.k[group], self.v[group]
        return {"k": k} if is_view_of_k(k, v) else {"k": k, "v": v}

    def poison(self, group: int, pages: Tensor, first_slot: int = 0) -> None:
        """Writes NaN into pages from a slot on, so that a stray read shows."""
        for tensor in self._parts(group, 0).values():
            tensor[:, pages, :, first_slot:] = math.nan

    def is_poisoned(self, group: int, page: int, first_slot: int) -> bool:
        """Whether a page still has the NaN that `poison` wrote, from a slot on."""
        pools = self._parts(group, 0).values()
        return all(bool(x[:, page, :, first_slot:].isnan().all()) for x in pools)

    def scratch(self, elements: int) -> Tensor:
        """Returns a reused buffer `[2, elements or more]`: a new one each time would be slow."""
        if self._scratch.shape[1] < elements:
            with torch.inference_mode(False), memory_errors():
                self._scratch = torch.empty(2, elements, dtype=self.dtype, device=self.device)
        return self._scratch


def _require_fit(config: CacheConfig, device: torch.device, layers: Collection[int] | None) -> None:
    """Raises BudgetExceeded if a fixed pool's pages, or a growing pool's first ones, don't fit."""
    name = "max_tokens" if config.growth_step is None else "growth_step"
    needed, available = config.part(layers).nbytes_at_once, available_memory(device)
    if needed > available:
        tokens = _most_tokens(config, name, available, layers)
        advice = f"{name}={tokens} would fit" if tokens else "not one token would fit"
        raise BudgetExceeded(
            f"{name}: {getattr(config, name)} tokens need {needed:,} bytes of pages on {device}, "
            f"{available:,} are available; {advice}",
            needed=needed,
            available=available,
        )


def _most_tokens(
    config: CacheConfig, name: str, available: int, layers: Collection[int] | None
) -> int:
    """Searches the largest number of tokens that fits: with windows no simple formula gives it."""

    def exceeds(tokens: Any) -> bool:
        return replace(config, **{name: tokens}).part(layers).nbytes_at_once > available

    return bisect_left(range(1, getattr(config, name)), True, key=exceeds)


def _page_kernels(backend: str) -> Any:
    """Returns the backend whose functions copy and code whole pages."""
    if backend == "torch":
        return torch_kernels
    return import_module(f"pagedkv.kernels.{backend}.backend")
