"""The kernels' checks of `tests/kernels/correctness.py` on a device, with nothing but torch.

A package that calls itself `tests` may be installed on a machine with a card: this one is meant.
"""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

package = ModuleType("tests")
package.__path__ = [str(Path(__file__).resolve().parents[2] / "tests")]
sys.modules.setdefault("tests", package)

from tests.kernels import tried  # noqa: E402
from tests.kernels.correctness import cases, main  # noqa: E402, F401  cases: of precompile.py

if __name__ == "__main__":
    # The device, and a name of `proved.py` if the cases of what is off shall run.
    sys.exit(bool((main if len(sys.argv) < 3 else tried.main)(*sys.argv[1:])))
