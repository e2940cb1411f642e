"""A layer's call: check, write, attend, with the backend that was chosen for the cache."""

from .api import attend_again as attend_again
from .api import paged_attention as paged_attention
from .api import write_kv as write_kv
from .own_pages import attend_pages as attend_pages
from .own_pages import write_pages as write_pages
from .own_plan import AttentionPlan as AttentionPlan
from .tree import tree_of as tree_of
