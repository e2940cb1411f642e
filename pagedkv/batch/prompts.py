"""Prompts as callers give them: text, chat messages, token ids, the output of a processor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, NoReturn

import numpy as np
import numpy.typing as npt
import torch

from .chats import Told, is_chat, rendered

# Parts of messages that are no text, and the attributes of processors that take them.
BESIDE_TEXT = {
    "image": ("image_processor",),
    "audio": ("feature_extractor", "audio_processor"),
    "video": (),
}
Prompt = Any  # text, ids, a list of chat messages, or a mapping with images or audio
Kind = Literal["text", "chat", "images", "processed", "ids"]


def as_list(prompts: Any) -> list[Prompt]:
    """Returns the prompts of a list, or of a column of pandas, polars, pyarrow or datasets.

    Raises:
        TypeError: it is one prompt, or a table.
    """
    _require_prompts(prompts)
    return [as_python(one) for one in prompts]


def listed(prompts: Any) -> list[Prompt] | None:
    """Returns prompts as `as_list` does; None if they are read from an iterator of any length."""
    _require_prompts(prompts)
    try:
        len(prompts)  # a wrapper of an iterator may have it, and raise
    except TypeError:
        return None
    return [as_python(one) for one in prompts]


def _require_prompts(prompts: Any) -> None:
    kind = type(prompts).__name__
    if isinstance(prompts, (str, bytes, bytearray, Mapping)) or hasattr(prompts, "as_py"):
        raise TypeError(f"prompts: expected a list of prompts, got one {kind}")
    # Iterating over a table gives names, rows, or whole columns.
    if hasattr(prompts, "columns") or hasattr(prompts, "column_names"):
        raise TypeError(f"prompts: expected a list of prompts, got {kind}: give one of its columns")
    is_number = getattr(prompts, "ndim", 1) == 0
    if is_number or not (hasattr(prompts, "__iter__") or hasattr(prompts, "__getitem__")):
        raise TypeError(f"prompts: expected a list or an iterator of prompts, got {kind}")


def as_python(prompt: Any) -> Prompt:
    """Returns a prompt; a value of pyarrow's becomes one of Python's."""
    return as_py() if (as_py := getattr(prompt, "as_py", None)) else prompt


class Unread:
    """A prompt that is read when its row is made; a processor has made it, or makes it then.

    Args:
        prompt: a mapping with `input_ids`, one with `text` and `images` or `audio`, or chat
            messages.
        processor: makes ids of a prompt without `input_ids`; None if there is none.
        told: what the chat template is told.
    """

    def __init__(self, prompt: Prompt, processor: Any, told: Told) -> None:
        self._prompt, self._processor, self._told = prompt, processor, told

    def read(self) -> tuple[npt.NDArray[np.int64], dict[str, Any]]:
        """Returns ids, `[n]`, and the processor's other values.

        Raises:
            ValueError: it is not one prompt, or the processor fails or is missing.
        """
        inputs = dict(self._processed())
        ids = inputs.pop("input_ids", None)
        rows = torch.as_tensor(ids if ids is not None else [], device="cpu")
        if rows.ndim == 1:
            rows = rows[None]
        if len(rows) != 1 or rows.ndim != 2 or rows.is_floating_point():
            raise ValueError(
                f"input_ids: expected the ids of one prompt, [1, n], got shape {list(rows.shape)}, "
                f"{rows.dtype}; call the processor for each prompt"
            )
        mask = inputs.pop("attention_mask", None)
        if mask is not None and not torch.as_tensor(mask, device="cpu").all():
            raise ValueError(
                "attention_mask: expected ones, got padding; give each prompt without it"
            )
        return rows[0].cpu().numpy().astype(np.int64), inputs

    def _processed(self) -> Mapping[str, Any]:
        prompt = self._prompt
        if isinstance(prompt, Mapping) and "input_ids" in prompt:
            return prompt
        if self._processor is None:
            raise ValueError(
                "prompt: what it has beside text needs the model's processor, and none was found; "
                "give it to BatchGenerator in place of the tokenizer"
            )
        taken = taken_by(self._processor)
        for kind in [] if isinstance(prompt, Mapping) else _kinds_in(prompt):
            if any(name in kind for name in BESIDE_TEXT.keys() - taken):
                served = " and ".join(["text", *taken])
                raise ValueError(f"prompt: expected messages of {served}, got {kind}")
        try:
            if isinstance(prompt, Mapping):
                return self._processor(**prompt, return_tensors="pt")
            found: Mapping[str, Any] = rendered(
                self._processor, prompt, self._told, return_dict=True, return_tensors="pt"
            )
            return found
        except Exception as error:  # whatever reads an image or audio may raise
            raise ValueError(
                f"prompt: its processor raised {type(error).__name__}: {error}"
            ) from error


class Refused(Unread):
    """Stands for an object that is no prompt; its row ends with the reason."""

    def __init__(self, error: Exception) -> None:
        self._error = error

    def read(self) -> NoReturn:
        raise ValueError(str(self._error) or type(self._error).__name__)


def kind_of(prompt: Prompt) -> Kind:
    """Returns what a prompt is: `chat` if its messages are text alone, `ids` if it is none of all.

    What may have images or audio is `images` if a processor has yet to read it, else `processed`.
    """
    if isinstance(prompt, str):
        return "text"
    if is_chat(prompt):
        beside = any(name in part for part in _kinds_in(prompt) for name in BESIDE_TEXT)
        return "images" if beside else "chat"
    if not isinstance(prompt, Mapping):
        return "ids"
    return "processed" if "input_ids" in prompt else "images" if "text" in prompt else "ids"


def taken_by(processor: Any) -> list[str]:
    """The parts of messages that a processor takes beside text."""
    return [
        kind for kind, names in BESIDE_TEXT.items() if any(hasattr(processor, n) for n in names)
    ]


def _kinds_in(messages: Prompt) -> list[str]:
    """Returns the types of the parts of chat messages."""
    contents = [message.get("content") for message in messages if isinstance(message, Mapping)]
    parts = [part for content in contents if isinstance(content, list) for part in content]
    return [str(part.get("type")) for part in parts if isinstance(part, Mapping)]


def ids_of(row: Any) -> npt.NDArray[np.int64] | None:
    """Returns the ids, `[n]`, of a list, an array or a tensor of them; None for anything else."""
    array = _as_array(row)
    if array is None or array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        return None
    return array.astype(np.int64)


def _as_array(row: Any) -> Any:
    if isinstance(row, torch.Tensor):
        return np.asarray((row.detach().float() if row.is_floating_point() else row).cpu())
    if isinstance(row, (list, tuple, np.ndarray)):  # numpy would read more, such as bytes
        try:
            return np.asarray(row)
        except ValueError:  # lists of different length
            return np.empty((0, 0))
    return None


def as_ids(row: Any, place: int) -> npt.NDArray[np.int64]:
    """Returns the ids, `[n]`, of the prompt at a place among the prompts.

    Raises:
        TypeError: it is no prompt.
    """
    if isinstance(row, dict) and {"role", "content"} <= row.keys():
        raise TypeError(
            f"prompts: expected a list of prompts, got at {place} one chat message; a chat is a "
            "list of messages, and one prompt of the list"
        )
    ids = ids_of(row)
    if ids is None:
        array = _as_array(row)
        shape = "" if array is None else f" of shape {list(array.shape)}, dtype {array.dtype}"
        raise TypeError(
            "prompts: expected text, [n] ids, chat messages or what a processor returns, got at "
            f"{place} {type(row).__name__}{shape}"
        )
    return ids
