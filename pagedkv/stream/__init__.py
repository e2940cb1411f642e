"""Running a transformers model one layer at a time, from its safetensors files.

`skeleton.py` builds the model without weights, `coverage.py` compares it with the checkpoint,
`tensor_map.py` knows which bytes are which tensor, `weights.py` reads them, `layers.py` finds the
layers, `placement.py` gives each tensor its place, `lazy_tensor.py` stands in for streamed tensors,
`ring.py` brings layers, `experts/` brings the experts that are routed to, `embedding_head.py`
serves an embedding and a head that are not resident, `forwards.py` runs transformers' own forwards
with their weights, `pass_lock.py` lets in one thread at a time, `refusals.py` refuses uses that
need all weights at once, `streamer.py` opens and closes everything, `stats.py` reports.
"""

from .bandwidth import measure_experts as measure_experts
from .bandwidth import measure_link as measure_link
from .skeleton import find_folder as find_folder
from .stats import StreamStats as StreamStats
from .streamer import LayerStreamer as LayerStreamer
from .weights import WeightStore as WeightStore
