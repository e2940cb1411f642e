"""A model: what its layers keep of a text, what it weighs, why pages cannot serve it.

`facts.py` has what a type does without its configuration saying so; `names.py` reads a
configuration by one set of names, `defaults.py` what a file leaves to the class of transformers,
`layer_names.py` which layers it lists or leaves to a rule; `kinds.py` knows which layers have K and
V, a recurrent state, both or neither; `shapes.py` the shapes of K and V; `states.py` the tensors of
the states; `groups.py` what a cache is told of them; `refusals.py` why a model cannot use pages.
`checkpoint.py` reads where a folder has its tensors, `headers.py` which weights these are,
`packing.py` in how many bits a quantised one has them. `model.py` asks all of these, `weighing.py`
says what the weights take. They are without torch. `skeleton.py` is the model without weights, by
transformers' own classes.
"""

from .facts import facts_of, types_with
from .groups import DTYPE_BYTES, LayerGroup, StateLayer, paged_layers
from .kinds import LayerKind, attending_again, field_of, layer_kinds, shared_layers
from .shapes import KVShape, kv_shapes, require_shape
from .states import state_tensors

__all__ = [
    "DTYPE_BYTES",
    "KVShape",
    "LayerGroup",
    "LayerKind",
    "StateLayer",
    "attending_again",
    "facts_of",
    "field_of",
    "kv_shapes",
    "layer_kinds",
    "paged_layers",
    "require_shape",
    "shared_layers",
    "state_tensors",
    "types_with",
]
