"""Running a transformers model one layer at a time, from its safetensors files.

`skeleton.py` builds the model without weights and holds it against the checkpoint, `origins.py`
knows which bytes are which tensor, `weights.py` reads them, `layers.py` finds the layers,
`placing.py` gives each tensor its place, `absent.py` stands where one streams, `ring.py` brings
them, `experts/` brings those of a mixture that are asked for, `embedding_head.py` serves an
embedding and a head that are not resident, `passing.py` runs transformers' own forwards with what
they need, `refusals.py` refuses what needs all weights at once, `streamer.py` opens and closes it
all, `stats.py` reports.
"""

from .link import measure_experts as measure_experts
from .link import measure_link as measure_link
from .skeleton import find_folder as find_folder
from .stats import StreamStats as StreamStats
from .streamer import LayerStreamer as LayerStreamer
from .weights import WeightStore as WeightStore
