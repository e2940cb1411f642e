"""Experts that are read once they are routed to: addresses for all of a layer, memory for some.

A module of experts is called with its routing, so what a pass needs of it is known just before it
computes. Its tensors have one row an expert. All rows are mapped and none has memory; rows that are
routed to are read into their own places, and the memory of others is given back. Indices, shapes
and forwards stay transformers' own, so results have the same bits.

Of each layer a few experts stay, those used last. A pass that needs more of them than may stay
fills what room there is and evicts nothing that decoding uses. It computes in memory that layers
take turns with; where there is no room for that, it gives back what it read. A pass that lacks most
experts reads all, through a ring as layers do: in order, and ahead of computation.
"""

from __future__ import annotations

import mmap
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from math import prod
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from pagedkv.errors import UnsupportedModelError
from pagedkv.planner.experts import can_read_alone, require_slots

from .layers import TensorSite, forget_casts
from .mxfp4 import Packed
from .origins import Copy
from .reader import Part, Run
from .skeleton import DTYPES
from .stats import StreamStats
from .weights import Place, WeightStore
from .wide_memory import WideMemory

PAGE = mmap.PAGESIZE
NORESERVE = 0x4000  # of Linux, whose name not every Python knows
# Of a layer's experts, where nothing was measured: computation waits for reads of single ones, so
# where more are lacking all of them come sooner.
MOST_ALONE = 0.7
MARKS = ("has_gate", "has_bias", "is_transposed")  # by which transformers decorates their classes


def experts_in(layer: nn.Module) -> list[nn.Module]:
    """Modules of a layer that compute experts by an index of tokens, and by rows of tensors."""
    return [m for m in layer.modules() if all(hasattr(m, mark) for mark in MARKS)]


