"""`WeightStore`: groups tensors of a model that are read together, and reads them.

Tensors that are pieces of files are read straight into place; conversions and casts pass through
one scratch buffer. `tensor_map.py` knows the origin of each tensor.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from threading import Lock

import torch
from torch import Tensor
from transformers import PreTrainedModel

from pagedkv.errors import StreamError, UnsupportedModelError
from pagedkv.models.checkpoint import Checkpoint, TensorRange

from .arena import HostArena
from .mxfp4 import Packed
from .reader import FileReader, FileRun, Part
from .skeleton import DTYPES, Built
from .tensor_map import Conversion, Copy, Origins, RowPieces

ALIGNMENT = 64  # bytes: a cache line, which the widest vector instructions load at once

# Bytes of a tensor that are cast at once; they bound the scratch buffer. The number was not tuned.
CAST_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Place:
    """A tensor's place in a buffer that holds a whole unit."""

    name: str
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    def view(self, buffer: Tensor) -> Tensor:
        """Views the tensor in a buffer of bytes, `[n]`."""
        nbytes = prod(self.shape) * self.dtype.itemsize
        return buffer[self.offset : self.offset + nbytes].view(self.dtype).view(self.shape)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row, along the first dimension."""
        return prod(self.shape[1:]) * self.dtype.itemsize

    def row(self, number: int) -> int:
        """Returns where a row begins in the buffer."""
        return self.offset + number * self.row_bytes


@dataclass(frozen=True)
class Unit:
    """Tensors that are read together: a layer, a block of the head, or the glue.

    Attributes:
        name: the unit's name, for errors.
        places: where each tensor lies in the unit's buffer.
        nbytes: bytes of the buffer.
        file_bytes: bytes that are read to fill it.
        runs: ranges of files that are read straight into place.
        casts: pieces that have another dtype in their file.
        packed: experts that are unpacked.
        conversions: operations that make the other tensors.
    """

    name: str
    places: tuple[Place, ...]
    nbytes: int
    file_bytes: int
    runs: tuple[FileRun, ...]
    casts: tuple[tuple[Copy, Place], ...]
    packed: tuple[tuple[Packed, Place], ...]
    conversions: tuple[Conversion, ...]


class WeightStore:
    """The tensors of a model, read from the files of its checkpoint. `open` makes one.

    Attributes:
        origins: where each tensor comes from.
        reader: reads the files.
    """

    def __init__(self, checkpoint: Checkpoint, model: PreTrainedModel, origins: Origins) -> None:
        self.model, self.origins = model, origins
        self.reader = FileReader(checkpoint)
        self._scratch: HostArena | None = None
        self._lock = Lock()  # for the scratch, which several rings may need at once

    @classmethod
    def open(
        cls, checkpoint: Checkpoint, built: Built, key_mapping: dict[str, str] | None = None
    ) -> WeightStore:
        """Maps every tensor of the checkpoint to the model's, and opens the files.

        Raises:
            CheckpointMismatch: a parameter has no tensor, or one of another kind of dtype.
        """
        return cls(checkpoint, built.model, Origins(checkpoint, built, key_mapping))

    def unit(self, name: str, tensors: dict[str, Tensor]) -> Unit:
        """Makes the unit of these tensors of the model; `tensors` gives shapes and dtypes."""
        copies: list[tuple[Copy, Place]] = []
        packed: list[tuple[Packed, Place]] = []
        conversions: dict[int, Conversion] = {}
        places, end = [], 0
        for tensor_name, like in tensors.items():
            place = Place(tensor_name, end, tuple(like.shape), like.dtype)
            places.append(place)
            end += -(-like.nbytes // ALIGNMENT) * ALIGNMENT
            if tensor_name in self.origins.copies:
                copies += [(copy, place) for copy in self.origins.copies[tensor_name]]
            elif tensor_name in self.origins.packed:
                packed.append((self.origins.packed[tensor_name], place))
            else:
                conversion = self.origins.conversions[tensor_name]
                conversions[id(conversion)] = conversion
        return self._unit_of_pieces(name, places, end, copies, packed, list(conversions.values()))

    def rows(self, name: str, tensor_name: str, like: Tensor, first: int, count: int) -> Unit:
        """Makes the unit of some rows of a matrix.

        Raises:
            UnsupportedModelError: the matrix does not lie in a file as one piece.
        """
        copies = self.origins.copies.get(tensor_name, [])
        if len(copies) != 1:
            raise self._not_alone(tensor_name)
        (whole,) = copies
        width = prod(like.shape[1:])
        itemsize = DTYPES[whole.source.dtype].itemsize
        copy = Copy(whole.source, whole.offset + first * width * itemsize, count * width, 0)
        place = Place(tensor_name, 0, (count, *like.shape[1:]), like.dtype)
        nbytes = count * width * like.dtype.itemsize
        return self._unit_of_pieces(name, [place], nbytes, [(copy, place)], [], [])

    def rows_of(self, name: str, width: int) -> RowPieces:
        """Returns where the rows of a matrix lie.

        Raises:
            UnsupportedModelError: a row lies in several pieces, or is made by an operation.
        """
        copies = self.origins.copies.get(name, [])
        kinds = {copy.source.dtype for copy in copies}
        if len(kinds) != 1 or any(copy.at % width or copy.count % width for copy in copies):
            raise self._not_alone(name)
        return RowPieces(tuple(copies), tuple(copy.at // width for copy in copies), width)

    @staticmethod
    def _not_alone(name: str) -> UnsupportedModelError:
        return UnsupportedModelError(
            f"{name}: its rows cannot be read alone, the checkpoint has it in other parts; "
            "it has to stay resident"
        )

    def _unit_of_pieces(
        self,
        name: str,
        places: list[Place],
        nbytes: int,
        copies: list[tuple[Copy, Place]],
        packed: list[tuple[Packed, Place]],
        conversions: list[Conversion],
    ) -> Unit:
        straight = [(c, p) for c, p in copies if DTYPES[c.source.dtype] == p.dtype]
        casts = [(c, p) for c, p in copies if DTYPES[c.source.dtype] != p.dtype]
        scratch = [min(c.nbytes, CAST_BYTES) for c, _ in casts]
        scratch += [sum(_padded(nbytes) for *_, nbytes in p.parts(0)) for p, _ in packed]
        scratch += [sum(_padded(s.nbytes) for _, s in c.sources) for c in conversions]
        if max(scratch, default=0) > (len(self._scratch.bytes) if self._scratch else 0):
            self._scratch = HostArena(max(scratch))
        file_bytes = sum(c.nbytes for c, _ in copies) + sum(p.nbytes for p, _ in packed)
        file_bytes += sum(s.nbytes for c in conversions for _, s in c.sources)
        runs = self.reader.runs(
            Part(c.source, c.offset, c.nbytes, p.offset + c.at * p.dtype.itemsize)
            for c, p in straight
        )
        return Unit(
            name,
            tuple(places),
            nbytes,
            file_bytes,
            runs,
            tuple(casts),
            tuple(packed),
            tuple(conversions),
        )

    def fill(self, unit: Unit, arena: HostArena, at: int = 0) -> None:
        """Reads a unit into host memory, with tensors in the form that the model needs.

        Raises:
            CheckpointError: a file is shorter than it was, or cannot be read.
        """
        memory = arena.bytes[at : at + unit.nbytes]
        for run in unit.runs:
            self.reader.read(unit.name, run, memory)
        if unit.casts or unit.packed or unit.conversions:
            buffer = arena.tensor[at : at + unit.nbytes]
            self.cast(unit.name, unit.casts, buffer)
            for packed, place in unit.packed:
                rows = {expert: expert for expert in range(place.shape[0])}
                self.unpack(unit.name, packed, place, rows, buffer)
            self._convert(unit, buffer)

    def cast(self, unit: str, casts: Sequence[tuple[Copy, Place]], buffer: Tensor) -> None:
        """Reads pieces of another dtype than the model's into their places in the buffer.

        Args:
            unit: name of the unit that they belong to, for errors.
        """
        with self._lock:
            for copy, place in casts:
                self._cast(unit, copy, place, buffer)

    def unpack(
        self, unit: str, packed: Packed, place: Place, rows: Mapping[int, int], buffer: Tensor
    ) -> None:
        """Reads experts of a packed parameter, and unpacks them into rows of its place.

        Args:
            unit: name of the unit that they belong to, for errors.
            rows: the row of each expert.
        """
        target = place.view(buffer)
        with self._lock:
            for expert, row in rows.items():
                raw = self._to_scratch(unit, packed.parts(expert))
                packed.unpack(raw, target[row])

    def _cast(self, unit: str, copy: Copy, place: Place, buffer: Tensor) -> None:
        dtype, target = DTYPES[copy.source.dtype], place.view(buffer).view(-1)
        most, size = CAST_BYTES // dtype.itemsize, dtype.itemsize
        for first in range(0, copy.count, most):
            count = min(most, copy.count - first)
            part = copy.source, copy.offset + first * size, count * size
            (values,) = self._to_scratch(unit, [part])
            at = copy.at + first
            target[at : at + count].copy_(values.view(dtype))

    def _convert(self, unit: Unit, buffer: Tensor) -> None:
        """Makes tensors by transformers' operations."""
        places = {place.name: place for place in unit.places}
        with self._lock:
            for conversion in unit.conversions:
                ranges = [(s, s.offset, s.nbytes) for _, s in conversion.sources]
                raw = self._to_scratch(unit.name, ranges)
                tensors = [
                    values.view(DTYPES[source.dtype]).view(source.shape)
                    for values, (_, source) in zip(raw, conversion.sources)
                ]
                for name, made in conversion.make(tensors, self.model).items():
                    if name in places:
                        places[name].view(buffer).copy_(made)

    def _to_scratch(
        self, unit: str, ranges: Sequence[tuple[TensorRange, int, int]]
    ) -> list[Tensor]:
        if self._scratch is None:
            raise StreamError("the streamer of this model was closed")
        views, at = [], 0
        for source, offset, nbytes in ranges:
            part = Part(source, offset, nbytes, at)
            self.reader.read(unit, self.reader.run_of(part), self._scratch.bytes)
            views.append(self._scratch.tensor[at : at + nbytes])
            at += _padded(nbytes)
        return views

    def read_rows(self, matrix: RowPieces, rows: Sequence[int], arena: HostArena) -> Tensor:
        """Reads rows of a matrix into the arena: `[len(rows), width]`, in the dtype of the file.

        Args:
            rows: row indices, ascending.
        """
        # One by one: with thousands of parts at once Python's garbage collector visits all objects.
        for part in matrix.parts(rows):
            self.reader.read("embedding", self.reader.run_of(part), arena.bytes)
        found = arena.tensor[: len(rows) * matrix.row_bytes].view(matrix.dtype)
        return found.view(len(rows), matrix.width)

    def elements(self, name: str, like: Tensor, places: range) -> Tensor:
        """Returns elements of a flat tensor, with the values that `fill` gives them.

        Only these are read from the file, unless an operation of transformers makes the tensor:
        then all of it is made.
        """
        if name in self.origins.conversions:
            conversion = self.origins.conversions[name]
            sources = [self._whole(source) for _, source in conversion.sources]
            made = conversion.make(sources, self.model)[name]
            return made.reshape(-1)[list(places)].to(like.dtype)
        found = torch.empty(len(places), dtype=like.dtype, device="cpu")
        if name in self.origins.packed:
            packed = self.origins.packed[name]
            for i, element in enumerate(places):
                byte, scale = (self._read(*where, 1)[0] for where in packed.places(element))
                found[i] = packed.element(element, byte, scale)
            return found
        for copy in self.origins.copies[name]:
            dtype, stop = DTYPES[copy.source.dtype], copy.at + copy.count
            inside = slice(bisect_left(places, copy.at), bisect_left(places, stop))
            if offsets := [copy.offset + (n - copy.at) * dtype.itemsize for n in places[inside]]:
                raw = self._read(copy.source, offsets, dtype.itemsize)
                found[inside] = torch.frombuffer(raw, dtype=dtype)
        return found

    def _whole(self, source: TensorRange) -> Tensor:
        raw = self._read(source, [source.offset], source.nbytes)
        return torch.frombuffer(raw, dtype=DTYPES[source.dtype]).view(source.shape)

    def _read(self, source: TensorRange, offsets: Sequence[int], nbytes: int) -> bytearray:
        """Reads `nbytes` bytes at each offset into new memory."""
        raw = bytearray(nbytes * len(offsets))
        parts = (Part(source, offset, nbytes, i * nbytes) for i, offset in enumerate(offsets))
        for run in self.reader.runs(parts):
            self.reader.read("elements", run, memoryview(raw))
        return raw

    def close(self) -> None:
        """Closes the files. Idempotent."""
        self.reader.close()
        self._scratch = None


def _padded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
