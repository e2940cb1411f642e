"""Prompts as callers give them: text, chat messages, token ids."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import AutoTokenizer, PreTrainedModel

Prompt = Any  # text, ids, or a list of chat messages


def as_list(prompts: Any) -> list[Prompt]:
    """The prompts of a list, or of a column of pandas, polars, pyarrow or datasets.

    Raises:
        TypeError: it is one prompt, or a table.
    """
    kind = type(prompts).__name__
    if isinstance(prompts, (str, bytes, bytearray, Mapping)) or hasattr(prompts, "as_py"):
        raise TypeError(f"prompts: expected a list of prompts, got one {kind}")
    if hasattr(prompts, "columns"):  # going through it gives their names, or whole columns
        raise TypeError(f"prompts: expected a list of prompts, got {kind}: give one of its columns")
    return [as_py() if (as_py := getattr(one, "as_py", None)) else one for one in prompts]


def encode(prompts: list[Prompt], tokenizer: Any) -> list[npt.NDArray[np.int64]]:
    """Ids of every prompt, `[n]`: text as it stands, messages through the chat template.

    Raises:
        TypeError: a prompt is none of the three.
    """
    texts = [i for i, prompt in enumerate(prompts) if isinstance(prompt, str)]
    encoded = list(prompts)
    if texts:
        rows = tokenizer([prompts[i] for i in texts])["input_ids"]
        for i, row in zip(texts, rows):
            encoded[i] = row
    for i, prompt in enumerate(prompts):
        if _is_chat(prompt):
            encoded[i] = chat_ids(tokenizer, prompt)
    return [_as_ids(i, row) for i, row in enumerate(encoded)]


def chat_ids(tokenizer: Any, messages: list[Any]) -> list[int]:
    """Ids of chat messages, up to where the answer begins."""
    return tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, tokenize=True, return_dict=False
    )


def needs_tokenizer(prompt: Prompt) -> bool:
    """Whether a prompt is made of words."""
    return isinstance(prompt, str) or _is_chat(prompt)


def tokenizer_of(model: PreTrainedModel) -> Any:
    """The tokenizer beside a model's checkpoint."""
    name = model.config._name_or_path
    if not name:
        raise ValueError("tokenizer: expected one, this model comes from no checkpoint")
    return AutoTokenizer.from_pretrained(name)


def _is_chat(prompt: Prompt) -> bool:
    return isinstance(prompt, (list, tuple)) and bool(prompt) and isinstance(prompt[0], dict)


def _as_ids(index: int, row: Any) -> Any:
    ids: Any = None
    if isinstance(row, torch.Tensor):
        ids = np.asarray((row.detach().float() if row.is_floating_point() else row).cpu())
    elif isinstance(row, (list, tuple, np.ndarray)):  # not all that numpy can read: bytes are none
        try:
            ids = np.asarray(row)
        except ValueError:  # lists of different length
            ids = np.empty((0, 0))
    if ids is None or ids.ndim != 1 or (ids.size and ids.dtype.kind not in "iu"):
        shape = "" if ids is None else f" of shape {list(ids.shape)}, dtype {ids.dtype}"
        raise TypeError(
            f"prompts: expected text, [n] ids or chat messages, got at {index} "
            f"{type(row).__name__}{shape}"
        )
    return ids.astype(np.int64)
