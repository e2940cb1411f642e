"""Handles the differences between the releases of transformers that are served.

From 5.24 on models take and return their cache as `cache`; before it was `past_key_values`. A
user's own model may still use the old word under a new release, so its signature decides.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

import transformers
from packaging.version import Version
from transformers.generation import GenerationMixin

from .signature import parameters_of
from .telling import warn

OLDEST, NEWEST = "5.17.0", "5.24.0"  # releases that the tests run with, see docs/compat.md
NAMES = ("cache", "past_key_values")


# The word that `generate` takes; errors about its arguments use it.
_TAKEN = inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
CACHE: str = next((name for name in NAMES if name in _TAKEN), NAMES[0])
# Before 5.24 layers with gradient checkpointing took no cache in training, even without gradients.
CHECKPOINTS_TAKE_NO_CACHE = Version(transformers.__version__) < Version("5.24.0")


def cache_argument(model: Any) -> str:
    """The name by which a model's forward takes its cache.

    A forward that passes on any keyword gets the word of its parent class, or of `generate`.
    """
    accepted = parameters_of(model)
    return next((name for name in NAMES if name in accepted), CACHE)


def shared_out(ranks: int, experts: bool = False) -> Any:
    """Makes the `DistributedConfig` by which `ranks` processes share out a model.

    Args:
        experts: each process has some whole experts, not a part of every one. In releases without
            `ep_size` (5.17) all else stays whole.
    """
    from transformers.distributed import DistributedConfig

    if not experts:
        return DistributedConfig(tp_size=ranks)
    if hasattr(DistributedConfig, "ep_size"):
        return DistributedConfig(tp_size=ranks, ep_size=ranks)
    return DistributedConfig(tp_size=ranks, enable_expert_parallel=True)


@functools.cache
def warn_if_untested(release: str = transformers.__version__) -> None:
    """Warns once if transformers is newer than the newest tested release."""
    if Version(release).release > Version(NEWEST).release:
        warn(
            f"transformers {release} is newer than {NEWEST}, the newest that pagedkv was tested "
            "with; `pagedkv check MODEL` holds your model against its own cache"
        )
