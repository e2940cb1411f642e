"""Sequences and prefixes in host memory: books, bytes, and how fast they move.

`host_pages.py` keeps the books, `host_storage.py` the bytes, `tier.py` joins them with a cache's
device, `rate.py` measures copies.
"""
