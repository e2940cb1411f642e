"""Transformers: a `Cache` that keeps its tokens in pages, and the attention that reads them.

`attach.py` switches a model over and refuses models that would be silently wrong, `cache.py` has
the cache that `generate` is given, `layer.py` its part for one attention module, `attention.py` and
`masks.py` the functions that transformers calls, and `release.py` the differences between its
releases.
"""

from .attach import attach, detach, register
from .cache import PagedCache

__all__ = ["PagedCache", "attach", "detach", "register"]