class Experts:
    """The experts of one module.

    Args:
        name: of the module, for errors.
        sites: of its tensors, `[E, ...]` each.
        sources: names of these tensors in the store.
        slots: experts that stay in memory between passes.
        wide: memory for passes that need more; None where there is no room for it.

    Raises:
        UnsupportedModelError: the checkpoint has a tensor in another form.
    """

    def __init__(
        self,
        name: str,
        sites: Sequence[TensorSite],
        sources: Sequence[str],
        slots: int,
        store: WeightStore,
        stats: StreamStats,
        wide: WideMemory | None = None,
    ) -> None:
        self.name, self.count = name, sites[0].tensor.shape[0]
        self._sites, self._slots, self._store, self._stats = sites, slots, store, stats
        self._wide = wide
        # Of each expert the pieces of files that it is read from, by tensor: those that are as the
        # model wants them with the byte of a row where they begin, others with the element.
        self._pieces: list[list[tuple[int, Part]]] = [[] for _ in range(self.count)]
        self._casts: list[list[tuple[int, Copy]]] = [[] for _ in range(self.count)]
        self._packed: list[tuple[int, Packed]] = []
        for number, source in enumerate(sources):
            self._add(number, source)
        self._places: list[Place] = []  # of the tensors, with a row an expert, in one buffer
        self._map: mmap.mmap | None = None
        self._memory: memoryview = memoryview(b"")
        self._whole: Tensor = torch.empty(0)
        self._views: list[Tensor] = []
        self._held: OrderedDict[int, int] = OrderedDict()  # their rows; the one used last is last
        self._bound: Sequence[Tensor] = ()
        self._make()

    def _make(self) -> None:
        """Makes addresses for all of them, and tensors over these."""
        end = self._place(self.count, PAGE)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", NORESERVE)
        try:
            self._map = mmap.mmap(-1, end, flags=flags)
        except OSError as error:
            raise OSError(
                error.errno,
                f"expert_slots: no {end:,} bytes of addresses for the {self.name}: "
                f"{error.strerror}; expert_slots=0 streams whole layers",
            ) from error
        with suppress(OSError):  # of a system without them
            self._map.madvise(mmap.MADV_NOHUGEPAGE)  # one would span experts that are not there
        self._memory = memoryview(self._map)
        self._whole = torch.frombuffer(self._map, dtype=torch.uint8)
        self._views = self._over(self._whole)
        if self._wide is not None:
            self._wide.reserve(end)

    def _over(self, memory: Tensor) -> list[Tensor]:
        """The tensors, over memory that has them in their places."""
        with torch.inference_mode(False):  # they may outlast the mode of a pass
            return [site.like(p.view(memory)) for site, p in zip(self._sites, self._places)]

    def _place(self, rows: int, alignment: int) -> int:
        """Places the tensors behind one another, with so many rows each; returns where they end."""
        end = 0
        for site in self._sites:
            like = site.tensor
            place = Place(site.name, end, (rows, *like.shape[1:]), like.dtype)
            self._places.append(place)
            end += -(-rows * place.row_bytes // alignment) * alignment
        return end

    def _add(self, number: int, source: str) -> None:
        """Notes where each expert's part of a tensor is read from."""
        origins, site = self._store.origins, self._sites[number]
        if not origins.has_rows(source):
            raise UnsupportedModelError(
                f"{site.name}: its experts cannot be read alone, the checkpoint has them in "
                "another form; expert_slots=0 streams whole layers"
            )
        count, dtype = prod(site.tensor.shape[1:]), site.tensor.dtype
        if source in origins.packed:
            self._packed.append((number, origins.packed[source]))
        for copy in origins.copies.get(source, ()):
            stored = DTYPES[copy.source.dtype]
            first, last = copy.at // count, (copy.at + copy.count - 1) // count
            for expert in range(first, last + 1):
                low = max(copy.at, expert * count)
                high = min(copy.at + copy.count, (expert + 1) * count)
                offset = copy.offset + (low - copy.at) * stored.itemsize
                within = low - expert * count
                if stored != dtype:
                    piece = Copy(copy.source, offset, high - low, within)
                    self._casts[expert].append((number, piece))
                    continue
                size = dtype.itemsize
                part = Part(copy.source, offset, (high - low) * size, within * size)
                self._pieces[expert].append((number, part))

    def touched(self, index: Tensor) -> list[int]:
        """The experts of an index, ascending. What lies beyond is the forward's to refuse."""
        return [e for e in index.unique().tolist() if 0 <= e < self.count]

    def fits(self, touched: list[int], most: float) -> bool:
        """Whether a call is to read experts alone.

        It lacks no larger share than `most`, beside those that will stay once they are read.
        """
        lacking = sum(expert not in self._held for expert in touched)
        return lacking - (self._slots - len(self._held)) <= most * self.count

    def key(self, index: Tensor) -> Any:
        """What has to be tried before it computes; None where results are exact by construction."""
        return None

    @contextmanager
    def bound(self, views: Sequence[Tensor]) -> Iterator[None]:
        """Has tensors in the module that hold what a call needs.

        Raises:
            StreamError: another tensor was put there.
        """
        for site in self._sites:
            site.require_empty()
        forget_casts()
        self._bound = views
        try:
            for site, view in zip(self._sites, views):
                if view.requires_grad != site.empty.requires_grad:  # frozen, or thawed, since
                    view.requires_grad_(site.empty.requires_grad)
                site.set(view)
            yield
        finally:
            self.take_back()

    def close(self) -> None:
        """Gives all memory back; nothing can be brought after. Idempotent."""
        self._held.clear()
        self._views, self._whole, self._memory = [], torch.empty(0), memoryview(b"")
        self._map = None

    def take_back(self) -> None:
        """Takes back tensors that are bound; one that other code put there stays."""
        views, self._bound = self._bound, ()
        for site, view in zip(self._sites, views):
            if site.where.get(site.key) is view:
                site.set(site.empty)

    @contextmanager
    def alone(self, touched: list[int]) -> Iterator[Callable[[Tensor], Tensor]]:
        """Has these experts in memory, and their tensors in the module; yields what renumbers them.

        Raises:
            CheckpointError: a file is shorter than it was, or cannot be read.
            StreamError: another tensor was put there.
        """
        while len(self._held) > self._slots:  # an interrupt left more
            self._drop(next(iter(self._held)))
        wide = len(touched) > self._slots
        self._stats.wide_passes += wide
        if wide and self._wide is not None:
            with self.bound(self._gather(touched, self._wide)):
                yield lambda index: index
            return
        if self._wide is not None:
            self._wide.give_back()
        missing = self._bring(touched)
        try:
            with self.bound(self._views):
                yield lambda index: index
        finally:
            while missing and len(self._held) > self._slots:
                self._drop(missing.pop())

    def _gather(self, touched: list[int], memory: WideMemory) -> list[Tensor]:
        """The tensors with these experts in other memory: some are copied, others read."""
        missing = [e for e in touched if e not in self._held]
        room = self._slots - len(self._held)
        try:
            arena = memory.writable()
            self._bring(missing[:room])
            self._stats.expert_hits += len(touched) - len(missing)
            self._read({e: e for e in missing[room:]}, arena.bytes, arena.tensor)
        except BaseException:
            memory.give_back()  # no forward is to see bytes of a read that failed
            raise
        for expert in touched:
            if expert in self._held:
                for place in self._places:
                    row = slice(place.row(expert), place.row(expert) + place.row_bytes)
                    arena.bytes[row] = self._memory[row]
        return self._over(arena.tensor)

    def _bring(self, touched: list[int]) -> list[int]:
        """Reads experts that are not in memory, and returns them."""
        missing = [e for e in touched if e not in self._held]
        wide = len(touched) > self._slots
        if not wide:  # room first, so that memory never exceeds the slots
            spare = [e for e in self._held if e not in touched]
            over = len(self._held) + len(missing) - self._slots
            for expert in spare[: max(0, over)]:
                self._drop(expert)
        rows = {expert: expert for expert in missing}
        self._stats.expert_hits += len(touched) - len(missing)
        try:
            self._read(rows, self._memory, self._whole)
        except BaseException:
            for expert in missing:
                self._give_back(expert)
            raise
        self._held |= rows
        for expert in () if wide else touched:
            self._held.move_to_end(expert)
        return missing

    def _read(self, rows: dict[int, int], memory: memoryview, whole: Tensor) -> None:
        """Reads experts into rows of the tensors' places.

        Args:
            memory: bytes that have the tensors in their places.
            whole: the same memory.
        """
        stats, reader, started = self._stats, self._store.reader, perf_counter()
        stats.expert_misses += len(rows)
        runs = reader.runs(
            replace(part, at=self._places[n].row(row) + part.at)
            for expert, row in rows.items()
            for n, part in self._pieces[expert]
        )
        casts = [
            (replace(copy, at=prod(self._places[n].shape[1:]) * row + copy.at), self._places[n])
            for expert, row in rows.items()
            for n, copy in self._casts[expert]
        ]
        cold = reader.cold_bytes
        reader.announce([*runs, *self._runs_to_unpack(rows)])
        for run in runs:
            reader.read(self.name, run, memory)
        self._store.cast(self.name, casts, whole)
        for n, packed in self._packed:
            self._store.unpack(self.name, packed, self._places[n], rows, whole)
        read = sum(part.nbytes for run in runs for part in run.parts)
        read += sum(copy.nbytes for copy, _ in casts)
        read += sum(packed.nbytes // self.count for _, packed in self._packed) * len(rows)
        stats.expert_bytes += read
        stats.bytes_read += read
        stats.cold_bytes += reader.cold_bytes - cold
        seconds = perf_counter() - started
        stats.read_seconds += seconds
        stats.stall_seconds += seconds

    def _runs_to_unpack(self, experts: Iterable[int]) -> tuple[Run, ...]:
        """Ranges of files that these experts are unpacked from."""
        parts = (p for e in experts for _, packed in self._packed for p in packed.parts(e))
        return self._store.reader.runs(Part(*where, 0) for where in parts)

    def _drop(self, expert: int) -> None:
        del self._held[expert]
        self._give_back(expert)

    def _give_back(self, expert: int) -> None:
        """Gives back its pages, but for those that it shares with experts that are there."""
        held = self._held
        if self._map is None:  # it was closed within the pass
            return
        for place in self._places:
            begin, width = place.offset, place.row_bytes
            low = (begin + expert * width) // PAGE * PAGE
            high = -(-(begin + (expert + 1) * width) // PAGE) * PAGE
            before = range((low - begin) // width, expert)
            behind = range(expert + 1, min(self.count, -(-(high - begin) // width)))
            low += PAGE * any(other in held for other in before)
            high -= PAGE * any(other in held for other in behind)
            if high > low:
                self._map.madvise(mmap.MADV_DONTNEED, low, high - low)


def size_read_alone(model: PreTrainedModel, layers: Iterable[nn.Module], store: WeightStore) -> int:
    """Bytes of the largest tensor of an expert; 0 if experts cannot be read alone."""
    names = {module: name for name, module in model.named_modules()}
    sizes = [
        tensor[0].nbytes * store.origins.has_rows(f"{names[module]}.{key}")
        for layer in layers
        for module in experts_in(layer)
        for key, tensor in module.named_parameters(recurse=False)
    ]
    return max(sizes) if sizes and all(sizes) else 0


def index_of_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The routing of a call: `experts(hidden, index, weights)`, `[T, k]` ids."""
    found = kwargs.get("top_k_index", args[1] if len(args) > 1 else None)
    if not isinstance(found, Tensor) or found.is_floating_point():
        raise UnsupportedModelError(
            f"experts: expected an index of tokens' experts as second argument, got "
            f"{type(found).__name__}; expert_slots=0 streams whole layers"
        )
    return found


def renumbered(
    args: tuple[Any, ...], kwargs: dict[str, Any], change: Callable[[Tensor], Tensor]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call of experts with another index."""
    if "top_k_index" in kwargs:
        return args, kwargs | {"top_k_index": change(kwargs["top_k_index"])}
    return (args[0], change(args[1]), *args[2:]), kwargs


def require_supported(
    slots: Any, modules: Sequence[nn.Module], model: PreTrainedModel, device: Any
) -> None:
    """Raises for slots that a model, or this system, cannot have.

    Raises:
        ValueError: no count, fewer than a token needs, or more than there are.
        UnsupportedModelError: the model has no such experts, or the system no such memory.
    """
    require_slots(slots, 0, slots)  # whether it is a count at all
    if not slots:
        return
    name = type(model).__name__
    if not modules:
        raise UnsupportedModelError(
            f"expert_slots: {name} has no experts that are called with their routing; "
            "expert_slots=0 streams whole layers"
        )
    if not can_read_alone(on_cpu=device.type == "cpu"):
        raise UnsupportedModelError(
            "expert_slots: on a CPU experts are read alone under Linux only; 0 streams whole layers"
        )
    count = min(next(m.parameters()).shape[0] for m in modules)
    config = model.config.get_text_config(decoder=True)
    least = [1]
    for key in ("num_experts_per_tok", "top_k"):
        value = getattr(config, key, None) or 0
        least += value if isinstance(value, (list, tuple)) else [value]  # a list: one a layer
    require_slots(slots, max(least), count)
