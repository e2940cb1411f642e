"""Who owns which page: numpy integers only, no torch.

`pool.py` counts references, `prefix.py` finds pages by tokens, `reservations.py` keeps promises,
`tables.py` gives sequences their pages, `step.py` makes room for new tokens and commits them,
`check.py` states the invariants, `stats.py` counts.
"""
