"""Finds where the tensors of a safetensors checkpoint lie: names, files, byte ranges, from headers.

A header is accepted only if it accounts for every byte of its file, as the format demands. So a
reader of a range gets that tensor's bytes or an error, never another tensor's bytes.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NoReturn

from pagedkv.errors import CheckpointError

SAFE, INDEX = ".safetensors", ".index.json"
EXPLICIT = "transformers_weights"  # field of a configuration with the name of a file or an index
IN_ORDER = (
    "model.safetensors", "model.safetensors.index.json",
    "pytorch_model.bin", "pytorch_model.bin.index.json",
)  # fmt: skip
# Parts of a configuration, and fields, that say how many layers there are; each has some tensor.
TEXT_PARTS = "text_config", "llm_config", "language_config"
LAYERS = "num_hidden_layers", "n_layer", "num_layers", "n_layers"
MOST_LAYERS = 10_000  # for a configuration without files; a skeleton takes a millisecond a layer
# Each of these is a side of some tensor, or a part of one, and no element takes less than a bit.
SIDES = (
    "vocab_size", "hidden_size", "n_embd", "d_model", "intermediate_size", "ffn_dim", "n_inner",
    "num_attention_heads", "n_head", "num_heads", "n_heads", "num_key_value_heads", "head_dim",
)  # fmt: skip
MOST_HEADER = 100_000_000  # bytes of JSON; the format's own limit
BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "I16": 16, "U16": 16, "I32": 32, "U32": 32, "I64": 64, "U64": 64,
    "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "F16": 16, "BF16": 16, "F32": 32, "F64": 64, "C64": 64,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorRange:
    """One tensor's place.

    Attributes:
        offset: the place of its first byte, from the beginning of the file.
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
        config: the contents of `config.json`.
    """

    folder: Path
    tensors: dict[str, TensorRange]
    config: dict[str, Any]

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in self.tensors.values())

    @property
    def as_loaded(self) -> list[TensorRange]:
        """All tensors, in the order of transformers' loader: file by file, by name.

        If neither the configuration nor an index names a dtype, the first of a floating one says
        the model's.
        """
        return sorted(self.tensors.values(), key=lambda tensor: (tensor.file, tensor.name))

    @property
    def indexed_dtype(self) -> str | None:
        """The dtype that an index names: the model's, if the configuration names none."""
        name = _taken(self.folder, self.config)
        if name is None or not name.endswith(INDEX):
            return None
        said = _read_json(self.folder / name).get("metadata")
        return said.get("dtype") if isinstance(said, Mapping) else None

    @classmethod
    def open(cls, folder: str | Path) -> Checkpoint:
        """Reads the index, if there is one, and every header.

        Raises:
            CheckpointError: something is missing, contradicts itself or is no safetensors file.
        """
        folder = Path(folder)
        config = read_config(folder)
        files = weight_files(folder, config)
        if not all(file.suffix == SAFE for file in files) or not files:
            _refuse_others(folder)
        tensors: dict[str, TensorRange] = {}
        for file in files:  # if two have one name, transformers takes the later
            tensors |= {tensor.name: tensor for tensor in read_header(file)}
        for file, said in files.items():
            if lost := next((name for name in said if name not in tensors), None):
                _fail(file, f"an index says tensor {lost} is here, its header does not")
        made = cls(folder, tensors, config)
        require_sizes(config, len(tensors), made.nbytes, folder / "config.json")
        return made


def require_sizes(
    config: Mapping[str, Any],
    tensors: int = MOST_LAYERS,
    nbytes: int | None = None,
    file: Path | None = None,
) -> None:
    """Raises if a configuration claims more than its files can hold, before a model is made of it.

    Args:
        tensors: the number of tensors in its files.
        nbytes: their bytes together; None if there are no files.
        file: the file of the configuration.
    """
    limits: list[tuple[tuple[str, ...], int, str]] = [(LAYERS, tensors, "the tensors of its files")]
    if nbytes is None:
        limits = [(LAYERS, tensors, "as many as are planned without files")]
    else:
        limits.append((SIDES, 8 * nbytes, "the bits of its files"))
    every: list[Any] = [config, *map(config.get, TEXT_PARTS)]
    for said in every:
        for names, most, what in limits:
            for name in names if isinstance(said, Mapping) else ():
                if isinstance(size := said.get(name), (int, float)) and size > most:
                    _fail(
                        file or Path("model"),
                        f"{name}: expected at most {most}, {what}, got {size}",
                    )


