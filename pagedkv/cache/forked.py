"""Pages in a child of `os.fork`, which lacks the threads that may hold their lock.

The child has a copy of all pages, in the middle of whatever the parent did with them.
"""

from __future__ import annotations

import os
import weakref
from typing import Any

from pagedkv.errors import ForkedError

_living: weakref.WeakSet[Any] = weakref.WeakSet()


def refuse_in_children(cache: object) -> None:
    """Makes a cache refuse all calls in processes that are forked from now on."""
    _living.add(cache)


def _refuse() -> None:
    for cache in [*_living]:
        kind = type(cache)
        refusing = type(kind.__name__, (kind,), {"__getattribute__": _refused})
        cache.__class__ = refusing


def _refused(cache: object, name: str) -> Any:
    if name in ("__class__", "__dict__"):
        return object.__getattribute__(cache, name)
    if name == "release_later":  # finalizers call it
        return lambda seqs: None
    raise ForkedError(
        f"{name}: these pages were made before os.fork and are the parent's; make others in the "
        "child, or start it by `spawn`"
    )


if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
    os.register_at_fork(after_in_child=_refuse)
