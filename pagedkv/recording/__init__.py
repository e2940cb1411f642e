"""Writes down every change of a cache's pages while it happens, as a trace.

`recorder.py` hooks into the calls of a cache, `lines.py` is the file, `disguise.py` hides token
ids. What a trace is read and replayed with is a floor above, in `pagedkv/trace`.
"""

from .recorder import record as record
