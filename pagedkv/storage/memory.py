"""Allocates the tensors of pages: `[L, N, ...]`, with the pages on the second axis.

A fixed pool takes them from torch. A growing pool reserves addresses for its largest size and gets
memory for the first pages of each layer, in all tensors of a group together. Nothing ever moves:
addresses that kernels and captured graphs hold stay valid, and no byte is copied.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from pagedkv.arrays import Ints
from pagedkv.config import CacheConfig
from pagedkv.errors import BudgetExceeded, HostMemoryError

from .placement import Placement

# For tiny models memory would hold very many pages, and each page also costs index arrays.
MOST_TOKENS = 1 << 20


@contextmanager
def memory_errors() -> Iterator[None]:
    """Turns the RuntimeError of torch's allocators, known by its text, into a MemoryError."""
    try:
        yield
    except RuntimeError as error:
        said = str(error)
        if not any(words in said for words in ("DefaultCPUAllocator", "out of memory")):
            raise
        raise MemoryError(said.strip().splitlines()[0]) from error


@contextmanager
def budgeted(config: CacheConfig, device: torch.device) -> Iterator[None]:
    """Turns a lack of memory, for pages or things beside them, into BudgetExceeded."""
    try:
        with memory_errors():
            yield
    except BudgetExceeded:
        raise
    except MemoryError as error:
        needed, available = config.nbytes_at_once, available_memory(device)
        raise BudgetExceeded(
            f"max_tokens: {config.max_tokens} tokens need {needed:,} bytes of pages on {device}, "
            f"and tables; {available:,} are available, but this process does not get them: {error}",
            needed=needed,
            available=available,
        ) from error


def require_room_for_books(config: CacheConfig) -> None:
    """Refuses page tables larger than free memory; all of their bytes are written at once.

    Raises:
        BudgetExceeded: there are too many tokens, or sequences may become too long.
    """
    needed, available = config.nbytes_of_books, available_memory(torch.device("cpu"))
    if needed > available:
        raise BudgetExceeded(
            f"max_tokens: tables for {config.max_tokens} tokens, {config.max_sequences} sequences "
            f"of at most {config.max_sequence_length} (max_sequences, max_sequence_length) take "
            f"{needed:,} bytes of host memory; {available:,} are available",
            needed=needed,
            available=available,
        )


class Region(Protocol):
    """One tensor whose first pages exist.

    Attributes:
        tensor: `[L, N, ...]`, each layer contiguous. Pages from `pages` on must not be touched.
        pages: pages of each layer that exist.
    """

    tensor: Tensor
    pages: int

    def __init__(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, pages: int
    ) -> None: ...

    def cost(self, pages: int) -> int:
        """Returns the bytes that `pages` would take and that are not taken yet."""

    def resize(self, pages: int) -> None:
        """Makes `pages` pages exist; raises MemoryError and changes nothing if they do not fit."""

    def release(self, first: int, stop: int) -> None:
        """Gives back the memory of free pages, which lose their bytes and stay writable."""


class PageMemory:
    """Tensors of all layer groups; the tensors of a group have the same pages and grow together.

    Raises:
        NotImplementedError: pages cannot grow on this device.
    """

    def __init__(self, config: CacheConfig, device: torch.device) -> None:
        self.device = device
        self.pages = [config.pages_at_once(group) for group in range(len(config.groups))]
        self._kind = None if config.growth_step is None else _kind(device)
        self._fixed = 0  # bytes
        self._regions: list[list[Region]] = [[] for _ in self.pages]

    def empty(self, group: int | None, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Makes a tensor for one part of a group's pages, `[L, N, ...]`.

        Args:
            group: the group; None for a tensor of any shape that exists as a whole from the start.

        Raises:
            BudgetExceeded: no room for its addresses, or for the first pages.
        """
        with torch.inference_mode(False):  # pages must be usable outside of inference mode, too
            if self._kind is None or group is None or not math.prod(shape):
                # Not zeroed: untouched pages of a large CPU allocation cost no memory.
                tensor = torch.empty(shape, dtype=dtype, device=self.device)
                self._fixed += tensor.nbytes
                return tensor
            try:
                region = self._kind(shape, dtype, self.device, self.pages[group])
            except MemoryError as error:
                needed, available = math.prod(shape) * dtype.itemsize, available_memory(self.device)
                message = f"max_tokens: pages on {self.device} cannot begin to grow: {error}"
                raise BudgetExceeded(message, needed=needed, available=available) from error
        self._regions[group].append(region)
        return region.tensor

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors; growing tensors count only the pages that exist."""
        regions = [region for group in self._regions for region in group]
        return self._fixed + sum(r.tensor[:, : r.pages].nbytes for r in regions)

    def require_resizable(self) -> None:
        """Raises RuntimeError while a CUDA graph is being captured."""
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "growth_step: pages cannot be added or removed while a CUDA graph is captured; "
                "reserve them before, with add(max_tokens=...)"
            )

    def resize(self, pages: Sequence[int]) -> None:
        """Makes `pages` pages of each group exist, in all tensors or in none.

        Raises:
            BudgetExceeded: there is too little memory.
            RuntimeError: a CUDA graph is being captured.
        """
        self.require_resizable()
        wanted = [(r, n) for regions, n in zip(self._regions, pages) for r in regions]
        needed = sum(region.cost(n) for region, n in wanted)
        available = self._available(needed) if needed else 0
        if needed > available:
            raise self._exceeded(needed, available)
        before = [region.pages for region, _ in wanted]
        try:
            for region, n in wanted:
                region.resize(n)
        except BaseException as error:
            for (region, _), n in zip(wanted, before):
                region.resize(n)
            if isinstance(error, MemoryError):
                raise self._exceeded(needed, available) from error
            raise
        self.pages = list(pages)

    def release(self, group: int, pages: Ints) -> None:
        """Gives back the memory of free pages; does so only on a CPU.

        Args:
            pages: `[n]` ids within the group, ascending.
        """
        for ids, _ in runs_of(pages):
            for region in self._regions[group]:
                region.release(ids.start, ids.stop)

    def _available(self, needed: int) -> int:
        available = available_memory(self.device)
        if needed > available and self.device.type == "cuda":
            torch.cuda.empty_cache()  # the driver counts torch's spare memory as taken
            available = available_memory(self.device)
        return available

    def _exceeded(self, needed: int, available: int) -> BudgetExceeded:
        return BudgetExceeded(
            f"growth_step: the next pages need {needed:,} bytes on {self.device}, {available:,} "
            "are available",
            needed=needed,
            available=available,
        )


