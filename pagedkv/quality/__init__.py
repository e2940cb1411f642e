"""Measures on texts how much a model loses if its cache keeps less.

`probes.py` has the texts, `variants.py` the ways of keeping K and V, `reading.py` reads texts
through variants beside the full cache, `measure.py` computes bytes, losses and a verdict,
`promise.py` finds the smallest variant below a wished KL, `picture.py` draws all.
"""

from .measure import Measured as Measured
from .measure import Quality as Quality
from .measure import measure_quality as measure_quality
from .promise import Promise as Promise
from .variants import Variant as Variant
from .variants import variant as variant
