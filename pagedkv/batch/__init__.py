"""Many prompts, one model: schedule, run, sample.

`generator.py` is the face, `job.py` one call and its loop, `rows.py` and `results.py` the data.
`scheduler.py` says which rows a step computes, `runner.py` computes it through `packed.py` or
`graphs.py`; `sampling.py` chooses tokens by the rules that `options.py` reads, with `drawing.py`,
and where these are enough among `candidates.py`; `preemption.py` puts rows back. `prompts.py` says
what callers may give, `encoder.py` makes ids of it, `chats.py` tells templates of messages,
`image_prompts.py` says what images are found by, `step_images.py` gives them to the model.
`widths.py` says how many tokens a step has, `forecast.py` how long a job takes, by what a step
takes (`step_cost.py`).
`events/` takes rows while others run, and tells each token.
`drafts/` is what rows may go on with, `scores/` the calls that score what is given.
"""

from .generator import BatchGenerator as BatchGenerator
from .results import Result as Result
from .results import Score as Score
