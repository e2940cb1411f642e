"""A small model whose losses are measured, and what it makes of the texts with everything kept."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType

import pytest

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

# The repository root stays off sys.path, where a folder called kernels lies.
package = ModuleType("benchmarks")
package.__path__ = [str(Path(__file__).resolve().parents[2] / "benchmarks")]
sys.modules.setdefault("benchmarks", package)


def _load(path, **changes):
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, **changes)
    return model.eval(), transformers.AutoTokenizer.from_pretrained(path)


@pytest.fixture(scope="session")
def few_layers(smollm2_path):
    """Four layers of the small model, for what does not depend on how well it predicts."""
    from benchmarks.quality import Quality

    return Quality(*_load(smollm2_path, num_hidden_layers=4), tokens=256)


@pytest.fixture(scope="session")
def quality(smollm2_path):
    """The small model; the full cache reads all probes once for all gates."""
    from benchmarks.quality import Quality

    quality = Quality(*_load(smollm2_path))
    assert quality.full
    return quality


@pytest.fixture(scope="session")
def read(quality):
    """Readings of probes by a way, each made once."""
    done = {}

    def read(way, *names):
        if missing := [name for name in names if (way.name, name) not in done]:
            readings = quality.read(way, missing)
            done.update({(way.name, name): reading for name, reading in readings.items()})
        return [done[way.name, name] for name in names]

    return read


@pytest.fixture(scope="session")
def worse(quality, read):
    """By how much a way worsens perplexity where every budget is exhausted: the second half."""

    def worse(way, name):
        half = len(quality.probes[name].ids) // 2
        (reading,) = read(way, name)
        return reading.perplexity_since(half) / quality.full[name].perplexity_since(half) - 1

    return worse
