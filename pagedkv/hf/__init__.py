"""Transformers: a `Cache` that keeps its tokens in pages, and the attention that reads them.

`attach.py` switches a model over and refuses those that would be silently wrong, `cache.py` is the
cache `generate` is given, `layer.py` its face to one attention module, `attention.py` the two
functions transformers calls. `continuous.py` is a third, for transformers' own continuous batching
over transformers' own cache.
"""

from .attach import attach, detach, register
from .cache import PagedCache

__all__ = ["PagedCache", "attach", "detach", "register"]
