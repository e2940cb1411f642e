"""Chooses a model's pages: a caller's, pages that a plan sized, or the model's own."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from dataclasses import fields as dataclass_fields
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel

from pagedkv.cache.cache import PagedKVCache
from pagedkv.config import CacheConfig
from pagedkv.ranks import ranks_of, spelled
from pagedkv.storage.memory import states_that_fit, tokens_that_fit

from .fingerprint import ModelIdentity, fingerprint_of
from .model import cache_config, device_of, dtype_of
from .placement import placement_of
from .shards import of_rank, on_this_rank

if TYPE_CHECKING:
    from pagedkv.planner import MemoryPlan

_CACHES: weakref.WeakKeyDictionary[
    PreTrainedModel, weakref.WeakValueDictionary[Any, PagedKVCache]
] = weakref.WeakKeyDictionary()
_making = threading.Lock()
if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
    os.register_at_fork(after_in_child=_making._at_fork_reinit)  # type: ignore[attr-defined]
    os.register_at_fork(after_in_child=_CACHES.clear)  # the pages are the parent's

BESIDE = "trace", "prefix_store"  # arguments of `PagedKVCache` besides its configuration
FIELDS = [field.name for field in dataclass_fields(CacheConfig) if field.name != "fingerprint"]


def pages_for(
    model: PreTrainedModel,
    cache: PagedKVCache | None,
    plan: MemoryPlan | None,
    max_tokens: int | None,
    fields: dict[str, Any],
    rounded: bytes = b"",
) -> PagedKVCache:
    """Returns the pages a caller chose for a model, or the model's own of these sizes.

    Args:
        fields: fields of `CacheConfig`, and further arguments of `PagedKVCache`: `trace` and
            `prefix_store`.
        rounded: as for `ModelIdentity`; the model has own pages for each value.
    """
    fields, ranks = dict(fields), ranks_of(model)
    if ranks.size > 1:
        ranks.require_same("pages", spelled(_asked(cache, plan, max_tokens, fields)))
        ranks.refuse(**{name: fields.get(name) for name in ("growth_step", "prefix_store")})
        if not ranks.is_first:
            fields.pop("trace", None)  # one rank writes it
    beside: dict[str, Any] = {name: fields.pop(name, None) for name in BESIDE}
    for what, value in beside.items():
        if cache is not None and value is not None:
            raise ValueError(f"{what}: expected none beside a cache, give it to that PagedKVCache")
    if cache is None and plan is None:
        return _shared_pages(model, max_tokens, fields, beside, rounded)
    name = "plan" if cache is None else "cache"
    if max_tokens is not None or fields or (cache is not None and plan is not None):
        raise ValueError(f"{name}: expected no other sizes beside it, they are the {name}'s own")
    if cache is not None:
        _require_fit(model, cache.config, name)
        _require_same_device(model, cache)
        if not isinstance(cache.identity, ModelIdentity):
            named = of_rank(model, cache.config.fingerprint)
            cache.identity = ModelIdentity(model, named, named, rounded)
        ranks.agree(lambda: cache.follow(ranks))
        return cache
    assert plan is not None
    planned, given = plan.cache, plan.cache.fingerprint or None
    if planned.num_kv_heads != cache_config(model, max_tokens=1).num_kv_heads:
        planned = on_this_rank(model, planned)
    _require_fit(model, planned, name)

    return _kept(model, ("plan", planned), lambda: planned, given, beside, rounded)


def _asked(
    cache: PagedKVCache | None,
    plan: MemoryPlan | None,
    max_tokens: int | None,
    fields: dict[str, Any],
) -> Any:
    """Returns the arguments that must be equal on all ranks."""
    sizes = plan.cache if plan is not None else None if cache is None else cache.config
    named = {} if sizes is None else {name: getattr(sizes, name) for name in FIELDS}
    own = {name: value for name, value in fields.items() if name not in ("fingerprint", "trace")}
    return [cache is None, plan is None, max_tokens, sorted(named.items()), sorted(own.items())]


def _require_fit(model: PreTrainedModel, config: CacheConfig, name: str) -> None:
    """Raises ValueError if a model's K and V do not fit such pages."""
    wanted = cache_config(model, max_tokens=1)
    for field in ("num_layers", "dtype", "windows"):
        expected, got = getattr(wanted, field), getattr(config, field)
        if expected != got:
            raise ValueError(f"{name}: expected {field} {expected} for this model, got {got}")
    for layer in range(wanted.num_layers):
        shape, got = (c.shapes[c.group_of[layer]] for c in (wanted, config))
        if shape != got:
            raise ValueError(
                f"{name}: expected K and V of {shape} in layer {layer} for this model, got {got}"
            )
    if wanted.states != config.states:
        raise ValueError(
            f"{name}: expected {_states(wanted)} for this model, got {_states(config)}"
        )


