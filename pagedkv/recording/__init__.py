"""Writes every change of a cache's pages to a trace, while it happens.

`recorder.py` learns of every call and asks the page tables what changed, `lines.py` writes the
file. The code that reads traces is in `pagedkv/trace`.
"""

from .recorder import Recorder as Recorder
from .recorder import Unrecorded as Unrecorded
