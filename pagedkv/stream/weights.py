"""`WeightStore`: which bytes of a checkpoint become which tensor of a model, and reading them.

Keys go through transformers' own conversion. Tensors that are only renamed, stacked or joined are
read straight into place; other conversions, and casts, pass through one scratch buffer.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from itertools import chain
from math import prod
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    Concatenate,
    MergeModulelist,
    WeightConverter,
    dot_natural_key,
    rename_source_key,
)

from pagedkv.errors import UnsupportedModelError
from pagedkv.planner.checkpoint import Checkpoint, TensorRange

from .arena import HostArena
from .reader import FileReader, Part, Run
from .skeleton import DTYPES, require_covered, without_storage

ALIGNMENT = 64  # bytes: a cache line, which the widest vector instructions load at once

# Bytes of a tensor that are cast at once: a bound on the scratch buffer of casts. Not tuned.
CAST_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Copy:
    """A tensor of the checkpoint, or some of its rows, that is a piece of a tensor of the model.

    Attributes:
        source: the tensor of the checkpoint.
        offset: the offset of the first byte in the file.
        count: how many elements.
        at: the element of the model's tensor where the piece begins.
    """

    source: TensorRange
    offset: int
    count: int
    at: int

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.count * DTYPES[self.source.dtype].itemsize


@dataclass(frozen=True, slots=True)
class Conversion:
    """Tensors of the checkpoint that transformers' operations turn into tensors of the model."""

    converter: WeightConverter
    first: str  # the name that the converter completes its targets from
    sources: tuple[tuple[str, TensorRange], ...]  # with the pattern each one matched
    targets: tuple[str, ...]
    dtype: torch.dtype | None  # the dtype that sources are cast to before the operations


