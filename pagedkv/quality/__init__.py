"""Measures what a model loses when its cache keeps less: on texts, by ways of keeping.

`probes.py` has what is read, `variants.py` the ways of keeping K and V, `reading.py` reads the one
through the other beside the full cache, `measure.py` makes bytes, losses and a verdict of it,
`promise.py` judges them
by a wish, `picture.py` draws them.
"""

from .measure import Measured as Measured
from .measure import Quality as Quality
from .measure import measure_quality as measure_quality
from .promise import Promise as Promise
from .variants import Variant as Variant
from .variants import variant as variant
