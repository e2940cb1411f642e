"""The fields of `CacheConfig`, for those who pass them on: editors and type checkers read these."""

from __future__ import annotations

from os import PathLike
from typing import TYPE_CHECKING, Any, Literal, TypedDict

if TYPE_CHECKING:
    from .layers import LayerGroup, StateLayer
    from .retention import Policy


class CacheFields(TypedDict, total=False):
    """What may be said of a cache whose model is known; `CacheConfig` has what each means."""

    page_size: int | Literal["auto"]
    max_sequences: int | None
    max_sequence_length: int | None
    max_step_tokens: int | None
    rollback: int | None
    groups: tuple[LayerGroup, ...]
    fingerprint: bytes
    kv_format: str | tuple[str, str]
    growth_step: int | None
    read_tokens: int | None
    retention: str | Policy | None
    budget: int | None
    high_water: float
    low_water: float
    host_tokens: int | None
    states: tuple[StateLayer, ...]
    max_states: int | None


class ModelPagesFields(CacheFields, total=False):
    """The same for pages that are made for a model, and the file they are recorded in."""

    trace: str | PathLike[str] | None


class ShapedFields(CacheFields, total=False):
    """The same, with the shape that is else read from a model."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: Any  # a name, or a dtype of torch, which is not imported here
