"""`ExpertFiles`: knows where a checkpoint has the experts of a module, and reads some of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import prod
from time import perf_counter

from torch import Tensor

from pagedkv.errors import UnsupportedModelError
from pagedkv.stream.layers import TensorSite
from pagedkv.stream.mxfp4 import Packed
from pagedkv.stream.reader import Part
from pagedkv.stream.skeleton import DTYPES
from pagedkv.stream.stats import StreamStats
from pagedkv.stream.tensor_map import Copy
from pagedkv.stream.weights import Place, WeightStore


class ExpertFiles:
    """The experts of one module, in the files of its checkpoint.

    Args:
        name: the module's name, for errors.
        sites: the sites of its tensors, `[E, ...]` each.
        sources: names of these tensors in the store.

    Attributes:
        count: experts of the module.

    Raises:
        UnsupportedModelError: the checkpoint has a tensor in another form.
    """

    def __init__(
        self,
        name: str,
        sites: Sequence[TensorSite],
        sources: Sequence[str],
        store: WeightStore,
        stats: StreamStats,
    ) -> None:
        self.name, self.sites, self.count = name, sites, sites[0].tensor.shape[0]
        self._store, self._stats = store, stats
        # For each expert, pieces of files with the number of their tensor: pieces in the model's
        # dtype begin at a byte of the row, pieces to cast begin at an element of it.
        self._pieces: list[list[tuple[int, Part]]] = [[] for _ in range(self.count)]
        self._casts: list[list[tuple[int, Copy]]] = [[] for _ in range(self.count)]
        self._packed: list[tuple[int, Packed]] = []
        for number, source in enumerate(sources):
            self._add(number, source)

    def _add(self, number: int, source: str) -> None:
        """Notes where in the files each expert's part of a tensor is."""
        origins, site = self._store.origins, self.sites[number]
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

    def nbytes(self, expert: int) -> int:
        """Returns the bytes of an expert in the files."""
        return (
            sum(part.nbytes for _, part in self._pieces[expert])
            + sum(copy.nbytes for _, copy in self._casts[expert])
            + sum(packed.nbytes // self.count for _, packed in self._packed)
        )

    def places(self, rows: int, alignment: int) -> tuple[list[Place], int]:
        """Lays out the tensors with `rows` rows each; returns their places, and the end."""
        places, end = [], 0
        for site in self.sites:
            like = site.tensor
            place = Place(site.name, end, (rows, *like.shape[1:]), like.dtype)
            places.append(place)
            end += -(-rows * place.row_bytes // alignment) * alignment
        return places, end

    def read(
        self, rows: Mapping[int, int], places: Sequence[Place], memory: memoryview, whole: Tensor
    ) -> None:
        """Reads experts; announces all of them to the system before it reads the first.

        Args:
            rows: for each expert, the row into which it is read.
            memory: bytes that have the tensors in their places.
            whole: the same memory as a tensor.

        Raises:
            CheckpointError: a file is shorter than it was, or cannot be read.
        """
        stats, reader, started = self._stats, self._store.reader, perf_counter()
        runs = reader.runs(
            replace(part, at=places[n].row(row) + part.at)
            for expert, row in rows.items()
            for n, part in self._pieces[expert]
        )
        casts = [
            (replace(copy, at=prod(places[n].shape[1:]) * row + copy.at), places[n])
            for expert, row in rows.items()
            for n, copy in self._casts[expert]
        ]
        parts = (part for e in rows for _, packed in self._packed for part in packed.parts(e))
        cold = reader.cold_bytes
        reader.announce([*runs, *reader.runs(Part(*part, 0) for part in parts)])
        for run in runs:
            reader.read(self.name, run, memory)
        self._store.cast(self.name, casts, whole)
        for n, packed in self._packed:
            self._store.unpack(self.name, packed, places[n], rows, whole)
        read = sum(map(self.nbytes, rows))
        stats.expert_bytes += read
        stats.bytes_read += read
        stats.cold_bytes += reader.cold_bytes - cold
        seconds = perf_counter() - started
        stats.read_seconds += seconds
        stats.stall_seconds += seconds
