"""What each layer of a model keeps of a text, read from its configuration, without torch.

`kinds.py` knows which layers have K and V, a recurrent state, both or neither; `shapes.py` the
shapes of K and V; `states.py` the tensors of the states; `groups.py` what a cache is told of them.
"""

from .groups import DTYPE_BYTES, LayerGroup, StateLayer, layer_groups
from .kinds import CROSS, LayerKind, field_of, layer_kinds, shared_layers
from .shapes import LATENT, KVShape, kv_shapes, require_shape
from .states import state_tensors

__all__ = [
    "CROSS",
    "DTYPE_BYTES",
    "LATENT",
    "KVShape",
    "LayerGroup",
    "LayerKind",
    "StateLayer",
    "field_of",
    "kv_shapes",
    "layer_groups",
    "layer_kinds",
    "require_shape",
    "shared_layers",
    "state_tensors",
]
