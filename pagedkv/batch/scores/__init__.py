"""Scores given continuations by a model's log-probabilities.

`pairs.py` reads contexts and continuations, `job.py` makes rows of them, `continuations.py` has
what differs between these rows and their steps and generating ones.
"""
