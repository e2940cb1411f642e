"""`PagedKVCache`: the protocol that joins pages, storage, steps, the host tier and files.

`cache.py` is the face, `pressure.py` makes room with the user's help, `step_copies.py` does what a
step asks of bytes beside its layers' writing, `debug.py` fills what must not be read with NaN.
"""

from .cache import PagedKVCache as PagedKVCache
