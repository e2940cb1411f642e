"""A model: what its layers keep of a text, what it weighs, why pages cannot serve it.

`facts.py` has facts of a type that its configuration does not say; `names.py` reads a configuration
by one set of names, `defaults.py` the values that a file leaves to the class of transformers, and
`layer_names.py` the kinds of layers that a file lists or leaves to a rule. `kinds.py` finds which
layers have K and V, a recurrent state, both or neither; `shapes.py` the shapes of K and V;
`states.py` the tensors of the states; `groups.py` makes fields of a cache of them; `refusals.py`
says why a model cannot use pages. `checkpoint.py` reads where a folder has its tensors,
`headers.py` which weights these are, `packing.py` how many bits a quantised weight takes.
`model.py` asks all of these, `weighing.py` counts the bytes of weights. None of them needs torch.
`skeleton.py` makes the model without weights, by transformers' own classes.
"""

from .facts import facts_of as facts_of
from .facts import types_with as types_with
from .groups import DTYPE_BYTES as DTYPE_BYTES
from .groups import LayerGroup as LayerGroup
from .groups import StateLayer as StateLayer
from .groups import paged_layers as paged_layers
from .kinds import LayerKind as LayerKind
from .kinds import attending_again as attending_again
from .kinds import field_of as field_of
from .kinds import layer_kinds as layer_kinds
from .kinds import shared_layers as shared_layers
from .shapes import KVShape as KVShape
from .shapes import kv_shapes as kv_shapes
from .shapes import require_shape as require_shape
from .states import state_tensors as state_tensors
