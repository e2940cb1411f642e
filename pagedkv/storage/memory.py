"""Where the tensors of pages come from: `[L, N, ...]`, the pages on the second axis.

A fixed pool takes them from torch. One that grows reserves addresses for its largest size and gets
memory for the first pages of each layer, in all tensors of a group together. Nothing ever moves:
addresses that kernels and captured graphs hold stay good, and no byte is copied.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from pagedkv.config import CacheConfig
from pagedkv.errors import BudgetExceeded, HostMemoryError

from .placement import Placement

# Index arrays are kept for every page, so "as much as memory holds" needs an end for tiny models.
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
    """Turns a want of memory, for pages or what goes with them, into BudgetExceeded."""
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
    """Refuses page tables that take more than there is; all of their bytes are written at once.

    Raises:
        BudgetExceeded: too many tokens, or sequences that may become too long.
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
        """Makes `pages` pages exist; MemoryError, with everything as before, if they do not fit."""

    def release(self, first: int, stop: int) -> None:
        """Gives back memory within free pages, which lose their bytes and stay writable."""


class PageMemory:
    """Tensors of all layer groups; those of a group have the same pages and grow together.

    Raises:
        NotImplementedError: pages are to grow where they cannot.
    """

    def __init__(self, config: CacheConfig, device: torch.device) -> None:
        self.device = device
        self.pages = [config.pages_at_once(group) for group in range(len(config.groups))]
        self._kind = None if config.growth_step is None else _kind(device)
        self._fixed = 0  # bytes
        self._regions: list[list[Region]] = [[] for _ in self.pages]

    def empty(self, group: int | None, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """A tensor for one part of a group's pages, `[L, N, ...]`.

        Args:
            group: None for what is there from the start and stays, of any shape.

        Raises:
            BudgetExceeded: no room for its addresses, or for the first pages.
        """
        with torch.inference_mode(False):  # what lasts must be usable outside of it, too
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
        """Bytes of all tensors, of those that grow as far as their pages exist."""
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
            BudgetExceeded: the memory that this takes is not there.
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

    def release(self, group: int, pages: Any) -> None:
        """Gives back memory within free pages where that is possible, on a CPU.

        Args:
            pages: `[n]` ids within the group, ascending.
        """
        ends = [i for i in range(1, len(pages)) if pages[i] != pages[i - 1] + 1]
        for start, stop in zip([0, *ends], [*ends, len(pages)]):
            if stop > start:
                for region in self._regions[group]:
                    region.release(int(pages[start]), int(pages[stop - 1]) + 1)

    def _available(self, needed: int) -> int:
        available = available_memory(self.device)
        if needed > available and self.device.type == "cuda":
            torch.cuda.empty_cache()  # what torch keeps for later, the driver counts as taken
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


def available_memory(device: torch.device) -> int:
    """Bytes that an allocation on this device may take."""
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

    On a CPU a quarter of what is free, committed only as it is used; on a card all that is free
    but a tenth; at most 2**20. Half of that where recurrent states need room as well.

    Args:
        config_of: the cache of so many tokens. Its bytes are no multiple of them: pages are whole,
            staging pages go by sequences, and windows have an end.
        where: the device, or where each layer lies.
        beside: another cache that has to fit as well; it follows from the first, and lies where
            its steps begin.
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

    Two for each sequence, its own and a checkpoint, as far as there is room: with fewer, sequences
    take turns and prefixes are computed again.
    """
    if not config.states:
        return 0
    needed = dict.fromkeys(placement.states, 0)
    for device, layer in zip(placement.states, config.states):
        needed[device] += layer.nbytes
    fit = [_room(device) // 2 // size for device, size in needed.items()]
    return max(1, min(2 * config.max_sequences, *fit))


def _room(device: torch.device) -> int:
    """Returns bytes for a cache of no given size; processes of one launcher share the host's."""
    if device.type != "cpu":
        return available_memory(device)
    return available_memory(device) // (4 * int(os.environ.get("LOCAL_WORLD_SIZE", 1)))


@contextmanager
def host_memory(call: str) -> Iterator[None]:
    """Turns a want of memory into HostMemoryError."""
    try:
        with memory_errors():
            yield
    except HostMemoryError:
        raise
    except MemoryError as error:
        raise HostMemoryError(f"{call}: no memory for the copies: {error}") from error
