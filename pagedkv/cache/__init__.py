"""`PagedKVCache`: the protocol that joins pages, storage, steps, the host tier and files.

`cache.py` is the face, `pressure.py` makes room with the user's help, `step_copies.py` does what a
step asks of bytes besides its layers' writing, `debug.py` fills unused slots with NaN.
"""

from .cache import PagedKVCache as PagedKVCache
