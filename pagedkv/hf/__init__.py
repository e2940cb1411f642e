"""Transformers: a `Cache` that keeps its tokens in pages, and the attention that reads them.

`attach.py` switches a model over and refuses models that would be silently wrong, `cache.py` is the
cache that `generate` is given, `layer.py` the part of it that one attention module calls,
`attention.py` and `masks.py` the functions that transformers calls, and `release.py` knows what
differs between its releases.
"""

from .attach import attach, detach, register
from .cache import PagedCache

__all__ = ["PagedCache", "attach", "detach", "register"]
