"""Experts that are read when tokens are routed to them, instead of with their layer.

`modules.py` says which experts can be read alone, `files.py` reads experts,
`residency.py` knows which are in memory, `rows.py` and `slots.py` compute them: on a CPU in their
own rows of a layer's tensors, on a card in slots. `memory.py` has the memory of rows.
"""

from pagedkv.models.skeleton import experts_in as experts_in

from .files import ExpertFiles as ExpertFiles
from .memory import WideMemory as WideMemory
from .memory import mappings_of as mappings_of
from .memory import most_mappings as most_mappings
from .memory import moves as moves
from .modules import require_index as require_index
from .modules import require_supported as require_supported
from .modules import size_read_alone as size_read_alone
from .residency import MOST_ALONE as MOST_ALONE
from .residency import Experts as Experts
from .rows import RowExperts as RowExperts
from .slots import SlottedExperts as SlottedExperts
from .slots import Staging as Staging
from .slots import Trust as Trust
