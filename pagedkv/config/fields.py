"""The fields of `CacheConfig`: as they are kept, and as they may be given.

Editors and type checkers read the types of given fields where a function passes them on.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from os import PathLike
from typing import TYPE_CHECKING, Any, Literal, TypedDict

from pagedkv.models import LayerGroup, StateLayer

if TYPE_CHECKING:
    from pagedkv.retention import Policy


@dataclass(frozen=True)
class Fields:
    """The fields with their defaults; `CacheConfig` describes each."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    max_tokens: int
    page_size: int = "auto"  # type: ignore[assignment]
    max_sequences: int = None  # type: ignore[assignment]
    max_sequence_length: int = 0  # 0: the default
    max_step_tokens: int = 0
    rollback: int = 0
    groups: tuple[LayerGroup, ...] = field(default=())
    fingerprint: bytes = b""
    kv_format: str | tuple[str, str] = "dense"
    growth_step: int | None = None
    read_tokens: int | None = None
    retention: str | Policy | None = None
    budget: int | None = None
    keep: float | None = None
    high_water: float = 0.95
    low_water: float = 0.90
    host_tokens: int = 0
    states: tuple[StateLayer, ...] = ()
    max_states: int = 0  # 0: the default


class CacheFields(TypedDict, total=False):
    """The fields that callers may give if the model is known; `CacheConfig` describes each."""

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
    keep: float | None
    high_water: float
    low_water: float
    host_tokens: int | None
    states: tuple[StateLayer, ...]
    max_states: int | None


class ModelPagesFields(CacheFields, total=False):
    """The fields of pages that are made for a model, with files beside them."""

    trace: str | PathLike[str] | None
    prefix_store: str | PathLike[str] | None


class ShapedFields(CacheFields, total=False):
    """All fields but `max_tokens`, with the shape that is otherwise read from a model."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: Any  # a name, or a dtype of torch, which is not imported here


class ChangedFields(ShapedFields, total=False):
    """All fields, to change an existing configuration."""

    max_tokens: int
