"""Tells which model a folder holds from its files alone, not from name, place or age."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO

from pagedkv.errors import CheckpointError
from pagedkv.models.checkpoint import EXPLICIT, read_config, read_header, weight_files

PIECE = 64  # bytes read in each place
PLACES = 16  # pieces of each tensor
PLACES_OF_FILE = 4096  # pieces of a file whose tensors are not known
TAIL = 128 * 1024  # bytes at its end; a pickle's archive has checksums of all tensors there
# Fields of a configuration that change no answer.
UNTOLD = ("transformers_version", "_name_or_path")
ADAPTER = "adapter_config.json"
TOKENIZER = ["*token*.json", "*token*.model", "tekken.json", "vocab.*", "merges.txt", "spiece.*"]
TOKENIZER += ["sentencepiece*", "*.tiktoken", "chat_template*", "additional_chat_templates/*"]
# Transformers looks for weights in this order: for the second only if the first are missing.
OF_ADAPTER = ("adapter_model.safetensors", "adapter_model.bin")
ON_HUB = (["model.safetensors", "model-*.safetensors", "adapter_model.*"], ["pytorch_model*.bin"])


def identity_of(model: str, tokenizer: str | None = None) -> dict[str, str]:
    """Digests of all that decides a model's answers: configurations, tokenizer, weights.

    It reads 1 KiB of each tensor of the weights, spread evenly. That is enough to notice training
    or merging, and too little to notice a few numbers changed by hand. It does not matter which
    file has which tensor.

    Args:
        model: a folder, or an id on the hub, whose files are fetched if they are not here.
        tokenizer: a folder, or an id, of a tokenizer that is not the model's own.
    """
    folders = [_folder(model)]
    adapter = _settings(folders[0] / ADAPTER)
    if isinstance(adapter, dict) and not (folders[0] / "config.json").exists():
        folders.append(_folder(str(adapter.get("base_model_name_or_path"))))
    words = [_folder(tokenizer, with_weights=False)] if tokenizer else folders
    weights = [part for folder in folders for part in _tensors(folder)]
    configs = [_settings(folder / name) for folder in folders for name in ("config.json", ADAPTER)]
    return {
        "config": _digest(configs),
        "generation_config": _digest([_settings(f / "generation_config.json") for f in folders]),
        "tokenizer": _digest([_contents(folder, *TOKENIZER) for folder in words]),
        "weights": _digest(sorted(weights)),
    }


def require_readable(model: str, tokenizer: str | None) -> None:
    """Raises if transformers does not read a folder's files as they are, or finds no tokenizer.

    If transformers finds no tokenizer, it makes one without words.

    Args:
        tokenizer: another one, if one was given.

    Raises:
        CheckpointError: it is GGUF.
        ValueError: it has no tokenizer.
    """
    folder = Path(model)
    if folder.suffix == ".gguf":
        read_config(folder)
    # An id on the hub; or an adapter, which may use the tokenizer of its base model.
    if not os.path.isdir(model) or (folder / ADAPTER).exists():
        return
    read_config(folder)
    if tokenizer is None and not _contents(folder, *TOKENIZER):
        raise ValueError(
            f"{model} has no tokenizer (tokenizer.json, say); save one there with "
            "tokenizer.save_pretrained, or give --tokenizer NAME"
        )


def _folder(model: str, with_weights: bool = True) -> Path:
    """Finds the folder with a model's files; an id is looked up on the hub."""
    folder = Path(model)
    if folder.exists():
        return folder
    from huggingface_hub import snapshot_download

    def fetched(*weights: str) -> Path:
        others = ["*.json", "*.jinja", "*.model", "*.txt"]
        return Path(snapshot_download(model, allow_patterns=[*others, *weights]))

    folder = fetched()
    if with_weights:
        named = EXPLICIT in _fields(folder)
        for weights in (["*.safetensors"],) if named else ON_HUB:
            if _weights(folder := fetched(*weights)):
                break
    return folder


def _weights(folder: Path) -> list[Path]:
    """The files from which transformers loads a model, or an adapter, or both."""
    adapters = [folder / name for name in OF_ADAPTER if (folder / name).is_file()]
    own = adapters[:1] if (folder / ADAPTER).exists() else []
    return [*weight_files(folder, _fields(folder)), *own]


def _fields(folder: Path) -> dict[str, Any]:
    """The fields of a model's configuration, as far as it can be read."""
    found = _settings(folder / "config.json")
    return found if isinstance(found, dict) else {}


def _settings(file: Path) -> Any:
    """The fields of a configuration that can change an answer; None without a file."""
    if not file.is_file():
        return None
    try:
        said = json.loads(file.read_bytes())
        return {name: value for name, value in said.items() if name not in UNTOLD}
    except (ValueError, AttributeError, RecursionError):  # loading the model says why
        return file.read_bytes().hex()


def _contents(folder: Path, *patterns: str) -> list[Any]:
    files = {file for pattern in patterns for file in folder.glob(pattern) if file.is_file()}
    return [[file.name, sha256(file.read_bytes()).hexdigest()] for file in sorted(files)]


def _tensors(folder: Path) -> Iterable[tuple[str, str, str]]:
    """The tensors of a folder's weights; if two have one name, transformers takes the later."""
    return {part[0]: part for file in _weights(folder) for part in _parts(file)}.values()


def _parts(file: Path) -> list[tuple[str, str, str]]:
    """Returns the name, kind and digest of each tensor; a file of another format counts as one."""
    with file.open("rb", buffering=0) as stream:
        try:
            if file.suffix != ".safetensors":
                raise CheckpointError("not safetensors")
            return [
                (t.name, f"{t.dtype} {t.shape}", _sampled(stream, t.offset, t.nbytes, PLACES))
                for t in read_header(file)
            ]
        except CheckpointError:  # another format, or a file that cannot be loaded
            size = file.stat().st_size
            whole = _sampled(stream, 0, size, PLACES_OF_FILE)
            end = _sampled(stream, max(0, size - TAIL), min(size, TAIL), TAIL)
            return [(file.name, str(size), _digest([whole, end]))]


def _sampled(stream: BinaryIO, begin: int, size: int, places: int) -> str:
    """Makes a digest of pieces of a range, spread evenly from its first to its last bytes."""
    digest = sha256()
    if size <= places * PIECE:
        stream.seek(begin)
        digest.update(stream.read(size))
    else:
        for place in range(places):
            stream.seek(begin + (size - PIECE) * place // (places - 1))
            digest.update(stream.read(PIECE))
    return digest.hexdigest()


def _digest(what: Any) -> str:
    return sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:16]
