"""What a model is: what its layers keep of a text, what it weighs, why pages cannot serve it.

`facts.py` has what a type does without its configuration saying so; `names.py` reads a
configuration by one set of names; `kinds.py` knows which layers have K and V, a recurrent state,
both or neither; `shapes.py` the shapes of K and V; `states.py` the tensors of the states;
`groups.py` what a cache is told of them; `refusals.py` why a model cannot use pages. These are
without torch. `skeleton.py` is the model without weights, by transformers' own classes.
"""

from .facts import facts_of, types_with
from .groups import DTYPE_BYTES, LayerGroup, StateLayer, layer_groups
from .kinds import LayerKind, field_of, layer_kinds, shared_layers
from .shapes import KVShape, kv_shapes, require_shape
from .states import state_tensors

__all__ = [
    "DTYPE_BYTES",
    "KVShape",
    "LayerGroup",
    "LayerKind",
    "StateLayer",
    "facts_of",
    "field_of",
    "kv_shapes",
    "layer_groups",
    "layer_kinds",
    "require_shape",
    "shared_layers",
    "state_tensors",
    "types_with",
]
