"""Writes down what changes in a cache's pages while it happens, as a trace.

`recorder.py` is told of every call and asks the page books what changed, `lines.py` is the file.
What reads a trace is a floor above, in `pagedkv/trace`.
"""

from .recorder import Recorder as Recorder
from .recorder import Unrecorded as Unrecorded
