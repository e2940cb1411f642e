"""Lets tests import `benchmarks`: without the repository root on sys.path, where `kernels` lies."""

import sys
from pathlib import Path
from types import ModuleType

package = ModuleType("benchmarks")
package.__path__ = [str(Path(__file__).resolve().parents[2] / "benchmarks")]
sys.modules.setdefault("benchmarks", package)
