"""`CacheConfig`: the meanings of its fields, their defaults, and checks of combinations.

Nothing here imports torch, so a budget can be computed anywhere; dtypes are names.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from dataclasses import fields as dataclass_fields
from functools import cached_property
from math import gcd
from typing import TYPE_CHECKING, Any

from pagedkv.errors import UnsupportedModelError
from pagedkv.models import (
    DTYPE_BYTES,
    LayerGroup,
    StateLayer,
    field_of,
    kv_shapes,
    layer_kinds,
    paged_layers,
    require_shape,
    state_tensors,
)
from pagedkv.names import DTYPES, FIELDS, OPTIONS, meant

from .checks import (
    check_format,
    check_groups,
    check_states,
    require_int,
    require_listed,
    require_share,
)
from .formats import format_pair, needs_staging
from .sizes import Sizes

if TYPE_CHECKING:
    from typing import Unpack

    from pagedkv.retention import Kept, Policy

    from .fields import CacheFields, ChangedFields, ShapedFields

# Fields that follow from others if they are not given.
_FOLLOW = (
    "page_size", "max_sequences", "max_sequence_length", "max_step_tokens", "groups", "max_states",
)  # fmt: skip
# Whole numbers: first of at least 1, then of at least 0, where None means 0.
MOST_LAYERS = 1 << 16  # each takes memory of the host; no model has a thousand
_SIZES = "num_layers", "num_kv_heads", "head_dim", "max_tokens", "page_size", "max_sequences"
_LIMITS = "max_sequence_length", "max_step_tokens", "rollback", "host_tokens", "max_states"


@dataclass(frozen=True)
class CacheConfig(Sizes):
    """Shape and limits of a `PagedKVCache`.

    Attributes:
        num_layers: layers that have K and V.
        num_kv_heads: KV heads per layer (G), for groups that do not set it.
        head_dim: elements per head (D), for groups that do not set it.
        dtype: `float32`, `float16` or `bfloat16`, or torch's dtype of this name.
        max_tokens: token slots of a group without a window.
        page_size: token slots per page (P); "auto" is 16, or 32 with int4 without `read_tokens`.
        max_sequences: sequences alive at once; default 256, with int4 one for every 512 of
            `max_tokens` (at least 8, at most 256), because each has staging pages of its own.
        max_sequence_length: how long a sequence may become, in tokens; default `max_tokens`.
        max_step_tokens: how many tokens one step may add over all sequences; default `max_tokens`,
            or 16,384 if that is less and a group has a window (its pool grows with this number).
        rollback: tokens that may be taken back after commit in layers with a window.
        groups: layer groups; default one group without a window.
        fingerprint: identity of the weights; prefixes are shared only under the same one.
        host_tokens: token slots of a host tier in every layer group, for `offload` and for prefixes
            that would be lost; 0 for none. Its memory, pinned on CUDA, is taken when it is first
            needed.
        kv_format: the format of K and V: a name from `KV_FORMATS`, such as `dense` (in `dtype`), or
            a pair of names for K and V. `docs/formats.md` says what each costs.
        growth_step: the pool grows by this many tokens at a time, up to `max_tokens`; default: all
            pages exist from the start.
        read_tokens: in longer texts a decoding query reads only this many tokens, rounded down to
            whole pages, which it chooses itself; default all. Layers with a window ignore it.
        retention: which pages of a sequence stay if not all can: a name from
            `pagedkv.retention.POLICIES` or a `Policy`; None: all stay. Groups with a window ignore
            it.
        budget: how many tokens a sequence keeps per layer group, rounded up to whole pages; the
            page being written comes on top. Without `budget` and `keep` pages are evicted only if
            memory runs short.
        keep: the share of its text that a sequence keeps per layer group, above 0 and at most 1
            (all), rounded down to whole pages; the page being written comes on top. The first page,
            if the policy keeps it, and the newest 64 tokens stay with any share. With `budget` the
            smaller of the two counts.
        high_water: share of a pool's pages; if a step would make more pages live, sequences lose
            pages.
        low_water: share of a pool's pages that stays live when sequences lose pages.
        states: the state layers, in the model's order; none for a model with attention only.
        max_states: state slots that may be in use at once, by sequences and checkpoints; default
            `max_sequences`. Memory is taken when slots are first used.
    """

    if TYPE_CHECKING:  # callers may give more types than the fields keep

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
                    advice = meant(name, cls.__dataclass_fields__, FIELDS)
                    option = OPTIONS.get(name, name)
                    if option in OPTIONS.values():
                        advice = f"; it is an option of generate, {option}"
                    raise TypeError(f"{name}: CacheConfig has no such field{advice}")
            return super().__new__(cls)

    def __post_init__(self) -> None:
        # The values as given: in `with_`, fields that were left out follow from others anew.
        object.__setattr__(self, "_given", {name: getattr(self, name) for name in _FOLLOW})
        object.__setattr__(self, "dtype", _dtype_name(self.dtype))
        object.__setattr__(self, "kv_format", format_pair(self.kv_format))
        require_listed("groups", self.groups, LayerGroup)
        require_listed("states", self.states, StateLayer)
        chunks = [group.window or 0 for group in self.groups if group.chunked]
        size = auto_page_size(self.page_size, self.kv_format, bool(self.read_tokens), chunks)
        object.__setattr__(self, "page_size", size)
        if self.max_sequences is None:
            require_int("max_tokens", self.max_tokens, 1)
            most = max(8, min(256, self.max_tokens // 512)) if self.staged else 256
            object.__setattr__(self, "max_sequences", most)
        for name in _SIZES:
            require_int(name, getattr(self, name), 1)
        if self.num_layers > MOST_LAYERS:
            raise ValueError(
                f"num_layers: expected at most {MOST_LAYERS:,}, got {self.num_layers:,}"
            )
        for name in _LIMITS:
            if getattr(self, name) is None:
                object.__setattr__(self, name, 0)
            require_int(name, getattr(self, name), 0)
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"dtype: expected one of {', '.join(DTYPE_BYTES)}, got {self.dtype!r}")
        if not isinstance(self.fingerprint, bytes):
            raise TypeError(f"fingerprint: expected bytes, got {type(self.fingerprint).__name__}")
        if self.growth_step is not None:
            require_int("growth_step", self.growth_step, 1)
            if self.growth_step > self.max_tokens:
                raise ValueError(
                    f"growth_step: expected at most max_tokens = {self.max_tokens}, got "
                    f"{self.growth_step}"
                )
        longest = self.max_sequence_length or self.max_tokens
        if self.retention is None:  # with a policy a text may be longer than the pool
            longest = min(longest, self.max_tokens)
        object.__setattr__(self, "max_sequence_length", longest)
        if not self.groups:
            object.__setattr__(self, "groups", (LayerGroup(tuple(range(self.num_layers))),))
        if not self.max_step_tokens:
            windowed = any(group.window for group in self.groups)
            longest_step = min(self.max_tokens, 16_384) if windowed else self.max_tokens
            object.__setattr__(self, "max_step_tokens", longest_step)
        # No step has pages for more, and each keeps arrays of this length.
        most = -(-self.max_tokens // self.page_size) * self.page_size
        object.__setattr__(self, "max_step_tokens", min(self.max_step_tokens, most))
        check_groups(self.groups, self.num_layers, self.shapes, self.page_size)
        self._check_slots()
        check_states(self.states)
        if not self.states:
            object.__setattr__(self, "max_states", 0)
        elif not self.max_states:
            object.__setattr__(self, "max_states", self.max_sequences)
        check_format(self.formats, self.shapes, self.page_size)
        if self.read_tokens is not None:
            require_int("read_tokens", self.read_tokens, 4 * self.page_size)
            if all(group.window for group in self.groups):
                raise ValueError("read_tokens: expected layers without a window, all have one")
            if any(shape.v_is_k for shape in self.shapes):
                raise ValueError("read_tokens: latents, whose V is a part of K, are read whole")
        self._check_retention()

    def _check_slots(self) -> None:
        pages = [self.num_pages(g) + self.num_staging_pages(g) for g in range(len(self.groups))]
        slots = self.page_size * max(pages)
        if slots >= 2**31:
            raise ValueError(f"max_tokens: expected fewer than 2**31 slots a group, got {slots}")

    def _check_retention(self) -> None:
        policy = self.policy
        if self.budget is not None:
            require_int("budget", self.budget, 1)
        if self.keep is not None:
            require_share("keep", self.keep)
            if not 0 < self.keep <= 1:
                advice = "; budget= is in tokens" if self.keep > 1 else ""
                raise ValueError(
                    f"keep: expected a share above 0 and up to 1, got {self.keep}{advice}"
                )
        for name in ("budget", "keep"):
            if policy is None and getattr(self, name) is not None:
                raise ValueError(f'{name}: needs retention=, for example retention="keydiff"')
        for name in ("low_water", "high_water"):
            require_share(name, getattr(self, name))
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
        """The policy of `retention`, which is its name or the policy itself."""
        if self.retention is None:
            return None
        from pagedkv.retention import policy_of  # here: a plan of a budget needs no numpy

        return policy_of(self.retention)

    @cached_property
    def kept(self) -> Kept | None:
        """How many pages of a sequence stay; None if only memory limits them."""
        policy = self.policy
        if policy is None or (self.budget is None and self.keep is None):
            return None
        from pagedkv.retention import Kept, Policy

        least = policy.pinned_pages(self.page_size)
        if not policy.recent:  # its order keeps the newest pages, so some must stay
            least += -(-Policy.recent // self.page_size)
        return Kept(least, self.budget_pages, 1.0 if self.keep is None else self.keep)

    @property
    def newest_kept(self) -> int:
        """How many of its newest tokens a sequence keeps whatever its share or budget.

        A window keeps the newest by its order, but not where pages that sequences share leave no
        others to choose from.
        """
        from pagedkv.retention import Policy

        policy, size = self.policy, self.page_size
        if policy is None:
            return 0
        if policy.recent or not policy.window:
            return policy.recent
        if self.budget_pages is None:
            return Policy.recent
        return min((self.budget_pages - policy.pinned_pages(size)) * size, Policy.recent)

    def with_(self, **changes: Unpack[ChangedFields]) -> CacheConfig:
        """Returns this configuration with other fields.

        Limits that nobody gave follow from the fields anew. `dataclasses.replace` keeps them: with
        more `max_tokens` it leaves `max_sequence_length` as it was.

        Args:
            changes: any field of this class.
        """
        names = (each.name for each in dataclass_fields(self))
        given = {name: getattr(self, name) for name in names} | self.__dict__["_given"]
        return CacheConfig(**{**given, **changes})

    @classmethod
    def from_model(
        cls, config: Any, *, max_tokens: int, **overrides: Unpack[ShapedFields]
    ) -> CacheConfig:
        """Reads the shape of a decoder from its Hugging Face configuration object.

        Layers are counted as `pagedkv.models.layer_kinds` does: layers with K and V, and separately
        layers with a recurrent state.

        Args:
            config: a `PretrainedConfig`, or anything with the same attributes.
            max_tokens: token slots of a group without a window.
            overrides: any other field of this class. With `retention` each layer is a separate
                group, which chooses its own pages, unless `groups` is given.

        Raises:
            UnsupportedModelError: the shape of the model's K and V, or of its states, is not known.
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
        alone = overrides.get("retention") is not None
        if alone and any(kind.indexer is not None for kind in kinds):
            raise UnsupportedModelError(
                "retention: expected None, since this model itself chooses what its queries read "
                "of all tokens"
            )
        shape = paged_layers(kinds, kv_shapes(text, kinds), alone)
        shape |= {
            "dtype": dtype,
            "max_sequence_length": field_of(text, "max_position_embeddings") or 0,
        }
        if "states" not in overrides:
            shape["states"] = tuple(StateLayer(each) for each in state_tensors(text, dtype))
        return cls(max_tokens=max_tokens, **{**shape, **overrides})


def auto_page_size(
    page_size: int | str,
    kv_format: str | tuple[str, str],
    chosen: bool = False,
    chunks: Iterable[int] = (),
) -> int:
    """Resolves "auto": 16 tokens, or 32 with int4, whose scales of K then take half as much.

    Args:
        chosen: whether queries choose pages: smaller pages give a finer choice.
        chunks: tokens per chunk of chunked layers; a chunk must be whole pages.
    """
    if isinstance(page_size, str) and page_size == "auto":
        return gcd(32 if needs_staging(kv_format) and not chosen else 16, *chunks)
    require_int("page_size", page_size, 1)
    return int(page_size)


def _dtype_name(dtype: Any) -> Any:
    """Returns the name of a torch dtype or of one of its other names, without importing torch."""
    name = str(dtype)
    return name.removeprefix("torch.") if name.startswith("torch.") else DTYPES.get(name, dtype)
