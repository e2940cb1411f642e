"""A sequence as a file, and prefixes as the files of a folder.

`sequence.py` moves sequences to files and back, `match.py` checks that a file fits a cache,
`format.py` writes and verifies files. `pieces.py` does the same for parts of prefixes, `store.py`
keeps the folder.
"""
