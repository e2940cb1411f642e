"""Decides which sequence owns which page: numpy integers only, no torch.

`pool.py` counts references, `prefix.py` finds pages by tokens, `reservations.py` keeps promises,
`tables.py` holds the pages of sequences, `sequences.py` adds, forks, truncates and frees sequences,
`matches.py` says how much of a prefix a new sequence starts with, `step.py` makes room for new
tokens and commits them, `evict.py` takes pages from sequences, `restore.py` gives pages to
sequences whose bytes come from elsewhere, `check.py` states the invariants, `stats.py` counts.

Formats of 4 bits code whole pages, so each layer group then has two segments of the pool: coded
pages and staging pages (`staging.py`). This is why pages have kinds, tables say whether they are
`staged`, and `num_coded` and `evicted_coded` count beside `num_pages` and `evicted`. In all other
formats there is one kind, and these counts are the same arrays.
"""
