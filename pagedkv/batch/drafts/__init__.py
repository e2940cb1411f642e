"""Drafts: tokens that may follow in decoding rows, computed ahead in the same step.

`drafter.py` is the interface that the scheduler asks. `prompt_lookup.py` answers from a row's own
text, `model_drafts.py` with the smaller model of `draft_model.py`, as far ahead as
`draft_length.py` says.
"""