@dataclass(frozen=True, slots=True)
class Place:
    """A tensor's place in a buffer that holds a whole unit."""

    name: str
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    def view(self, buffer: Tensor) -> Tensor:
        """The tensor in `[n]` bytes."""
        nbytes = prod(self.shape) * self.dtype.itemsize
        return buffer[self.offset : self.offset + nbytes].view(self.dtype).view(self.shape)


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
        conversions: operations that make the other tensors.
    """

    name: str
    places: tuple[Place, ...]
    nbytes: int
    file_bytes: int
    runs: tuple[Run, ...]
    casts: tuple[tuple[Copy, Place], ...]
    conversions: tuple[Conversion, ...]


class WeightStore:
    """The tensors of a model by name, and where their bytes lie. `open` makes one.

    Attributes:
        copies: the pieces of files that make up a tensor, by the tensor's name.
        conversions: the operation that makes a tensor, by the tensor's name.
        reader: reads the files.
    """

    def __init__(self, checkpoint: Checkpoint, model: PreTrainedModel) -> None:
        self.checkpoint, self.model = checkpoint, model
        self.copies: dict[str, list[Copy]] = {}
        self.conversions: dict[str, Conversion] = {}
        self.reader = FileReader(checkpoint)
        self._scratch: HostArena | None = None

    @classmethod
    def open(
        cls,
        checkpoint: Checkpoint,
        model: PreTrainedModel,
        dtypes: dict[str, torch.dtype],
        key_mapping: dict[str, str] | None = None,
    ) -> WeightStore:
        """Maps every tensor of the checkpoint to the model's.

        Args:
            dtypes: dtypes that the model's tensors have without the checkpoint.

        Raises:
            CheckpointMismatch: a parameter has no tensor, or one of another kind of dtype.
        """
        store = cls(checkpoint, model)
        state = model.state_dict()
        quantizer = getattr(model, "hf_quantizer", None)
        for mapping in _grouped(checkpoint, model, state, key_mapping, quantizer):
            store._add(mapping, state, quantizer is not None)
        tied = model.all_tied_weights_keys
        # Tensors that transformers allows to be missing are real by now: `build` computed them.
        missing = [
            name
            for name, tensor in state.items()
            if tensor.is_meta and name not in store and tied.get(name) not in store
        ]
        try:
            require_covered(checkpoint, model, missing, [], store._wrong_kinds(dtypes))
        except BaseException:
            store.close()
            raise
        return store

    def __contains__(self, name: object) -> bool:
        return name in self.copies or name in self.conversions

    def _add(self, mapping: _Mapping, state: dict[str, Tensor], packed: bool) -> None:
        first, converter, sources = mapping.target, mapping.converter, mapping.sources
        if converter is None:
            ((_, source),) = sources
            self.copies[first] = [Copy(source, source.offset, prod(source.shape), 0)]
            return
        dtype = None if packed or first not in state else state[first].dtype
        conversion = Conversion(converter, first, tuple(sources), (), dtype)
        made = convert(conversion, [without_storage(s) for _, s in sources], self.model)
        pieces = _stacked(converter, sources, made.get(first))
        if pieces is not None:
            self.copies[first] = pieces
            return
        known = tuple(name for name in made if name in state)
        conversion = Conversion(converter, first, tuple(sources), known, dtype)
        self.conversions |= dict.fromkeys(known, conversion)

    def _wrong_kinds(self, dtypes: dict[str, torch.dtype]) -> list[str]:
        """Tensors whose numbers a cast would change: integers for floats, packed for plain."""
        return [
            f"{copy.source.name} is {copy.source.dtype}, expected {dtypes[name]} for {name}"
            for name, copies in self.copies.items()
            for copy in copies
            if name in dtypes and _kind(DTYPES[copy.source.dtype]) != _kind(dtypes[name])
        ]

    def unit(self, name: str, tensors: dict[str, Tensor]) -> Unit:
        """The unit that holds these tensors of the model, given by name with shape and dtype."""
        copies: list[tuple[Copy, Place]] = []
        conversions: dict[int, Conversion] = {}
        places, end = [], 0
        for tensor_name, like in tensors.items():
            place = Place(tensor_name, end, tuple(like.shape), like.dtype)
            places.append(place)
            end += -(-like.nbytes // ALIGNMENT) * ALIGNMENT
            if tensor_name in self.copies:
                copies += [(copy, place) for copy in self.copies[tensor_name]]
            else:
                conversion = self.conversions[tensor_name]
                conversions[id(conversion)] = conversion
        return self._unit(name, places, end, copies, list(conversions.values()))

    def rows(self, name: str, tensor_name: str, like: Tensor, first: int, count: int) -> Unit:
        """The unit that holds some rows of a matrix.

        Raises:
            UnsupportedModelError: the matrix does not lie in a file as one piece.
        """
        whole = self.matrix(tensor_name)
        width = prod(like.shape[1:])
        itemsize = DTYPES[whole.source.dtype].itemsize
        copy = Copy(whole.source, whole.offset + first * width * itemsize, count * width, 0)
        place = Place(tensor_name, 0, (count, *like.shape[1:]), like.dtype)
        nbytes = count * width * like.dtype.itemsize
        return self._unit(name, [place], nbytes, [(copy, place)], [])

    def matrix(self, name: str) -> Copy:
        """The piece of a file that holds a whole tensor.

        Raises:
            UnsupportedModelError: the tensor is made of several pieces, or by an operation.
        """
        copies = self.copies.get(name, [])
        if len(copies) != 1:
            raise UnsupportedModelError(
                f"{name}: its rows cannot be read alone, the checkpoint has it in other parts; "
                "it has to stay resident"
            )
        return copies[0]

    def _unit(
        self,
        name: str,
        places: list[Place],
        nbytes: int,
        copies: list[tuple[Copy, Place]],
        conversions: list[Conversion],
    ) -> Unit:
        straight = [(c, p) for c, p in copies if DTYPES[c.source.dtype] == p.dtype]
        casts = [(c, p) for c, p in copies if DTYPES[c.source.dtype] != p.dtype]
        scratch = [min(c.nbytes, CAST_BYTES) for c, _ in casts]
        scratch += [sum(_padded(s.nbytes) for _, s in c.sources) for c in conversions]
        if max(scratch, default=0) > (len(self._scratch.bytes) if self._scratch else 0):
            self._scratch = HostArena(max(scratch))
        file_bytes = sum(c.nbytes for c, _ in copies)
        file_bytes += sum(s.nbytes for c in conversions for _, s in c.sources)
        runs = self.reader.runs(
            Part(c.source, c.offset, c.nbytes, p.offset + c.at * p.dtype.itemsize)
            for c, p in straight
        )
        return Unit(name, tuple(places), nbytes, file_bytes, runs, tuple(casts), tuple(conversions))

    def fill(self, unit: Unit, arena: HostArena, at: int = 0) -> None:
        """Reads a unit into host memory, tensors as the model wants them.

        Raises:
            CheckpointError: a file is shorter than it was, or cannot be read.
        """
        memory = arena.bytes[at : at + unit.nbytes]
        for run in unit.runs:
            self.reader.read(unit.name, run, memory)
        if unit.casts or unit.conversions:
            self._transform(unit, arena.tensor[at : at + unit.nbytes])

    def _transform(self, unit: Unit, buffer: Tensor) -> None:
        """Casts and converts tensors whose form in the file differs from the model's."""
        for copy, place in unit.casts:
            dtype, target = DTYPES[copy.source.dtype], place.view(buffer).view(-1)
            most, size = CAST_BYTES // dtype.itemsize, dtype.itemsize
            for first in range(0, copy.count, most):
                count = min(most, copy.count - first)
                part = copy.source, copy.offset + first * size, count * size
                (values,) = self._to_scratch(unit.name, [part])
                at = copy.at + first
                target[at : at + count].copy_(values.view(dtype))
        places = {place.name: place for place in unit.places}
        for conversion in unit.conversions:
            ranges = [(s, s.offset, s.nbytes) for _, s in conversion.sources]
            raw = self._to_scratch(unit.name, ranges)
            tensors = [
                values.view(DTYPES[source.dtype]).view(source.shape)
                for values, (_, source) in zip(raw, conversion.sources)
            ]
            for name, made in convert(conversion, tensors, self.model).items():
                if name in places:
                    places[name].view(buffer).copy_(made)

    def _to_scratch(
        self, unit: str, ranges: Sequence[tuple[TensorRange, int, int]]
    ) -> list[Tensor]:
        assert self._scratch is not None
        views, at = [], 0
        for source, offset, nbytes in ranges:
            for run in self.reader.runs([Part(source, offset, nbytes, at)]):
                self.reader.read(unit, run, self._scratch.bytes)
            views.append(self._scratch.tensor[at : at + nbytes])
            at += _padded(nbytes)
        return views

    def read_rows(self, copy: Copy, rows: Sequence[int], width: int, arena: HostArena) -> Tensor:
        """Reads rows of a matrix into the arena: `[len(rows), width]`, in the dtype of the file.

        Args:
            rows: row indices, ascending.
        """
        dtype = DTYPES[copy.source.dtype]
        nbytes = width * dtype.itemsize
        parts = (
            Part(copy.source, copy.offset + row * nbytes, nbytes, i * nbytes)
            for i, row in enumerate(rows)
        )
        for run in self.reader.runs(parts):
            self.reader.read("embedding", run, arena.bytes)
        return arena.tensor[: len(rows) * nbytes].view(dtype).view(len(rows), width)

    def elements(self, name: str, like: Tensor, places: range) -> Tensor:
        """Some elements of a flat tensor, with the values that `fill` gives them.

        Only these are read from the file, unless an operation of transformers makes the tensor:
        then all of it is made.
        """
        if name in self.conversions:
            conversion = self.conversions[name]
            sources = [self._whole(source) for _, source in conversion.sources]
            made = convert(conversion, sources, self.model)[name]
            return made.reshape(-1)[list(places)].to(like.dtype)
        found = torch.empty(len(places), dtype=like.dtype)
        for copy in self.copies[name]:
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


