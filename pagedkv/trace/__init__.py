"""Reads traces of a cache's pages: follows them, draws them, and hands them to other viewers.

`read.py` reads the file, `books.py` knows who owns what after each event, `history.py` collects
the state of every page in every step, `page.py` puts that into one HTML page, `chrome.py` into a
timeline.
"""

from .books import replay as replay
