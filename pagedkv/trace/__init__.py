"""Reads traces of a cache's pages: replays them, draws them, and hands them to other viewers.

`read.py` reads the file, `replay.py` runs it on a cache without a model, `history.py` collects what
every page was in every step, `page.py` puts that into one HTML page, `chrome.py` into a timeline.
"""

from .replay import replay as replay
