"""Remembers, by its decoder's configuration, what trying an unlisted model has shown."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any


@dataclass
class Seen:
    """The contents of transformers' own cache after a forward of a few tokens of a model.

    Attributes:
        kinds, shapes, states: as `layer_kinds`, `kv_shapes` and `state_tensors` return them.
        dtype: the dtype in which the model computed.
    """

    kinds: list[Any]
    shapes: list[Any]
    states: list[Any]
    dtype: str


# By identity, because configurations have no hash; so a copy counts as never tried.
_SEEN: dict[int, tuple[weakref.ref[Any], Seen]] = {}


def seen_of(text: Any) -> Seen | None:
    """Returns what was seen of a decoder's model; None if it was never tried."""
    owner, seen = _SEEN.get(id(text), (None, None))
    return seen if owner is not None and owner() is text else None


def remember(text: Any, seen: Seen) -> None:
    """Notes what was seen of a decoder's model, as long as its configuration lives."""
    key = id(text)
    _SEEN[key] = weakref.ref(text, lambda _: _SEEN.pop(key, None)), seen


def forget(text: Any) -> None:
    """Undoes `remember`."""
    _SEEN.pop(id(text), None)