@dataclass
class _Mapping:
    """A tensor of the model, and the tensors that transformers' loader would collect for it."""

    target: str
    converter: WeightConverter | None
    sources: list[tuple[str, TensorRange]]


def _grouped(
    checkpoint: Checkpoint,
    model: PreTrainedModel,
    state: dict[str, Tensor],
    key_mapping: dict[str, str] | None,
    quantizer: Any,
) -> list[_Mapping]:
    """The checkpoint's tensors by their target, named and ordered as transformers' loader does."""
    transforms = get_model_conversion_mapping(model, key_mapping, quantizer)
    converters = [t for t in transforms if isinstance(t, WeightConverter)]
    renamings = [t for t in transforms if not isinstance(t, WeightConverter)]
    by_pattern = {pattern: c for c in converters for pattern in c.source_patterns}
    prefix = model.base_model_prefix
    groups: dict[str, _Mapping] = {}
    for key in sorted(checkpoint.tensors, key=dot_natural_key):
        target, pattern = rename_source_key(key, renamings, converters, prefix, state)
        if target not in state and key in state:
            target, pattern = rename_source_key(key, [], [], prefix, state)
        if target not in state:
            continue  # one that the model ignores by name; the skeleton refused others
        converter = by_pattern[pattern] if pattern is not None else None
        group = groups.setdefault(target, _Mapping(target, converter, []))
        group.sources.append((pattern or key, checkpoint.tensors[key]))
    return list(groups.values())


