"""Scores given continuations by a model's log-probabilities.

`pairs.py` reads contexts and continuations, `job.py` makes rows of them, `continuations.py` is what
these rows and their steps do otherwise than those that generate.
"""
