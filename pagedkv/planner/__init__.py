"""Plans memory: weights, KV pages, ring and workspace of a model under one budget.

`model_shape.py` sums up a model part by part, `passes.py` counts the numbers that a pass holds at
once, `ranks.py` shares layers out among processes. `placement.py` has the decisions of a plan,
`costs.py` their costs; `choice.py` and `search.py` find the best, `advice.py` says what else would
fit, or be faster. `outcome.py` is the answer, `table.py` prints it; `gpus.py` knows cards,
`byte_sizes.py` reads memory as people write it. A plan of a checkpoint needs no torch, nor the
machine that it is for. `shards.py` cuts a job for several processes.
"""

from .plan import MemoryPlan as MemoryPlan
from .search import plan_memory as plan_memory
