"""A cache's shape and limits, and the pages and bytes that follow from them, without torch.

`config.py` has `CacheConfig`: meanings, defaults and checks of combinations; `fields.py` lists the
fields as they are kept and as they may be given; `checks.py` refuses single fields; `sizes.py`
counts pages and bytes; `formats.py` reads the names of formats.
"""

from pagedkv.kernels.formats import KV_FORMATS
from pagedkv.models import DTYPE_BYTES, LayerGroup, StateLayer, field_of

from .config import CacheConfig, auto_page_size
from .fields import CacheFields, ModelPagesFields, ShapedFields
from .formats import format_pair, formats_of, needs_staging

__all__ = [
    "DTYPE_BYTES",
    "KV_FORMATS",
    "CacheConfig",
    "CacheFields",
    "LayerGroup",
    "ModelPagesFields",
    "ShapedFields",
    "StateLayer",
    "auto_page_size",
    "field_of",
    "format_pair",
    "formats_of",
    "needs_staging",
]
