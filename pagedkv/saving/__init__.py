"""A sequence as a file.

`sequence.py` says what of a cache a file holds and what of a file fits a cache, `format.py` how it
lies in the file and what makes it believed.
"""
