"""Other people's programs, over pages: one module for each, imported only when it is asked for.

`lm_eval.py` is a model for lm-evaluation-harness, `trl.py` has trainers of TRL.
"""
