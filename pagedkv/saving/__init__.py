"""A sequence as a file, and prefixes as the files of a folder.

`sequence.py` says what of a cache a file holds and what of a file fits a cache, `format.py` how it
lies in the file and what makes it believed. `pieces.py` is the same for a part of a prefix,
`store.py` the folder.
"""