def _stacked(
    converter: WeightConverter, sources: Sequence[tuple[str, TensorRange]], made: Tensor | None
) -> list[Copy] | None:
    """Pieces, for operations that only lay their sources behind one another; None for others.

    Experts are stacked along the first dimension; matrices of one expert joined along the second.
    """
    kinds = [type(op) for op in converter.operations]
    merged = kinds[:1] == [MergeModulelist]
    joined = kinds[1:] if merged else kinds
    dims = [getattr(op, "dim", None) for op in converter.operations]
    expected = [0, 1] if merged else [0]
    if made is None or joined not in ([], [Concatenate]) or dims != expected[: len(dims)]:
        return None
    by_pattern: dict[str, list[TensorRange]] = {p: [] for p in converter.source_patterns}
    for pattern, source in sources:
        by_pattern[pattern].append(source)
    columns = list(by_pattern.values()) if merged else [[s] for s in chain(*by_pattern.values())]
    copies, at = [], 0
    for sources_of_one in zip(*columns):
        for source in sources_of_one:
            copies.append(Copy(source, source.offset, prod(source.shape), at))
            at += prod(source.shape)
    return copies if at == made.numel() else None


def convert(
    conversion: Conversion, tensors: Sequence[Tensor], model: PreTrainedModel
) -> dict[str, Tensor]:
    """The tensors that transformers' operations make of these sources, by name."""
    converter = deepcopy(conversion.converter)
    for (pattern, source), tensor in zip(conversion.sources, tensors):
        if conversion.dtype is not None and tensor.is_floating_point():
            tensor = tensor.to(conversion.dtype)
        converter.add_tensor(conversion.first, source.name, pattern, tensor)
    made = converter.convert(conversion.first, model=model, config=model.config)
    return {name: t[0] if isinstance(t, list) else t for name, t in made.items()}


def _kind(dtype: torch.dtype) -> str:
    """The kind of a dtype: a cast within a kind changes numbers by rounding only."""
    if not dtype.is_floating_point:
        return str(dtype)
    return "float" if dtype.itemsize > 1 else "float8"


def _padded(nbytes: int) -> int:
    return -(-nbytes // ALIGNMENT) * ALIGNMENT
