"""Experts that are read when tokens are routed to them, instead of with their layer.

`modules.py` says which experts can be read alone, `files.py` reads experts,
`residency.py` knows which are in memory, `rows.py` and `slots.py` compute them: on a CPU in their
own rows of a layer's tensors, on a card in slots. `memory.py` has the memory of rows.
"""