def _states(config: CacheConfig) -> str:
    """Describes the state layers of a cache, which are alike in one model."""
    if not config.states:
        return "no states"
    return f"states of {len(config.states)} layers, {config.states[0].tensors} each"


def _require_same_device(model: PreTrainedModel, kv: PagedKVCache) -> None:
    placement = placement_of(model, device_of(model))
    if kv.device != placement.home:
        raise ValueError(f"cache: expected pages on {placement.home}, got {kv.device}")
    for what in ("layers", "states"):
        wanted, got = getattr(placement, what), getattr(kv.placement, what)
        for i, (expected, found) in enumerate(zip(wanted, got)):
            if expected != found:
                name = "layer" if what == "layers" else "state layer"
                raise ValueError(f"cache: expected {name} {i} on {expected}, got {found}")


def _shared_pages(
    model: PreTrainedModel,
    max_tokens: int | None,
    fields: dict[str, Any],
    beside: dict[str, Any],
    rounded: bytes,
) -> PagedKVCache:
    """Returns the model's own pages of these sizes."""

    def config() -> CacheConfig:
        tokens = tokens_of(model, fields) if max_tokens is None else max_tokens
        found = cache_config(model, tokens, **fields)
        if fields.get("max_states"):
            return found
        states = states_that_fit(found, placement_of(model, device_of(model)))
        return replace(found, max_states=ranks_of(model).least(states))

    named = ((name, _told_apart(fields[name])) for name in sorted(fields))
    asked = max_tokens, *named
    return _kept(model, asked, config, fields.get("fingerprint"), beside, rounded)


def tokens_of(
    model: PreTrainedModel,
    fields: dict[str, Any],
    beside: Callable[[CacheConfig], CacheConfig] | None = None,
) -> int:
    """Returns a `max_tokens` for pages of a model if the caller gave none.

    Args:
        fields: fields of `CacheConfig`, and `trace`.
        beside: as for `tokens_that_fit`.
    """
    fixed = {name: value for name, value in fields.items() if name != "trace"}
    fixed["growth_step"] = None

    placement = placement_of(model, device_of(model))
    fit = tokens_that_fit(lambda n: cache_config(model, n, **fixed), placement, beside)
    return ranks_of(model).least(fit)


def _told_apart(value: Any) -> Any:
    """Returns a hashable stand-in for a field's value: the value itself if it is hashable."""
    if isinstance(value, list):
        return tuple(value)
    try:
        hash(value)
    except TypeError:
        return id(value)  # for example of a policy, which lives as long as the pages
    return value


def _kept(
    model: PreTrainedModel,
    asked: Any,
    config: Callable[[], CacheConfig],
    given: bytes | None,
    beside: dict[str, Any],
    rounded: bytes,
) -> PagedKVCache:
    """Returns pages that are made at the first use and kept while a cache uses them.

    Args:
        config: sizes the pages; `given` is their fingerprint, or else the model's.
    """
    # Pages with a trace are recorded from their beginning, so existing pages will not do.
    placement, ranks = placement_of(model, device_of(model)), ranks_of(model)
    asked = asked, dtype_of(model), placement, rounded, *map(_told_apart, beside.values())
    with _making:  # two threads would make two
        caches = _CACHES.setdefault(model, weakref.WeakValueDictionary())
        kv = caches.get(asked)
        # One rank may still have its pages when another rank has collected its own.
        if not ranks.least(kv is not None) or kv is None:
            named = fingerprint_of(model) if given is None else of_rank(model, given)
            sizes = replace(config(), fingerprint=named)

            def make() -> PagedKVCache:
                made = PagedKVCache(sizes, device=placement, **beside)
                made.identity = ModelIdentity(model, given and named, named, rounded)
                made.follow(ranks)
                return made

            kv = caches[asked] = ranks.agree(make)
        return kv


def take_over(kv: PagedKVCache, model: PreTrainedModel, rounded: bytes = b"") -> None:
    """Gives pages that another model used to this one; the other's prefixes are forgotten.

    The same model with differently rounded weights counts as another.
    """
    identity = kv.identity
    assert isinstance(identity, ModelIdentity)
    if identity.model() is not model or identity.rounded != rounded:
        kv.clear_prefixes()
        kv.identity = ModelIdentity(model, identity.given, kv.config.fingerprint, rounded)
