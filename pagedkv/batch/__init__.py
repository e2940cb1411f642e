"""Many prompts, one model: schedule, run, sample.

`generator.py` is the face, `job.py` one call and its loop, `rows.py` and `results.py` the data.
`scheduler.py` says which rows a step computes, `runner.py` computes it through `packed.py` or
`graphs.py`; `sampling.py` chooses tokens by the rules that `options.py` reads, `preemption.py` puts
rows back. `prompt_lookup.py` or `model_drafts.py` drafts, the latter with the model of
`draft_model.py` and by the widths of `pace.py`. `pairs.py` reads contexts and continuations,
`score_job.py` makes rows of them, `continuations.py` is what these do otherwise. `image_prompts.py`
says what images are found by, `sight.py` gives them to the model.
"""

from .generator import BatchGenerator as BatchGenerator
from .results import Result as Result
from .results import Score as Score