def weight_files(folder: Path, config: Mapping[str, Any]) -> dict[Path, list[str]]:
    """Lists the files from which transformers' `from_pretrained` loads a folder's weights.

    Transformers takes the first that exists: the file that the configuration names, a single file,
    the files of an index; safetensors before pickles. Other engines take an index first, but here
    every reader has to give the answers of the model that transformers loads.

    Returns:
        Files in the order of loading, if any, each with the tensors that an index says it has.

    Raises:
        CheckpointError: an index, or the configuration, names files that are not there.
    """
    name = _taken(folder, config)
    if name is None or not name.endswith(INDEX):
        return {} if name is None else {folder / name: []}
    index = folder / name
    places = _read_json(index).get("weight_map")
    if not isinstance(places, dict) or not places:
        _fail(index, f"weight_map: expected names of tensors, got {places!r:.60}")
    files: dict[str, list[str]] = {}
    for tensor, file in places.items():
        if not isinstance(file, str) or file not in files:
            _require_file(index, f"tensor {tensor}", file)
        files.setdefault(file, []).append(tensor)
    return {folder / file: files[file] for file in sorted(files)}


def _taken(folder: Path, config: Mapping[str, Any]) -> str | None:
    """Names the file or the index by which transformers finds a folder's weights."""
    named = config.get(EXPLICIT)
    if named is not None:
        _require_file(folder / "config.json", EXPLICIT, named)
        return str(named)
    return next((name for name in IN_ORDER if (folder / name).is_file()), None)


def _require_file(said_by: Path, what: str, name: Any) -> None:
    if not isinstance(name, str) or Path(name).name != name:
        _fail(said_by, f"{what}: expected a file of this folder, got {name!r:.300}")
    if not os.path.isfile(said_by.parent / name):  # Path.is_file raises where a name is too long
        _fail(said_by, f"{what} is said to be in {name:.300}, which is not there")


def found_in(model: str | Path) -> tuple[str, Checkpoint | dict[str, Any]]:
    """Returns the name of a model, and its checkpoint on this machine or else its configuration.

    Args:
        model: a folder, or an id on the hub, whose configuration is fetched if need be.
    """
    folder = _folder(model)
    downloaded = folder != Path(model)
    name, config = str(model) if downloaded else short_name(folder), read_config(folder)
    said = folder / "config.json"
    if SAFE not in (_taken(folder, config) or ""):
        require_sizes(config, file=said)
        return name, config
    try:
        return name, Checkpoint.open(folder)
    except CheckpointError:
        if not downloaded:
            raise
        require_sizes(config, file=said)
        return name, config  # a hub's cache may have some of the shards


def short_name(folder: Path) -> str:
    """Returns the last part of a path; for a path in the hub's cache the model's id."""
    cached = re.search(r"models--(.+?)/snapshots/", f"{folder}/")
    return cached[1].replace("--", "/") if cached else folder.name or folder.resolve().name


def _folder(model: str | Path) -> Path:
    """Returns the folder itself, or the folder in the hub's cache that has the configuration."""
    folder = Path(model)
    looks_local = isinstance(model, Path) or not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", model)
    if folder.exists() or looks_local or folder.suffix == ".gguf":
        return folder
    try:
        from huggingface_hub import hf_hub_download, try_to_load_from_cache
    except ImportError as error:
        raise ImportError(
            "a model's id needs huggingface_hub: pip install 'pagedkv[hf]'"
        ) from error
    found = try_to_load_from_cache(str(model), "config.json")
    if isinstance(found, str):
        return Path(found).parent
    try:
        return Path(hf_hub_download(str(model), "config.json")).parent
    except Exception as error:  # no network, no such model, no access
        raise ValueError(
            f"model: expected a folder or an id on the hub, got {model!r}: {error}"
        ) from error


def read_config(folder: Path) -> dict[str, Any]:
    """Reads the folder's `config.json`."""
    if folder.suffix == ".gguf":
        _refuse(folder, "GGUF")
    if not folder.is_dir():
        _fail(folder, "expected a folder with config.json, there is none")
    if not (folder / "config.json").exists() and any(folder.glob("*.gguf")):
        _refuse(folder, "GGUF")
    return _read_json(folder / "config.json")


def _refuse_others(folder: Path) -> NoReturn:
    """Says why there are no weights to read in place."""
    for pattern, kind in (("*.gguf", "GGUF"), ("*.bin", "pickle"), ("*.pt*", "pickle")):
        if any(folder.glob(pattern)):
            _refuse(folder, kind)
    _fail(folder, f"expected {IN_ORDER[0]}, or shards with {IN_ORDER[1]}; there is none")


def read_header(file: Path, handle: int | None = None) -> Sequence[TensorRange]:
    """Reads the tensors of one file, in the order of their bytes.

    Args:
        handle: the file's descriptor, if it is open; it stays open.
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
    """Reads one entry of a header, and checks that it does not contradict itself."""
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
        found = file.stat()
        if not stat.S_ISREG(found.st_mode) or found.st_size > MOST_HEADER:
            _fail(file, f"expected a file of at most {MOST_HEADER:,} bytes")
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
