"""What was seen of models that no list knows, by the configuration of their decoder."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any


@dataclass
class Seen:
    """What transformers' own cache holds of a model, after a forward of a few tokens.

    Attributes:
        kinds, shapes, states: as `layer_kinds`, `kv_shapes` and `state_tensors` say them.
        dtype: in which the model computed.
        is_packed: whether packed rows were found right as well.
    """

    kinds: list[Any]
    shapes: list[Any]
    states: list[Any]
    dtype: str
    is_packed: bool = False


# By identity: configurations have no hash, and a copy is another model that nobody has looked at.
_SEEN: dict[int, tuple[weakref.ref[Any], Seen]] = {}


def seen_of(text: Any) -> Seen | None:
    """What was seen of the model of a decoder's configuration; None where nobody has looked."""
    owner, seen = _SEEN.get(id(text), (None, None))
    return seen if owner is not None and owner() is text else None


def remember(text: Any, seen: Seen) -> None:
    """Has a decoder's configuration mean what was seen, as long as it lives."""
    key = id(text)
    _SEEN[key] = weakref.ref(text, lambda _: _SEEN.pop(key, None)), seen


def forget(text: Any) -> None:
    """Takes back `remember`."""
    _SEEN.pop(id(text), None)
