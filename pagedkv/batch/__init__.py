"""Many prompts, one model: schedule, run, sample.

`generator.py` has the public class, `job.py` one call and its loop, `rows.py` and `results.py` the
data. `scheduler.py` decides which rows a step computes, `runner.py` computes it through `packed.py`
or `graphs.py`. `sampling.py` chooses tokens by the rules that `options.py` reads; `drawing.py`
draws them, from the `candidates.py` where these are enough. `preemption.py` puts rows back.
`calls.py` checks what a call is given: `prompts.py` says what prompts may be, `encoder.py` makes
ids of them, `chats.py` passes messages through their template. `image_prompts.py` says by which
text images are found, `step_images.py` gives them to the model. `widths.py` says how many tokens a
step has, `forecast.py` how long a job takes, from the time of a step (`step_cost.py`).
`events/` takes rows while others run, and makes each token an event.
`drafts/` guesses tokens ahead, `scores/` scores given continuations.
"""

from .generator import BatchGenerator as BatchGenerator
from .results import Result as Result
from .results import Score as Score
