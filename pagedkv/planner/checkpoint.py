"""Where the tensors of a safetensors checkpoint lie: names, files, byte ranges, from headers.

A header is believed only if it accounts for every byte of its file, as the format demands, so that
whoever reads a range gets that tensor's bytes or an error, never another tensor's.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NoReturn

from pagedkv.errors import CheckpointError

INDEX = "model.safetensors.index.json"
MOST_HEADER = 100_000_000  # bytes; the format's own limit
BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "I16": 16, "U16": 16, "I32": 32, "U32": 32, "I64": 64, "U64": 64,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "F16": 16, "BF16": 16, "F32": 32, "F64": 64, "C64": 64,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorRange:
    """One tensor's place.

    Attributes:
        offset: of its first byte, from the beginning of the file.
        nbytes: its length.
        dtype: as the format spells it (`BF16`).
    """

    name: str
    file: Path
    offset: int
    nbytes: int
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Checkpoint:
    """A folder with `config.json` and safetensors files; no file stays open.

    Attributes:
        tensors: by name, in the order of the files.
        config: what `config.json` says.
    """

    folder: Path
    tensors: dict[str, TensorRange]
    config: dict[str, Any]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @classmethod
    def open(cls, folder: str | Path) -> Checkpoint:
        """Reads the index, if there is one, and every header.

        Raises:
            CheckpointError: something is missing, contradicts itself or is no safetensors file.
        """
        folder = Path(folder)
        config = read_config(folder)
        names, places = _files(folder)
        tensors: dict[str, TensorRange] = {}
        for file in (folder / name for name in names):
            for tensor in read_header(file):
                chosen = places.get(tensor.name)
                if chosen not in (None, file.name):
                    continue  # the index says which of several files has it
                if tensor.name in tensors:
                    first = tensors[tensor.name].file.name
                    _fail(file, f"tensor {tensor.name} is in {first} as well, and no index decides")
                tensors[tensor.name] = tensor
        for name, file_name in places.items():
            if name not in tensors:
                _fail(
                    folder / file_name, f"{INDEX} says tensor {name} is here, its header does not"
                )
        return cls(folder, tensors, config)


def has_weights(folder: Path) -> bool:
    """Whether there is a safetensors file or an index of some."""
    return (folder / INDEX).exists() or any(folder.glob("*.safetensors"))


def read_config(folder: Path) -> dict[str, Any]:
    """The folder's `config.json`."""
    if folder.suffix == ".gguf":
        _refuse(folder, "GGUF")
    if not folder.is_dir():
        _fail(folder, "expected a folder with config.json, there is none")
    if not (folder / "config.json").exists() and any(folder.glob("*.gguf")):
        _refuse(folder, "GGUF")
    return _read_json(folder / "config.json")


def _files(folder: Path) -> tuple[list[str], dict[str, str]]:
    """The names of the files, and which of them has a tensor, as far as an index says so."""
    if (folder / INDEX).exists():
        places = _read_json(folder / INDEX).get("weight_map")
        if not isinstance(places, dict) or not places:
            _fail(folder / INDEX, f"weight_map: expected names of tensors, got {places!r:.60}")
        for name, file in places.items():
            if not isinstance(file, str) or Path(file).name != file:
                _fail(
                    folder / INDEX, f"tensor {name}: expected a file of this folder, got {file!r}"
                )
            if not (folder / file).is_file():
                _fail(folder / INDEX, f"tensor {name} is said to be in {file}, which is not there")
        return sorted(set(places.values())), places
    single = folder / "model.safetensors"
    files = [single] if single.exists() else sorted(folder.glob("*.safetensors"))
    if not files:
        for pattern, kind in (("*.gguf", "GGUF"), ("*.bin", "pickle"), ("*.pt*", "pickle")):
            if any(folder.glob(pattern)):
                _refuse(folder, kind)
        _fail(folder, "expected model.safetensors, or shards with an index; there is none")
    return [file.name for file in files], {}


def read_header(file: Path, handle: int | None = None) -> Sequence[TensorRange]:
    """The tensors of one file, in the order of their bytes.

    Args:
        handle: of the file, if it is open; it stays so.
    """
    try:
        with open(file if handle is None else handle, "rb", closefd=handle is None) as stream:
            size = os.fstat(stream.fileno()).st_size
            length = int.from_bytes(stream.read(8), "little")
            if size < 8 or length > min(size - 8, MOST_HEADER):
                _fail(file, f"the header claims {length:,} bytes, the file has {size:,}")
            text = stream.read(length)
    except OSError as error:
        _fail(file, f"cannot be read: {error}")
    entries = _parse(file, text)
    entries.pop("__metadata__", None)
    begin = 8 + length
    tensors = [_tensor(file, name, entry, begin) for name, entry in entries.items()]
    tensors.sort(key=lambda tensor: (tensor.offset, tensor.nbytes))
    expected = begin
    for tensor in tensors:
        if tensor.offset != expected:
            what = "overlaps the one before" if tensor.offset < expected else "leaves a gap before"
            _fail(file, f"tensor {tensor.name} at {tensor.offset} {what}, which ends at {expected}")
        expected += tensor.nbytes
    if expected != size:
        last = tensors[-1].name if tensors else "the header"
        _fail(file, f"{last} ends at byte {expected:,}, the file at {size:,}")
    return tensors


def _tensor(file: Path, name: str, entry: Any, begin: int) -> TensorRange:
    """One entry of a header, held against itself."""
    try:
        dtype, shape, (start, stop) = entry["dtype"], tuple(entry["shape"]), entry["data_offsets"]
        bits = BITS[dtype]
    except (TypeError, KeyError, ValueError):
        _fail(file, f"tensor {name}: expected dtype, shape and data_offsets, got {entry!r:.120}")
    numbers = (start, stop, *shape)
    if not all(type(number) is int and 0 <= number < 2**63 for number in numbers):
        _fail(file, f"tensor {name}: expected whole numbers, got {entry!r:.120}")
    nbytes = stop - start
    if prod(shape) * bits != 8 * nbytes:
        _fail(
            file,
            f"tensor {name} at offset {begin + start}: its {nbytes:,} bytes are not those of "
            f"{dtype} {list(shape)!r:.120}",
        )
    return TensorRange(name, file, begin + start, nbytes, dtype, shape)


def _read_json(file: Path) -> dict[str, Any]:
    try:
        return _parse(file, file.read_bytes())
    except OSError as error:
        _fail(file, f"cannot be read: {error}")


def _parse(file: Path, text: bytes) -> dict[str, Any]:
    try:
        found = json.loads(text, object_pairs_hook=_without_repeats)
    except (ValueError, RecursionError) as error:
        _fail(file, f"expected JSON: {error}")
    if not isinstance(found, dict):
        _fail(file, f"expected a JSON object, got {type(found).__name__}")
    return found


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a name stands twice in one object")
    return found


def _refuse(place: Path, kind: str) -> NoReturn:
    _fail(
        place,
        f"{kind} weights are not read in place; convert them once: load the model with "
        "transformers and save_pretrained() it to a new folder, as safetensors",
    )


def _fail(file: Path, what: str) -> NoReturn:
    raise CheckpointError(f"{file}: {what}")
