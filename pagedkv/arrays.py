"""Types of the arrays that decisions are made of."""

from typing import Any

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.floating[Any]]
Tokens = npt.NDArray[np.int32]
