"""Tokens as they are made: rows that are added while others run.

`request.py` is one row as its caller sees it, `text.py` its text piece by piece, `job.py` the loop
of `batch/job.py` for rows that come at any time. `events.py` is the interface for threads,
`asynchronous.py` the one for `asyncio`, which runs `events.py` in a thread of its own.
"""

from .asynchronous import AsyncEvents as AsyncEvents
from .asynchronous import AsyncRequest as AsyncRequest
from .events import Events as Events
from .request import Event as Event
from .request import Request as Request
