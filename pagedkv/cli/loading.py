"""Models, tokenizers and devices, by the names that a command is given."""

from __future__ import annotations

import os
from typing import Any

import torch
import typer
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
)

from pagedkv.errors import CheckpointError
from pagedkv.models.checkpoint import found_in
from pagedkv.storage.placement import device_of
from pagedkv.stream.coverage import spelled_out

from .errors import UsageError
from .job_spec import Job, cannot_load
from .torchrun import follows


def load(kind: Any, name: str, argument: str = "MODEL", **options: Any) -> Any:
    """Loads by transformers, or raises a UsageError that says why that fails.

    Args:
        argument: the command's argument or option that gave the name.
    """
    try:
        return kind.from_pretrained(name, **options)
    except Exception as error:  # a broken checkpoint, or code in it, may raise anything
        raise UsageError(cannot_load(name, error, argument)) from error


def tokenizer_of(job: Job) -> Any:
    """The tokenizer of a job: the model's own, unless it was given another one."""
    if job.tokenizer is None:
        return load(AutoTokenizer, job.model)
    return load(AutoTokenizer, job.tokenizer, "--tokenizer")


def config_of(name: str, argument: str = "MODEL") -> Any:
    """Returns a model's configuration; raises a UsageError if the model is no decoder."""
    if os.path.isfile(os.path.join(name, "config.json")):
        try:
            found_in(name)  # raises if it claims larger sizes than its files have
        except CheckpointError as error:
            raise UsageError(f"{argument}: {error}") from error
    config = load(AutoConfig, name, argument)
    known = (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING)
    kind = config.model_type or type(config).__name__
    if config.is_encoder_decoder:
        raise UsageError(f"{argument}: expected a decoder, {kind} is an encoder-decoder")
    if not any(type(config) in mapping for mapping in known) and not hasattr(config, "auto_map"):
        raise UsageError(f"{argument}: expected a decoder of text, {kind} is none to transformers")
    return config


def class_of(name: str, argument: str = "MODEL") -> Any:
    """Returns the class that opens a model: for text if there is one, else for images."""
    kind = type(config_of(name, argument))
    sees = kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING and kind not in MODEL_FOR_CAUSAL_LM_MAPPING
    return AutoModelForImageTextToText if sees else AutoModelForCausalLM


def model_of(name: Any, dtype: str, device: Any, argument: str = "MODEL") -> Any:
    """Loads a model, to compute in a dtype on a device."""
    return loaded(name, argument, dtype=dtype).to(device)


def loaded(name: Any, argument: str = "MODEL", **options: Any) -> Any:
    """Loads a model of which every weight is in its files.

    transformers draws the others at random, and says so in a log that commands silence.

    Args:
        options: as for transformers' `from_pretrained`.
    """
    options |= {"output_loading_info": True}
    model, info = load(class_of(name, argument), name, argument, **options)
    if absent := sorted(info["missing_keys"]):
        raise UsageError(
            f"{argument}: {name} is no checkpoint of {type(model).__name__}: no file has "
            f"{spelled_out(absent)}"
        )
    if (unused := sorted(info["unexpected_keys"])) and not follows():
        said = f"{name} has tensors that {type(model).__name__} lacks: {spelled_out(unused)}"
        typer.echo(said, err=True)
    return model.eval()


def pick(device: str) -> str:
    """Returns the device to compute on; raises a UsageError if it cannot compute."""
    try:
        named = device_of(device)
    except ValueError as error:
        raise UsageError(f"--{error}") from error
    if device == "auto":
        return named.type
    try:
        found = torch.ones(1, device=named)
        found.item()  # raises on the meta device, which has shapes only
    except Exception as error:  # a device that torch was not built for may raise anything
        reason = next(iter(str(error).splitlines()), "")
        raise UsageError(f"--device: cannot use {device}: {reason}") from error
    return str(found.device)
