"""Sequences and prefixes in host memory: which page holds what, its bytes, the speed of copies.

`host_pages.py` decides, `host_storage.py` holds the bytes, `tier.py` joins both with a cache's
device, `rate.py` measures copies.
"""