def _kind(device: torch.device) -> type[Region]:
    """Returns the class that makes growing tensors on a device."""
    if device.type == "cpu" and os.name == "posix":
        from .host_region import LazyRegion

        return LazyRegion
    reason: str | None = "there is no way on such devices"
    if device.type == "cuda":
        from .cuda_region import VirtualRegion, why_not

        reason = why_not(device)
        if reason is None:
            return VirtualRegion
    raise NotImplementedError(
        f"growth_step: pages on {device} cannot grow: {reason}; without it the pool is of fixed "
        "size"
    )


def runs_of(pages: Ints) -> Iterator[tuple[slice, slice]]:
    """Yields runs of neighbouring pages: the slice of their ids, and their slice of `pages`."""
    begin = 0
    for end in (np.flatnonzero(np.diff(pages, append=-2) != 1) + 1).tolist():
        yield slice(int(pages[begin]), int(pages[begin]) + end - begin), slice(begin, end)
        begin = end


def available_memory(device: torch.device) -> int:
    """Returns how many bytes an allocation on this device may take."""
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return free - max(1 << 30, total // 10)
    if (info := Path("/proc/meminfo")).exists():
        for line in info.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def tokens_that_fit(
    config_of: Callable[[int], CacheConfig],
    where: torch.device | Placement,
    beside: Callable[[CacheConfig], CacheConfig] | None = None,
) -> int:
    """Returns a `max_tokens` that fits on each device, for a cache that was given none.

    On a CPU a cache gets a quarter of free memory, which is committed only as it is used; on a card
    all free memory but a tenth; at most 2**20 tokens. With recurrent states it gets half of that.

    Args:
        config_of: makes the config for a number of tokens. Its bytes are no multiple of the tokens:
            pages are whole, staging pages depend on sequences, and windows have an end.
        where: the device, or the placement of the layers.
        beside: makes the config of another cache that has to fit as well, on the device where the
            first cache's steps begin.
    """
    layers_on = where.layers_on.items() if isinstance(where, Placement) else [(where, None)]
    halves = 2 if config_of(1).states else 1
    rooms = [_room(device) // halves for device, _ in layers_on]
    least, most = 1, MOST_TOKENS
    while least < most:
        middle = (least + most + 1) // 2
        config = config_of(middle)
        needed = [config.part(layers).nbytes for _, layers in layers_on]
        if beside is not None:
            needed[0] += beside(config).nbytes
        fits = all(size <= room for size, room in zip(needed, rooms))
        least, most = (middle, most) if fits else (least, middle - 1)
    return least


def states_that_fit(config: CacheConfig, placement: Placement) -> int:
    """Returns a `max_states` for a cache that was given none; 0 without states.

    Each sequence gets two if there is room, its own and a checkpoint: with fewer, sequences take
    turns and prefixes are computed again.
    """
    if not config.states:
        return 0
    needed = dict.fromkeys(placement.states, 0)
    for device, layer in zip(placement.states, config.states):
        needed[device] += layer.nbytes
    fit = [_room(device) // 2 // size for device, size in needed.items()]
    return max(1, min(2 * config.max_sequences, *fit))


def _room(device: torch.device) -> int:
    """Returns bytes for a cache without a given size; processes of a launcher share host memory."""
    if device.type != "cpu":
        return available_memory(device)
    return available_memory(device) // (4 * int(os.environ.get("LOCAL_WORLD_SIZE", 1)))


@contextmanager
def host_memory(call: str) -> Iterator[None]:
    """Turns a lack of memory into HostMemoryError."""
    try:
        with memory_errors():
            yield
    except HostMemoryError:
        raise
    except MemoryError as error:
        raise HostMemoryError(f"{call}: no memory for the copies: {error}") from error
