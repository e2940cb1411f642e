"""A paged KV cache to import: pages, copy-on-write prefix sharing, attention over pages.

Names are loaded when first used, so that `import pagedkv` is cheap and pulls in nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .attention import AttentionPlan as AttentionPlan
    from .attention import attend_again as attend_again
    from .attention import attend_pages as attend_pages
    from .attention import paged_attention as paged_attention
    from .attention import tree_of as tree_of
    from .attention import write_kv as write_kv
    from .attention import write_pages as write_pages
    from .batch import BatchGenerator as BatchGenerator
    from .batch import Result as Result
    from .batch import Score as Score
    from .cache import PagedKVCache as PagedKVCache
    from .cache.pressure import Pressure as Pressure
    from .cache.pressure import offload_idle as offload_idle
    from .config import CacheConfig as CacheConfig
    from .config import LayerGroup as LayerGroup
    from .errors import BudgetExceeded as BudgetExceeded
    from .errors import OutOfPagesError as OutOfPagesError
    from .errors import PagedKVError as PagedKVError
    from .hf import PagedCache as PagedCache
    from .hf import attach as attach
    from .hf import detach as detach
    from .pages.stats import CacheStats as CacheStats
    from .planner import MemoryPlan as MemoryPlan
    from .planner import plan_memory as plan_memory
    from .planner.shards import split_by_prefix as split_by_prefix
    from .saving.store import PrefixStore as PrefixStore
    from .step.metadata import StepMetadata as StepMetadata
    from .stream import LayerStreamer as LayerStreamer

__version__ = "0.1.0"

_HOME = {
    "AttentionPlan": "attention",
    "BatchGenerator": "batch",
    "BudgetExceeded": "errors",
    "CacheConfig": "config",
    "CacheStats": "pages.stats",
    "LayerGroup": "config",
    "LayerStreamer": "stream",
    "MemoryPlan": "planner",
    "OutOfPagesError": "errors",
    "PagedCache": "hf",
    "PagedKVCache": "cache",
    "PagedKVError": "errors",
    "PrefixStore": "saving.store",
    "Result": "batch",
    "Score": "batch",
    "Pressure": "cache.pressure",
    "StepMetadata": "step.metadata",
    "attach": "hf",
    "attend_again": "attention",
    "attend_pages": "attention",
    "detach": "hf",
    "offload_idle": "cache.pressure",
    "paged_attention": "attention",
    "plan_memory": "planner",
    "split_by_prefix": "planner.shards",
    "tree_of": "attention",
    "write_kv": "attention",
    "write_pages": "attention",
}
__all__ = sorted(_HOME)


if not TYPE_CHECKING:  # a checker that knew of it would take any name for one of ours

    def __getattr__(name: str) -> object:
        if name not in _HOME:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        try:
            return getattr(import_module(f".{_HOME[name]}", __name__), name)
        except ModuleNotFoundError as error:
            if error.name != "transformers":
                raise
            raise ImportError(f"{name} needs transformers: pip install 'pagedkv[hf]'") from error


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
