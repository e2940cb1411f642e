"""Maps tensors of a checkpoint to tensors of a model, by transformers' own conversion.

Tensors that are only renamed, stacked or joined are pieces of files (`Copy`); operations make all
others (`Conversion`). Only headers are read here.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
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

from pagedkv.models.checkpoint import Checkpoint, TensorRange

from .coverage import require_covered
from .reader import Part
from .skeleton import DTYPES, Built, without_storage


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


@dataclass(frozen=True)
class RowPieces:
    """Pieces of files that have the rows of a matrix, one behind the other.

    Attributes:
        pieces: the pieces, each of whole rows.
        first: the first row of each piece.
        width: elements of a row.
    """

    pieces: tuple[Copy, ...]
    first: tuple[int, ...]
    width: int

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in the files."""
        return DTYPES[self.pieces[0].source.dtype]

    @property
    def row_bytes(self) -> int:
        """Bytes of a row in a file."""
        return self.width * self.dtype.itemsize

    def parts(self, rows: Sequence[int]) -> Iterator[Part]:
        """Yields the bytes of rows, ascending, as parts for a buffer that has these rows alone.

        Neighbours are one part.
        """
        nbytes, begin = self.row_bytes, 0
        for piece, first in zip(self.pieces, self.first):
            stop = bisect_left(rows, first + piece.count // self.width)
            while begin < stop:
                end = begin + 1
                while end < stop and rows[end] == rows[end - 1] + 1:
                    end += 1
                offset = piece.offset + (rows[begin] - first) * nbytes
                yield Part(piece.source, offset, (end - begin) * nbytes, begin * nbytes)
                begin = end


@dataclass(frozen=True, slots=True)
class Conversion:
    """Tensors of the checkpoint that transformers' operations turn into tensors of the model."""

    converter: WeightConverter
    first: str  # the name from which the converter completes its targets
    sources: tuple[tuple[str, TensorRange], ...]  # with the pattern that each one matched
    targets: tuple[str, ...]
    dtype: torch.dtype | None  # the dtype that sources are cast to before the operations

    def make(self, tensors: Sequence[Tensor], model: PreTrainedModel) -> dict[str, Tensor]:
        """Makes tensors from these sources by transformers' operations; returns them by name."""
        converter = deepcopy(self.converter)
        for (pattern, source), tensor in zip(self.sources, tensors):
            if self.dtype is not None and tensor.is_floating_point():
                tensor = tensor.to(self.dtype)
            converter.add_tensor(self.first, source.name, pattern, tensor)
        made = converter.convert(self.first, model=model, config=model.config)
        return {name: t[0] if isinstance(t, list) else t for name, t in made.items()}


class Origins:
    """Where each tensor of a model comes from, by its name.

    Attributes:
        copies: the pieces of files that make up a tensor.
        conversions: the operation that makes a tensor.
        packed: tensors of experts that are unpacked as they are read.
        tied: for a tensor that no file has, the tied one that comes from a file.
    """

    def __init__(
        self, checkpoint: Checkpoint, built: Built, key_mapping: dict[str, str] | None = None
    ) -> None:
        """Maps every tensor of the checkpoint to the model's; see `WeightStore.open`."""
        self.copies: dict[str, list[Copy]] = {}
        self.conversions: dict[str, Conversion] = {}
        model, dtypes, self.packed = built
        state = model.state_dict()
        quantizer = getattr(model, "hf_quantizer", None)
        for mapping in _grouped(checkpoint, model, state, key_mapping, quantizer):
            self._add(mapping, model, state, quantizer is not None)
        self.tied = self._tied(model.all_tied_weights_keys)
        # Tensors that transformers allows to be missing are real by now: `build` computed them.
        missing = [
            name
            for name, tensor in state.items()
            if tensor.is_meta and name not in self and name not in self.tied
        ]
        require_covered(checkpoint, model, missing, [], self._wrong_kinds(dtypes))

    def __contains__(self, name: object) -> bool:
        return name in self.copies or name in self.conversions or name in self.packed

    def _tied(self, pairs: dict[str, str]) -> dict[str, str]:
        """Returns where tied tensors come from: a file may have either of a pair."""
        found: dict[str, str] = {}
        for name, other in pairs.items():
            if name in self and other not in self:
                found[other] = name
        for name, other in pairs.items():
            if name not in self and (other in self or other in found):
                found[name] = found.get(other, other)
        return found

    def has_rows(self, name: str) -> bool:
        """Whether each row of a tensor can be read alone."""
        return name in self.copies or name in self.packed

    def _add(
        self, mapping: _Mapping, model: PreTrainedModel, state: dict[str, Tensor], packed: bool
    ) -> None:
        first, converter, sources = mapping.target, mapping.converter, mapping.sources
        if converter is None:
            ((_, source),) = sources
            self.copies[first] = [Copy(source, source.offset, prod(source.shape), 0)]
            return
        dtype = None if packed or first not in state else state[first].dtype
        conversion = Conversion(converter, first, tuple(sources), (), dtype)
        made = conversion.make([without_storage(s) for _, s in sources], model)
        pieces = _stacked(converter, sources, made.get(first))
        if pieces is not None:
            self.copies[first] = pieces
            return
        known = tuple(name for name in made if name in state)
        conversion = Conversion(converter, first, tuple(sources), known, dtype)
        self.conversions |= dict.fromkeys(known, conversion)

    def _wrong_kinds(self, dtypes: dict[str, torch.dtype]) -> list[str]:
        """Lists tensors that a cast would corrupt: integers for floats, or packed for plain."""
        return [
            f"{copy.source.name} is {copy.source.dtype}, expected {dtypes[name]} for {name}"
            for name, copies in self.copies.items()
            for copy in copies
            if name in dtypes and _kind(DTYPES[copy.source.dtype]) != _kind(dtypes[name])
        ]


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
    """Groups the checkpoint's tensors by target, as transformers' loader names and orders them."""
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
            continue  # the model ignores it by name; the skeleton has refused all others
        converter = by_pattern[pattern] if pattern is not None else None
        group = groups.setdefault(target, _Mapping(target, converter, []))
        group.sources.append((pattern or key, checkpoint.tensors[key]))
    return list(groups.values())


def _stacked(
    converter: WeightConverter, sources: Sequence[tuple[str, TensorRange]], made: Tensor | None
) -> list[Copy] | None:
    """Returns pieces if operations only lay their sources behind one another; else None.

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


def _kind(dtype: torch.dtype) -> str:
    """Returns the kind of a dtype: a cast within a kind changes numbers only by rounding."""
    if not dtype.is_floating_point:
        return str(dtype)
    return "float" if dtype.itemsize > 1 else "float8"
