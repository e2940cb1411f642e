"""Reads options of the commands; an error names the option that cannot be used."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from pagedkv.models.weighing import packed_advice
from pagedkv.names import DTYPES as OTHER_DTYPES
from pagedkv.names import FIELDS, OPTIONS, meant
from pagedkv.planner.byte_sizes import size_in_bytes

from .errors import UsageError, require_apart
from .option import Given
from .plan import kv_formats
from .rows import strict_json

DTYPES = ("auto", "float32", "bfloat16", "float16")
DTYPES_SAID = f"{', '.join(DTYPES[:-1])} or {DTYPES[-1]}"

# Options that --set refuses, because they have a flag of their own, which the command reads.
FLAGS = {
    "max_new_tokens": "--max-new-tokens",
    "num_return_sequences": "--samples",
    "max_length": "--max-new-tokens",
    "seed": "--seed",
    "stop_strings": "--stop",
    "temperature": "--temperature",
    "top_p": "--top-p",
    "logprobs": "--logprobs",
    "chat_template_kwargs": "--chat-template-kwargs",
}

# Fields that --cache accepts; other fields follow from the model or have an option of their own.
CACHE = (
    "retention", "budget", "keep", "read_tokens", "host_tokens", "growth_step", "high_water",
    "low_water", "max_sequences", "max_states",
)  # fmt: skip

# Options that --set refuses, because their values are Python objects.
OBJECTS = {
    "generation_config", "logits_processor", "prefix_allowed_tokens_fn", "stopping_criteria",
}  # fmt: skip


def one_of(option: str, given: list[str]) -> str | None:
    """Returns the value of an option that may be given once; a second would replace it unseen."""
    if len(given) > 1:
        raise UsageError(f"{option}: expected one, got {', '.join(given)}; give one after another")
    return given[0] if given else None


def kv_formats_of(text: str) -> tuple[str, str]:
    """The formats of K and V that --kv-format gives."""
    try:
        return kv_formats(text)
    except ValueError as error:
        raise UsageError(f"--kv-format: {str(error).removeprefix('kv_format: ')}") from None


def memory_of(given: Given) -> dict[str, Any]:
    """The budgets that a plan is made for; empty without a plan."""
    device, host, expert_slots = given.device_memory, given.host_memory, given.expert_slots
    if device is None and host is not None:
        raise UsageError("--host-memory: expected with --device-memory, which it is planned with")
    if device is None and expert_slots is not None:
        raise UsageError("--expert-slots: expected with --device-memory, whose plan follows it")
    if device is None:
        return {}
    if given.max_tokens is not None:
        raise UsageError("--max-tokens: expected none with --device-memory, the plan says how many")
    if given.cache:
        raise UsageError("--cache: expected none with --device-memory, pages are the plan's own")
    if given.draft is not None:
        raise UsageError("--draft: expected none with --device-memory, whose plan counts one model")
    return {"device_memory": device, "host_memory": host, "expert_slots": expert_slots}


def sampling_of(
    temperature: float | None, top_p: float | None, samples: int, stop: list[str] | None
) -> dict[str, Any]:
    """The sampling options that have flags; those not given stay as the model has them."""
    if stop and "" in stop:
        raise UsageError("--stop: expected a text, got none, with which every answer ends")
    chosen: dict[str, Any] = {"stop_strings": stop} if stop else {}
    if samples > 1:
        chosen |= {"num_return_sequences": samples, "do_sample": True}
    if temperature == 0:
        return chosen | {"do_sample": False}
    if temperature is not None:
        chosen |= {"temperature": temperature, "do_sample": True}
    return chosen | ({"top_p": top_p, "do_sample": True} if top_p is not None else {})


def options_of(pairs: list[str]) -> dict[str, Any]:
    """The options that --set gives."""
    found = dict(_pair("--set", pair) for pair in pairs)
    for name in found:
        said = OPTIONS.get(name, name)
        if said in FLAGS:
            raise UsageError(f"--set: {name} has an option of its own, {FLAGS[said]}")
        if said != name:
            raise UsageError(f"--set: generate has no option {name}; did you mean {said}?")
        if name in OBJECTS:
            raise UsageError(f"--set: {name} is for `BatchGenerator` in Python, it takes objects")
    return found


def template_of(text: str | None, raw: bool) -> dict[str, Any]:
    """Reads --chat-template-kwargs, which is an object of JSON."""
    if text is None:
        return {}
    if raw:
        raise UsageError("--chat-template-kwargs: expected none with --raw, which uses no template")
    try:
        said = strict_json(text)
    except ValueError as error:
        raise UsageError(f"--chat-template-kwargs: expected JSON: {error}") from error
    if not isinstance(said, dict):
        raise UsageError(
            "--chat-template-kwargs: expected an object such as "
            f"'{{\"enable_thinking\": false}}', got {text:.80}"
        )
    return said


def cache_of(pairs: list[str]) -> dict[str, Any]:
    """The fields that --cache gives."""
    found = dict(_pair("--cache", pair) for pair in pairs)
    for name, value in found.items():
        if name not in CACHE:
            near = meant(name, CACHE, FIELDS)
            raise UsageError(f"--cache: expected one of {', '.join(CACHE)}, got {name}{near}")
        if isinstance(value, str) and re.search(r",\s*\w+=", value):
            raise UsageError(
                f"--cache: expected one NAME=VALUE, got {name}={value}; give --cache once for each"
            )
    return found


def store_of(folder: Path | None, size: str | None) -> Any:
    """The prefix store that --prefix-store gives; None without one."""
    if folder is None:
        if size is not None:
            raise UsageError("--prefix-store-size: expected with --prefix-store FOLDER")
        return None
    from pagedkv import PrefixStore

    try:
        limit = {} if size is None else {"max_bytes": size_in_bytes("--prefix-store-size", size)}
        return PrefixStore(folder, **limit)
    except ValueError as error:
        raise UsageError(str(error).replace("prefix_store:", "--prefix-store:")) from error


def packing_of(wanted: bool | None, weight_format: str | None) -> bool | str:
    """Returns the `pack_weights` of `BatchGenerator` that two options mean."""
    if weight_format is None:
        return "auto" if wanted is None else wanted
    if weight_format != "int8":
        raise UsageError(f"--weight-format: expected int8, got {weight_format}")
    if wanted is False:
        raise UsageError("--weight-format: expected without --no-pack-weights")
    return weight_format


def require_outputs(out: Path | None, asked: dict[str, bool], trace: Path | None) -> None:
    """Raises if an output would get lost, or take the place of another file.

    Args:
        asked: options whose results only rows of a file hold, and whether each was given.
    """
    if out is None and sys.stdout is None:
        raise UsageError("standard output is closed; texts need it, or --out FILE")
    if out is None and (lost := next((name for name, given in asked.items() if given), None)):
        raise UsageError(f"{lost}: expected with --out FILE, whose rows have it")
    if out is not None:
        from .table import rows_beside

        require_apart("--trace", trace, ("--out", out), ("--out", rows_beside(out)))
    if trace is not None and (trace.is_dir() or not trace.parent.is_dir()):
        what = "it is a folder" if trace.is_dir() else f"there is no folder {trace.parent}"
        raise UsageError(f"--trace: cannot write {trace}: {what}")


def _pair(option: str, text: str) -> tuple[str, Any]:
    """Reads `NAME=VALUE`; the value is JSON if it can be read as JSON, else text."""
    name, equals, value = text.partition("=")
    name = name.replace("-", "_")
    if not equals or not name.isidentifier():
        raise UsageError(f"{option}: expected NAME=VALUE, got {text!r}")
    try:
        return name, strict_json(value)
    except ValueError:
        return name, value


def dtype_of(name: str) -> str:
    """The dtype that --dtype gives."""
    name = OTHER_DTYPES.get(name, name)
    if name not in DTYPES:
        raise UsageError(f"--dtype: expected {DTYPES_SAID}, got {name}{packed_advice(name)}")
    return name
