"""What fits: weights, KV pages, ring and workspace of a model under one memory budget.

`settings.py` reads a configuration, `shapes.py` weighs its layers, `ranks.py` shares them out among
processes, `costs.py` says what a placement costs, `search.py` chooses one, `advice.py` says what
else would fit. `outcome.py` is the answer, `table.py` prints it; `gpus.py` knows cards, `sizes.py`
reads memory as people write it. No torch: a plan is made for a machine that need not be at hand.
`shards.py` cuts a job for several processes.
"""

from .plan import MemoryPlan as MemoryPlan
from .search import plan_memory as plan_memory
