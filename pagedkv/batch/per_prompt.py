"""Options that may have a value for each prompt: in a list, or in an iterator read with prompts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set
from itertools import islice, repeat
from operator import index
from typing import Any

import numpy as np
from torch import Tensor

from pagedkv.pages.salts import as_salt, is_regions

from .chats import NAME as CHATS
from .chats import told
from .option_types import is_int, is_number, require_kinds

# Options of transformers: what a value must be, in words and as a check, and its conversion.
EACH: dict[str, tuple[str, Callable[[Any], bool], Callable[[Any], Any]]] = {
    "max_new_tokens": ("an int", is_int, index),
    "temperature": ("a number", is_number, float),
}


def in_step(value: Any) -> Iterable[Any] | None:
    """Returns an option's values if it has one for each prompt; None if one is for all."""
    if isinstance(value, (str, bytes, bytearray, Mapping, Set)) or not hasattr(value, "__iter__"):
        return None
    if is_regions(value):  # these are one salt
        return None
    if hasattr(value, "tolist"):  # an array or a tensor
        value = value.tolist()
    return value if hasattr(value, "__iter__") else None


def values_of(name: str, value: Any, prompts: int | None) -> Iterable[Any] | None:
    """Returns an option's values if it has one for each prompt, checked if `prompts` is known."""
    values = in_step(value)
    if prompts is None or (values is None and not isinstance(value, (np.ndarray, Tensor))):
        return values
    return [value_of(name, one) for one in _one_each(name, value, prompts)]


def each_of(name: str, value: Any, prompts: int | None) -> Iterable[Any]:
    """Returns an option's value for each prompt; one value for all is checked and repeated."""
    if (values := values_of(name, value, prompts)) is not None:
        return values
    value = value_of(name, value)
    return repeat(value) if prompts is None else [value] * prompts


def value_of(name: str, value: Any) -> Any:
    """Checks and converts one prompt's value of an option.

    Raises:
        TypeError, ValueError: the option cannot have this value.
    """
    if name == CHATS:
        return told(value)
    if name == "salt":
        value = as_salt(value, "bytes, regions, or a list of them")
    elif name == "seed":
        require_seed(value)
    else:
        what, fits, plain = EACH[name]
        if not fits(value):
            raise TypeError(f"{name}: expected {what}, got {value!r}")
        value = plain(value)
        require_kinds({name: value})
    return value


def require_seed(seed: Any) -> None:
    """Raises TypeError or ValueError for a value that is no seed."""
    if seed is None:
        return
    if isinstance(seed, bool) or not hasattr(seed, "__index__"):
        raise TypeError(f"seed: expected an int or None, got {seed!r}")
    if not 0 <= index(seed) < 2**62:
        raise ValueError(f"seed: expected 0 <= seed < 2**62, got {seed}")


def _one_each(name: str, value: Any, prompts: int) -> list[Any]:
    if isinstance(value, (np.ndarray, Tensor)):
        value = value.tolist()
    if in_step(value) is None:
        return [value] * prompts
    values = list(islice(value, prompts + 1))  # an iterator may never end
    if len(values) != prompts:
        found = len(value) if hasattr(value, "__len__") else len(values)
        raise ValueError(f"{name}: expected one value for each of {prompts} prompts, got {found}")
    return values
