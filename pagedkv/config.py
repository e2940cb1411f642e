"""What a cache is made of: layers, heads, page size and limits, and the bytes that follow.

Nothing here imports torch, so a budget can be computed anywhere; dtypes go by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import index
from typing import Any

_SIZES = (
    "num_layers",
    "num_kv_heads",
    "head_dim",
    "max_tokens",
    "page_size",
    "max_sequences",
)
DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2}


@dataclass(frozen=True)
class LayerGroup:
    """Layers that keep the same tokens and therefore share page tables.

    Attributes:
        layers: layer indices, ascending.
        window: tokens a query sees including itself, or None for all.
    """

    layers: tuple[int, ...]
    window: int | None = None


@dataclass(frozen=True)
class CacheConfig:
    """Shape and limits of a `PagedKVCache`.

    Attributes:
        num_layers: layers that have K and V.
        num_kv_heads: KV heads per layer (G).
        head_dim: elements per head (D).
        dtype: `float32`, `float16` or `bfloat16`.
        max_tokens: token slots of a group without a window.
        page_size: token slots per page (P).
        max_sequences: sequences alive at once.
        max_sequence_length: tokens one sequence may reach; default `max_tokens`.
        max_step_tokens: tokens one step may add over all sequences; default `max_tokens`, or
            16,384 if that is less and a group has a window (its pool grows with this number).
        rollback: tokens that may be taken back after commit in layers with a window.
        groups: layer groups; default one group without a window.
        fingerprint: identity of the weights; prefixes are shared only under the same one.
    """

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: str
    max_tokens: int
    page_size: int = 16
    max_sequences: int = 256
    max_sequence_length: int = 0  # 0: the default
    max_step_tokens: int = 0
    rollback: int = 0
    groups: tuple[LayerGroup, ...] = field(default=())
    fingerprint: bytes = b""

    def __post_init__(self) -> None:
        for name in _SIZES:
            _require_int(name, getattr(self, name), 1)
        for name in ["max_sequence_length", "max_step_tokens", "rollback"]:
            if getattr(self, name) is None:
                object.__setattr__(self, name, 0)
            _require_int(name, getattr(self, name), 0)
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"dtype: expected one of {', '.join(DTYPE_BYTES)}, got {self.dtype!r}")
        if not isinstance(self.fingerprint, bytes):
            raise TypeError(f"fingerprint: expected bytes, got {type(self.fingerprint).__name__}")
        longest = self.max_sequence_length or self.max_tokens
        object.__setattr__(self, "max_sequence_length", min(longest, self.max_tokens))
        if not self.groups:
            object.__setattr__(self, "groups", (LayerGroup(tuple(range(self.num_layers))),))
        if not self.max_step_tokens:
            windowed = any(group.window for group in self.groups)
            longest_step = min(self.max_tokens, 16_384) if windowed else self.max_tokens
            object.__setattr__(self, "max_step_tokens", longest_step)
        self._check_groups()

    def _check_groups(self) -> None:
        listed = sorted(layer for group in self.groups for layer in group.layers)
        if listed != list(range(self.num_layers)):
            raise ValueError(
                f"groups: expected every layer 0..{self.num_layers - 1} exactly once, got {listed}"
            )
        for group in self.groups:
            if not group.layers:
                raise ValueError("groups: expected at least one layer in every group, got none")
            if group.window is not None:
                _require_int("groups: window", group.window, 1)
        slots = self.page_size * max(self.num_pages(g) for g in range(len(self.groups)))
        if slots >= 2**31:
            raise ValueError(f"max_tokens: expected fewer than 2**31 slots a group, got {slots}")

    def num_pages(self, group: int = 0) -> int:
        """Pages of a group's pool."""
        full = -(-self.max_tokens // self.page_size)
        return min(full, self._window_pages(group) or full)

    def reserves(self, group: int) -> bool:
        """Whether this group can run out, so that reservations must be kept in it.

        A window group whose pool holds every sequence's window plus one step cannot.
        """
        enough = self._window_pages(group)
        return enough is None or enough > self.num_pages(group)

    def _window_pages(self, group: int) -> int | None:
        window = self.groups[group].window
        if window is None:
            return None
        # A window that starts inside a page touches one page more, and so does a step's end.
        held = -(-(window + self.rollback) // self.page_size) + 2
        return self.max_sequences * held + -(-self.max_step_tokens // self.page_size)

    def bytes_per_page(self, group: int = 0) -> int:
        """K and V bytes of one page over the layers of its group."""
        slot = 2 * self.num_kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]
        return slot * self.page_size * len(self.groups[group].layers)

    @cached_property
    def group_of(self) -> dict[int, int]:
        """The group of every layer."""
        return {layer: g for g, group in enumerate(self.groups) for layer in group.layers}

    @property
    def windows(self) -> list[int | None]:
        """The window of every layer."""
        return [self.groups[self.group_of[layer]].window for layer in range(self.num_layers)]

    @property
    def bytes_per_token(self) -> int:
        """K and V bytes of one token over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]

    @property
    def nbytes(self) -> int:
        """K and V bytes of all pools."""
        return sum(self.num_pages(g) * self.bytes_per_page(g) for g in range(len(self.groups)))

    @classmethod
    def from_model(cls, config: Any, *, max_tokens: int, **overrides: Any) -> CacheConfig:
        """Reads the shape of a decoder from its Hugging Face configuration object.

        Args:
            config: a `PretrainedConfig`, or anything with the same attributes.
            max_tokens: token slots of a group without a window.
            overrides: any other field of this class.

        Raises:
            ValueError: the layers are of a kind that pages cannot hold.
        """
        text = (
            config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
        )
        query_heads = text.num_attention_heads
        shape = {
            "num_layers": text.num_hidden_layers,
            "num_kv_heads": getattr(text, "num_key_value_heads", None) or query_heads,
            "head_dim": getattr(text, "head_dim", None) or text.hidden_size // query_heads,
            "dtype": str(getattr(text, "dtype", None) or "float32").removeprefix("torch."),
            "max_sequence_length": getattr(text, "max_position_embeddings", None) or 0,
            "groups": _layer_groups(text),
        }
        return cls(max_tokens=max_tokens, **{**shape, **overrides})


def _layer_groups(text: Any) -> tuple[LayerGroup, ...]:
    kinds: Sequence[str] | None = getattr(text, "layer_types", None)
    window = getattr(text, "sliding_window", None)
    if kinds is None:
        chunked = getattr(text, "attention_chunk_size", None) is not None
        kind = "sliding" if window else "chunked" if chunked else "full"
        kinds = [f"{kind}_attention"] * text.num_hidden_layers
    strange = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if strange:
        raise ValueError(f"config: layers of kind {', '.join(strange)} keep no pages")
    full = tuple(i for i, kind in enumerate(kinds) if kind == "full_attention")
    sliding = tuple(i for i, kind in enumerate(kinds) if kind == "sliding_attention")
    groups = (LayerGroup(full), LayerGroup(sliding, window))
    return tuple(group for group in groups if group.layers)


def _require_int(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name}: expected an int, got {type(value).__name__}")
    if index(value) < least:
        raise ValueError(f"{name}: expected at least {least}, got {value}")
