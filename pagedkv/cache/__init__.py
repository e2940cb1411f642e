"""`PagedKVCache`: the protocol that joins pages, storage, steps, the host tier and files.

`cache.py` has the public class, `pressure.py` makes room with the user's help, `step_copies.py`
copies, moves and codes pages for a step, `debug.py` fills unused slots with NaN.
"""

from .cache import PagedKVCache as PagedKVCache
