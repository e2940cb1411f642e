"""The shape of a cache: layers, heads, page size and limits, and the bytes that follow.

Nothing here imports torch, so a budget can be computed anywhere; dtypes go by name.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from functools import cached_property
from operator import index
from typing import TYPE_CHECKING, Any

from .errors import UnsupportedModelError
from .kernels.formats import DENSE, Format
from .kernels.formats import KV_FORMATS as KV_FORMATS
from .layers import DTYPE_BYTES as DTYPE_BYTES
from .layers import (
    KVShape,
    kv_shapes,
    layer_groups,
    layer_kinds,
    require_shape,
    state_tensors,
)
from .layers import LayerGroup as LayerGroup
from .layers import StateLayer as StateLayer
from .layers import field_of as field_of

if TYPE_CHECKING:
    from typing import Unpack

    from .fields import CacheFields, ShapedFields
    from .retention import Policy

_SIZES = (
    "num_layers",
    "num_kv_heads",
    "head_dim",
    "max_tokens",
    "page_size",
    "max_sequences",
)


@dataclass(frozen=True)
class CacheConfig:
    """Shape and limits of a `PagedKVCache`.

    Attributes:
        num_layers: layers that have K and V.
        num_kv_heads: KV heads per layer (G), in groups that say nothing else.
        head_dim: elements per head (D), in groups that say nothing else.
        dtype: `float32`, `float16` or `bfloat16`; torch's own dtypes are taken for their names.
        max_tokens: token slots of a group without a window.
        page_size: token slots per page (P); "auto" is 16, or 32 with int4 without `read_tokens`.
        max_sequences: sequences alive at once; default 256, with int4 one for every 512 of
            `max_tokens` (at least 8, at most 256), because each has staging pages of its own.
        max_sequence_length: tokens one sequence may reach; default `max_tokens`.
        max_step_tokens: tokens one step may add over all sequences; default `max_tokens`, or
            16,384 if that is less and a group has a window (its pool grows with this number).
        rollback: tokens that may be taken back after commit in layers with a window.
        groups: layer groups; default one group without a window.
        fingerprint: identity of the weights; prefixes are shared only under the same one.
        host_tokens: token slots of a host tier in every layer group, for `offload` and for prefixes
            that would be lost; 0 for none. Its memory, pinned on CUDA, is taken when it is first
            needed.
        kv_format: how K and V are kept: a name out of `KV_FORMATS`, such as `dense` (in `dtype`),
            or a pair, one for K and one for V. `docs/formats.md` says what each costs.
        growth_step: the pool grows by this many tokens at a time, up to `max_tokens`; default: all
            pages exist from the start.
        read_tokens: in longer texts a decoding query reads only this many tokens, rounded down to
            whole pages, which it chooses itself; default all. Layers with a window ignore it.
        retention: which pages of a sequence stay when not all can: a name out of
            `pagedkv.retention.POLICIES` or a `Policy`; None: all stay. Groups with a window ignore
            it.
        budget: tokens a sequence keeps per layer group, rounded up to whole pages; the page being
            written comes on top. None: pages are evicted only where memory runs short.
        high_water: share of a pool's pages; where a step would make more pages live, sequences lose
            pages.
        low_water: share of a pool's pages that stays live when sequences lose pages.
        states: the state layers, in the model's order; none for a model of attention alone.
        max_states: state slots that may be in use at once, by sequences and checkpoints; default
            `max_sequences`. Memory is taken as slots are first used.
    """

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
    high_water: float = 0.95
    low_water: float = 0.90
    host_tokens: int = 0
    states: tuple[StateLayer, ...] = ()
    max_states: int = 0  # 0: the default

    if TYPE_CHECKING:  # what may be given is more than what is there once constructed

        def __init__(
            self,
            num_layers: int,
            num_kv_heads: int,
            head_dim: int,
            dtype: Any,
            max_tokens: int,
            **fields: Unpack[CacheFields],
        ) -> None: ...

    else:

        def __new__(cls, *args: Any, **given: Any) -> CacheConfig:
            for name in given:
                if name not in cls.__dataclass_fields__:
                    near = get_close_matches(name, cls.__dataclass_fields__, 1)
                    advice = f"; did you mean {near[0]}?" if near else ""
                    raise TypeError(f"{name}: CacheConfig has no such field{advice}")
            return super().__new__(cls)

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", _dtype_name(self.dtype))
        object.__setattr__(self, "kv_format", format_pair(self.kv_format))
        size = auto_page_size(self.page_size, self.kv_format, bool(self.read_tokens))
        object.__setattr__(self, "page_size", size)
        if self.max_sequences is None:
            _require_int("max_tokens", self.max_tokens, 1)
            most = max(8, min(256, self.max_tokens // 512)) if self.staged else 256
            object.__setattr__(self, "max_sequences", most)
        for name in _SIZES:
            _require_int(name, getattr(self, name), 1)
        for name in [
            "max_sequence_length",
            "max_step_tokens",
            "rollback",
            "host_tokens",
            "max_states",
        ]:
            if getattr(self, name) is None:
                object.__setattr__(self, name, 0)
            _require_int(name, getattr(self, name), 0)
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"dtype: expected one of {', '.join(DTYPE_BYTES)}, got {self.dtype!r}")
        if not isinstance(self.fingerprint, bytes):
            raise TypeError(f"fingerprint: expected bytes, got {type(self.fingerprint).__name__}")
        if self.growth_step is not None:
            _require_int("growth_step", self.growth_step, 1)
            if self.growth_step > self.max_tokens:
                raise ValueError(
                    f"growth_step: expected at most max_tokens = {self.max_tokens}, got "
                    f"{self.growth_step}"
                )
        longest = self.max_sequence_length or self.max_tokens
        if self.retention is None:  # else a text may be longer than what is kept of it
            longest = min(longest, self.max_tokens)
        object.__setattr__(self, "max_sequence_length", longest)
        if not self.groups:
            object.__setattr__(self, "groups", (LayerGroup(tuple(range(self.num_layers))),))
        if not self.max_step_tokens:
            windowed = any(group.window for group in self.groups)
            longest_step = min(self.max_tokens, 16_384) if windowed else self.max_tokens
            object.__setattr__(self, "max_step_tokens", longest_step)
        self._check_groups()
        self._check_states()
        self._check_format()
        if self.read_tokens is not None:
            _require_int("read_tokens", self.read_tokens, 4 * self.page_size)
            if all(group.window for group in self.groups):
                raise ValueError("read_tokens: expected layers without a window, all have one")
            if any(shape.v_is_k for shape in self.shapes):
                raise ValueError("read_tokens: latents, whose V is a part of K, are read whole")
        self._check_retention()

    def _check_format(self) -> None:
        for side, format in enumerate(self.formats):
            name, unit = format.kv_format, format.dim_unit
            for shape in () if format.dense else self.shapes:
                if shape.v_is_k:
                    raise ValueError(
                        f"kv_format: latents, whose V is a part of K, are kept dense, got {name}"
                    )
                if shape[1 + side] % unit:
                    raise ValueError(
                        f"kv_format: {name} needs a {'v_' * side}head_dim that is a multiple of "
                        f"{unit}, got {shape[1 + side]}"
                    )
            if format.staged and self.page_size % 16:
                raise ValueError(
                    f"kv_format: {name} needs a page_size that is a multiple of 16, got "
                    f"{self.page_size}"
                )

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
            for name in ("num_kv_heads", "head_dim", "v_head_dim"):
                _require_int(f"groups: {name}", getattr(group, name), 0)
            if not isinstance(group.v_is_k, bool):
                raise TypeError(
                    f"groups: v_is_k: expected a bool, got {type(group.v_is_k).__name__}"
                )
        for shape in self.shapes:
            if shape.v_is_k and shape.v_head_dim > shape.head_dim:
                raise ValueError(
                    "groups: v_is_k: expected a v_head_dim of at most head_dim = "
                    f"{shape.head_dim}, got {shape.v_head_dim}"
                )
        pages = [self.num_pages(g) + self.num_staging_pages(g) for g in range(len(self.groups))]
        slots = self.page_size * max(pages)
        if slots >= 2**31:
            raise ValueError(f"max_tokens: expected fewer than 2**31 slots a group, got {slots}")

    def _check_states(self) -> None:
        for layer in self.states:
            if not isinstance(layer, StateLayer) or not layer.tensors:
                raise TypeError(f"states: expected StateLayers with tensors, got {layer!r:.200}")
            for shape, dtype in layer.tensors:
                if dtype not in DTYPE_BYTES:
                    raise ValueError(
                        f"states: expected a dtype of {', '.join(DTYPE_BYTES)}, got {dtype!r}"
                    )
                for size in shape:
                    _require_int("states: shape", size, 1)
        if not self.states:
            object.__setattr__(self, "max_states", 0)
        elif not self.max_states:
            object.__setattr__(self, "max_states", self.max_sequences)

    def _check_retention(self) -> None:
        policy = self.policy
        if self.budget is not None:
            _require_int("budget", self.budget, 1)
            if policy is None:
                raise ValueError('budget: needs retention=, for example retention="keydiff"')
        for name in ("low_water", "high_water"):
            share = getattr(self, name)
            if isinstance(share, bool) or not isinstance(share, (int, float)):
                raise TypeError(f"{name}: expected a share of 1, got {type(share).__name__}")
        if not 0 < self.low_water <= self.high_water <= 1:
            raise ValueError(
                "low_water, high_water: expected 0 < low_water <= high_water <= 1, got "
                f"{self.low_water} and {self.high_water}"
            )
        if policy is None:
            return
        if all(group.window for group in self.groups):
            raise ValueError("retention: expected layers without a window, all have one already")
        if policy.merges and not self.dense:
            raise ValueError(
                f"retention: {policy} merges values, which needs dense pages; got "
                f"kv_format {self.kv_format}"
            )
        if policy.merges and any(shape.v_is_k for shape in self.shapes):
            raise ValueError(f"retention: {policy} merges values, which latents have none of")
        pinned, budget = policy.pinned_pages(self.page_size), self.budget_pages
        if budget is not None and budget < pinned:
            raise ValueError(
                f"budget: expected at least {pinned * self.page_size} tokens, as this policy never "
                f"gives up {pinned} of the pages of a sequence, got {self.budget}"
            )

    @cached_property
    def policy(self) -> Policy | None:
        """The policy that `retention` names, or is."""
        if self.retention is None:
            return None
        from .retention import policy_of  # here: whoever plans a budget needs no numpy

        return policy_of(self.retention)

    @property
    def budget_pages(self) -> int | None:
        """Whole pages of a sequence that stay in each group."""
        return None if self.budget is None else -(-self.budget // self.page_size)

    def num_pages(self, group: int = 0) -> int:
        """Pages of a group's pool, staging pages not counted."""
        full = -(-self.max_tokens // self.page_size)
        if self.staged:  # the first page of a text is always a staging page
            texts = 1 if self.budget_pages is None else full // self.budget_pages
            full = max(1, full - min(max(texts, 1), self.max_sequences))
        return min(full, self._window_pages(group) or full)

    def pages_at_once(self, group: int = 0) -> int:
        """Pages that a group's pool begins with and grows by: all of them, unless it grows."""
        if self.growth_step is None:
            return self.num_pages(group)
        return min(-(-self.growth_step // self.page_size), self.num_pages(group))

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

    @cached_property
    def shapes(self) -> tuple[KVShape, ...]:
        """The shape of K and V in every group."""
        shapes = []
        for group in self.groups:
            dim = group.head_dim or self.head_dim
            heads = group.num_kv_heads or self.num_kv_heads
            shapes.append(KVShape(heads, dim, group.v_head_dim or dim, group.v_is_k))
        return tuple(shapes)

    @cached_property
    def formats(self) -> tuple[Format, Format]:
        """The formats of K and V pages."""
        return formats_of(self.kv_format)

    @property
    def dense(self) -> bool:
        """Whether K and V are kept in `dtype`."""
        return all(format.dense for format in self.formats)

    @property
    def staged(self) -> bool:
        """Whether pages are written in `dtype` first and coded once they are complete."""
        return any(format.staged for format in self.formats)

    def num_staging_pages(self, group: int = 0) -> int:
        """Staging pages of a group: two a sequence, for its first page and the newest.

        A step that completes a sequence's newest page and begins another holds both until it is
        committed; half of all sequences can do so at once.
        """
        return (5 * self.max_sequences + 1) // 2 if self.staged else 0

    @property
    def pages_read(self) -> int:
        """Pages of a text that a decoding query reads; 0 for all."""
        return (self.read_tokens or 0) // self.page_size

    def keeps_bounds(self, group: int) -> bool:
        """Whether the bounds of each page's keys are kept apart; scales of K may say them."""
        chosen = self.read_tokens and self.groups[group].window is None
        return bool(chosen) and not self.formats[0].says_bounds

    def num_host_pages(self, group: int = 0) -> list[int]:
        """Host pages of a group; with staging pages, how many of them there may be as well."""
        pages = -(-self.host_tokens // self.page_size)
        return [pages, min(pages, self.num_staging_pages(group))] if self.staged else [pages]

    def bytes_per_page(self, group: int = 0) -> int:
        """K and V bytes of one page over the layers of its group, with scales and bounds."""
        shape = self.shapes[group]
        page = self._head_bytes(shape, self.formats)
        page += 4 * shape.head_dim * self.keeps_bounds(group)
        return page * shape.num_kv_heads * len(self.groups[group].layers)

    def bytes_per_staging_page(self, group: int = 0) -> int:
        """K and V bytes of one staging page over the layers of its group."""
        shape = self.shapes[group]
        page = self._head_bytes(shape, (DENSE, DENSE))
        return page * shape.num_kv_heads * len(self.groups[group].layers)

    def _head_bytes(self, shape: KVShape, formats: tuple[Format, Format]) -> int:
        """K and V bytes of one page and head."""
        sides = [(formats[0], shape.head_dim)]
        if not shape.v_is_k:
            sides.append((formats[1], shape.v_head_dim))
        wide = DTYPE_BYTES[self.dtype]
        return sum(format.nbytes(self.page_size, dim, wide) for format, dim in sides)

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
        """K and V bytes of one token over all layers, staging pages not counted."""
        pages = sum(self.bytes_per_page(group) for group in range(len(self.groups)))
        return -(-pages // self.page_size)

    @property
    def bytes_per_state(self) -> int:
        """Bytes of one state slot over all state layers."""
        return sum(layer.nbytes for layer in self.states)

    @property
    def nbytes(self) -> int:
        """K and V bytes of all pools at their largest, staging pages and static scales included."""
        return self._nbytes([self.num_pages(g) for g in range(len(self.groups))])

    @property
    def nbytes_at_once(self) -> int:
        """K and V bytes of all pools as they begin, staging pages and static scales included."""
        return self._nbytes([self.pages_at_once(g) for g in range(len(self.groups))])

    def _nbytes(self, pages: Sequence[int]) -> int:
        static = sum(format.static for format in self.formats)
        total = 0
        for g, count in enumerate(pages):
            quads = -(-self.shapes[g].num_kv_heads // 4)
            total += 16 * static * len(self.groups[g].layers) * quads
            total += count * self.bytes_per_page(g)
            total += self.num_staging_pages(g) * self.bytes_per_staging_page(g)
        return total

    @cached_property
    def larger_than_int8(self) -> str:
        """What takes less, where int8 would, because of staging pages; else empty.

        A difference of less than 4 MiB is not spoken of.
        """
        if not self.staged:
            return ""
        int8, most = replace(self, kv_format="int8").nbytes, self.max_sequences
        if self.nbytes - int8 < 4 << 20:
            return ""
        fitting = [n for n in range(1, most) if replace(self, max_sequences=n).nbytes < int8]
        fewer = f"max_sequences={fitting[-1]}, or int8," if fitting else "int8"
        names = " and ".join(dict.fromkeys(self.kv_format))
        return (
            f"{names} takes {self.nbytes / 2**20:,.1f} MiB here, int8 {int8 / 2**20:,.1f}: each of "
            f"{most} sequences has staging pages in {self.dtype}; {fewer} takes less"
        )

    @classmethod
    def from_model(
        cls, config: Any, *, max_tokens: int, **overrides: Unpack[ShapedFields]
    ) -> CacheConfig:
        """Reads the shape of a decoder from its Hugging Face configuration object.

        Layers are counted as `pagedkv.layers.layer_kinds` does: those with K and V, and apart from
        them those with a recurrent state.

        Args:
            config: a `PretrainedConfig`, or anything with the same attributes.
            max_tokens: token slots of a group without a window.
            overrides: any other field of this class. With `retention` each layer is a group of
                its own, so that it chooses for itself, unless `groups` says otherwise.

        Raises:
            UnsupportedModelError: the shape of its K and V, or of its states, is not known.
            ValueError: pages cannot hold layers of this kind, or an attribute for their shape is
                missing.
        """
        text = (
            config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
        )
        require_shape(text)
        kinds = layer_kinds(text)
        if all(kind.attention is None for kind in kinds):
            raise UnsupportedModelError("config: no layer has K and V, so there is nothing to page")
        dtype = _dtype_name(overrides.get("dtype") or field_of(text, "dtype") or "float32")
        shapes = kv_shapes(text, kinds)
        shape = {
            "num_layers": len(shapes),
            "num_kv_heads": shapes[0].num_kv_heads,
            "head_dim": shapes[0].head_dim,
            "dtype": dtype,
            "max_sequence_length": field_of(text, "max_position_embeddings") or 0,
            "groups": layer_groups(kinds, shapes, overrides.get("retention") is not None),
        }
        if "states" not in overrides:
            shape["states"] = tuple(StateLayer(each) for each in state_tensors(text, dtype))
        return cls(max_tokens=max_tokens, **{**shape, **overrides})


def auto_page_size(
    page_size: int | str, kv_format: str | tuple[str, str], chosen: bool = False
) -> int:
    """Resolves "auto": 16 tokens, or 32 with int4, whose scales of K then take half as much.

    Args:
        chosen: queries choose pages; with smaller pages there are more to choose from.
    """
    if isinstance(page_size, str) and page_size == "auto":
        return 32 if needs_staging(kv_format) and not chosen else 16
    _require_int("page_size", page_size, 1)
    return int(page_size)


def format_pair(kv_format: Any) -> tuple[str, str]:
    """The formats of K and V, of a name for both or a pair."""
    pair = (kv_format, kv_format) if isinstance(kv_format, str) else kv_format
    known = isinstance(pair, (tuple, list)) and all(name in [*KV_FORMATS] for name in pair)
    if not known or len(pair) != 2:
        raise ValueError(
            f"kv_format: expected one of {', '.join(KV_FORMATS)}, or a pair of them for K and V, "
            f"got {kv_format!r}"
        )
    return pair[0], pair[1]


def formats_of(kv_format: Any) -> tuple[Format, Format]:
    """What a name for K and V, or a pair, stands for."""
    k, v = format_pair(kv_format)
    return KV_FORMATS[k][0], KV_FORMATS[v][1]


def needs_staging(kv_format: Any) -> bool:
    """Whether pages that are not complete are kept apart, see `CacheConfig.staged`."""
    return any(format.staged for format in formats_of(kv_format))


def _dtype_name(dtype: Any) -> Any:
    """The name of a dtype of torch, which is not imported; others as they are."""
    name = str(dtype)
    return name.removeprefix("torch.") if name.startswith("torch.") else dtype


def _require_int(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not hasattr(value, "__index__"):
        raise TypeError(f"{name}: expected an int, got {type(value).__name__}")
    if index(value) < least:
        raise ValueError(f"{name}: expected at least {least}, got {value}")
