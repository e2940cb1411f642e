"""Which pages a model uses: pages that a caller chose, that a plan sized, or the model's own."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedModel

from pagedkv.cache.cache import PagedKVCache
from pagedkv.config import CacheConfig
from pagedkv.storage.memory import states_that_fit, tokens_that_fit

from .fingerprint import ModelIdentity, fingerprint_of
from .model import cache_config, device_of, dtype_of

if TYPE_CHECKING:
    from pagedkv.planner import MemoryPlan

_CACHES: weakref.WeakKeyDictionary[
    PreTrainedModel, weakref.WeakValueDictionary[Any, PagedKVCache]
] = weakref.WeakKeyDictionary()

BESIDE = "trace", "prefix_store"  # what `PagedKVCache` takes besides its configuration


def pages_for(
    model: PreTrainedModel,
    cache: PagedKVCache | None,
    plan: MemoryPlan | None,
    max_tokens: int | None,
    fields: dict[str, Any],
) -> PagedKVCache:
    """The pages a caller chose for a model, or the model's own of these sizes.

    Args:
        fields: fields of `CacheConfig`, and what else `PagedKVCache` takes: `trace` and
            `prefix_store`.
    """
    fields = dict(fields)
    beside: dict[str, Any] = {name: fields.pop(name, None) for name in BESIDE}
    for what, value in beside.items():
        if cache is not None and value is not None:
            raise ValueError(f"{what}: expected none beside a cache, give it to that PagedKVCache")
    if cache is None and plan is None:
        return _shared_pages(model, max_tokens, fields, beside)
    name = "plan" if cache is None else "cache"
    if max_tokens is not None or fields or (cache is not None and plan is not None):
        raise ValueError(f"{name}: expected no other sizes beside it, they are the {name}'s own")
    if cache is not None:
        _require_fit(model, cache.config, name)
        _require_same_device(model, cache)
        if not isinstance(cache.identity, ModelIdentity):
            cache.identity = ModelIdentity(
                model, cache.config.fingerprint, cache.config.fingerprint
            )
        return cache
    assert plan is not None
    _require_fit(model, plan.cache, name)
    planned, given = plan.cache, plan.cache.fingerprint or None

    def config() -> CacheConfig:
        return planned if given else replace(planned, fingerprint=fingerprint_of(model))

    return _kept(model, ("plan", planned), config, given, beside)


def _require_fit(model: PreTrainedModel, config: CacheConfig, name: str) -> None:
    """Raises ValueError where a model's K and V would not go into such pages."""
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
    """The state layers of a cache, in words; those of one model are alike."""
    if not config.states:
        return "no states"
    return f"states of {len(config.states)} layers, {config.states[0].tensors} each"


def _require_same_device(model: PreTrainedModel, kv: PagedKVCache) -> None:
    if kv.device != (device := device_of(model)):
        raise ValueError(f"cache: expected pages on {device}, got {kv.device}")


def _shared_pages(
    model: PreTrainedModel, max_tokens: int | None, fields: dict[str, Any], beside: dict[str, Any]
) -> PagedKVCache:
    """The model's pages of these sizes."""

    def config() -> CacheConfig:
        tokens, device = max_tokens, device_of(model)
        if tokens is None:
            tokens = tokens_of(model, fields)
        found = cache_config(model, tokens, **{"fingerprint": fingerprint_of(model), **fields})
        if fields.get("max_states"):
            return found
        return replace(found, max_states=states_that_fit(found, device))

    named = ((name, _told_apart(fields[name])) for name in sorted(fields))
    return _kept(model, (max_tokens, *named), config, fields.get("fingerprint"), beside)


def tokens_of(
    model: PreTrainedModel,
    fields: dict[str, Any],
    beside: Callable[[CacheConfig], CacheConfig] | None = None,
) -> int:
    """A `max_tokens` for pages of a model whose size nobody said.

    Args:
        fields: fields of `CacheConfig`, and `trace`.
        beside: as for `tokens_that_fit`.
    """
    fixed = {name: value for name, value in fields.items() if name != "trace"}
    fixed["growth_step"] = None

    return tokens_that_fit(lambda n: cache_config(model, n, **fixed), device_of(model), beside)


def _told_apart(value: Any) -> Any:
    """A hashable stand-in for a field's value: the value itself, where it is hashable."""
    if isinstance(value, list):
        return tuple(value)
    try:
        hash(value)
    except TypeError:
        return id(value)  # of a policy, say: it lives as long as the pages do
    return value


def _kept(
    model: PreTrainedModel,
    asked: Any,
    config: Callable[[], CacheConfig],
    given: bytes | None,
    beside: dict[str, Any],
) -> PagedKVCache:
    """Pages that are made at the first use and kept while a cache uses them."""
    caches = _CACHES.setdefault(model, weakref.WeakValueDictionary())
    # Pages that are recorded are recorded from their beginning, so they are none that exist.
    asked = asked, dtype_of(model), device_of(model), *map(_told_apart, beside.values())
    kv = caches.get(asked)
    if kv is None:
        kv = caches[asked] = PagedKVCache(config(), device=device_of(model), **beside)
        kv.identity = ModelIdentity(model, given, kv.config.fingerprint)
    return kv


def take_over(kv: PagedKVCache, model: PreTrainedModel) -> None:
    """Gives pages that another model used to this one; the other's prefixes are forgotten."""
    identity = kv.identity
    assert isinstance(identity, ModelIdentity)
    if identity.model() is not model:
        kv.clear_prefixes()
        kv.identity = ModelIdentity(model, identity.given, kv.config.fingerprint)
