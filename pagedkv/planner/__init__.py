"""What fits: weights, KV pages, ring and workspace of a model under one memory budget.

`settings.py` reads a configuration, `shapes.py` weighs its layers, `items.py` says what a placement
costs, `place.py` chooses one, `plan.py` is the answer and `table.py` prints it. No torch: a plan is
made for a machine that need not be at hand.
"""

from .place import plan_memory as plan_memory
from .plan import MemoryPlan as MemoryPlan
