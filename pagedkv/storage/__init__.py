"""The bytes of pages, on some device. `dense.py` keeps them as they were computed."""
