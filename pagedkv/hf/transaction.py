"""One transaction a forward: what its layers wrote is committed when it has returned, or never was.

A forward begins where the outermost module is called of those on the way from an attached model to
its decoder, and is over when that call returns. Which cache takes part is known by its arguments,
or by its first layer where the model makes the cache itself. The step opens later, in the first
layer, since shapes and mask are known there.

Layers that are called without any of these modules, one by one, say, make a forward without a
transaction: it is committed behind the last layer.
"""

from __future__ import annotations

import sys
import threading
import weakref
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from pagedkv.cache.cache import PagedKVCache
from pagedkv.errors import OpenStepError, UnsupportedModelError

from .forward import ForwardCache, changed_after_cache, other_model, waiting
from .release import CACHE


class Transaction:
    """A forward that has begun.

    Args:
        outermost: the module whose call it is.
        cache: the cache among its arguments, if there is one.
    """

    def __init__(self, outermost: nn.Module, cache: ForwardCache | None) -> None:
        self._outermost = weakref.ref(outermost)
        self._cache = None if cache is None else weakref.ref(cache)

    @property
    def outermost(self) -> nn.Module | None:
        """The module whose call it is; None if it is gone."""
        return self._outermost()

    @property
    def cache(self) -> ForwardCache | None:
        """The cache that takes part; None as long as none is known."""
        return None if self._cache is None else self._cache()

    def may_hold(self, cache: ForwardCache) -> bool:
        """Whether a cache takes part in this forward, or may be the one that will."""
        return self._cache is None or self.cache is cache

    def has_entered(self, cache: ForwardCache) -> bool:
        """Whether a cache was updated by a layer of this forward, which is not committed."""
        return cache.transaction is self

    def contains(self, module: nn.Module, cache: ForwardCache | None) -> bool:
        """Whether the call of a module with this cache is a part of this forward."""
        outermost = self.outermost
        if outermost is module:
            return False  # a module does not call itself: this is a forward within the forward
        if cache is None or self.cache is cache:
            return True
        if self._cache is not None or outermost is None:
            return False
        return any(part is module for part in outermost.modules())

    def enter(self, cache: ForwardCache) -> None:
        """Called before the first layer of a cache is updated."""
        self._cache = weakref.ref(cache)
        cache.transaction = self

    def commit(self) -> None:
        """Makes the tokens of the forward part of their texts, if all layers have attended."""
        cache = self.cache
        if cache is None:
            return
        if not self.has_entered(cache) and cache.layers:
            raise UnsupportedModelError(
                f"{type(self.outermost).__name__}: its forward passed none of its layers through "
                "the cache it was given: it dropped it or took another; in training, layers that "
                "are recomputed get none: turn gradient checkpointing off, or use torch.no_grad()"
            )
        self._require_complete(cache)
        cache.commit_step()

    def abort(self) -> None:
        """Ends the forward: leaves everything as it was before it, unless that is committed."""
        cache = self.cache
        if cache is None:
            return
        if self.has_entered(cache):
            cache.abort_step()
        cache.end_forward()

    def _require_complete(self, cache: ForwardCache) -> None:
        for layer in cache.paged:
            if layer.staged is not None:
                raise changed_after_cache(layer.index)
        layers, passed = cache.kv.config.num_layers, cache.forward_layer + 1
        if passed == layers:
            if not cache.all_attended_again:
                raise UnsupportedModelError(
                    f"{cache.attended_again} of {cache.shared_layers} layers without K and V of "
                    "their own attended over the pages of others: the others were given copies"
                )
            return
        outermost = self.outermost
        assert outermost is not None, "its call has just returned"
        if not any(part is outermost for part in cache.model.modules()):
            raise other_model(layers, str(passed))
        raise UnsupportedModelError(
            f"{type(outermost).__name__}: its forward passed {passed} of {layers} layers through "
            "the cache it was given"
        )


class _Thread(threading.local):
    """The forwards of this thread that have begun and are not over, the innermost last."""

    def __init__(self) -> None:
        self.transactions: list[Transaction] = []


_thread = _Thread()


# ------------------------------------------------------------------ what layers and caches ask


def enter(cache: ForwardCache) -> None:
    """Called before the first layer of a cache is updated, in whatever forward that is.

    Raises:
        OpenStepError: another forward of this thread is under way on the same pages.
        UnsupportedModelError: the cache's layers were passed in this forward already.
    """
    forget_dead()
    mine = _thread.transactions
    within = mine[-1] if mine and mine[-1].may_hold(cache) else None
    if within is not None and within.has_entered(cache):
        raise UnsupportedModelError(f"{CACHE}: this forward passes the layers of its cache twice")
    _require_none_on(cache.kv)
    cache.abort_step()  # what a forward left open that nobody saw the end of
    if within is not None:
        within.enter(cache)


def require_none_on(kv: PagedKVCache) -> None:
    """Raises `OpenStepError` where a forward of this thread is under way on these pages."""
    forget_dead()
    _require_none_on(kv)


def _require_none_on(kv: PagedKVCache) -> None:
    for transaction in _thread.transactions:
        cache = transaction.cache
        if cache is not None and transaction.has_entered(cache) and cache.kv is kv:
            raise OpenStepError(
                f"{CACHE}: a forward is under way on these pages, from within which no "
                "other can run and no cache can be changed"
            )


def forget_dead(beginning: nn.Module | None = None) -> None:
    """Aborts forwards that an interrupt ended: hooks are told of errors, but not of these.

    Args:
        beginning: the module whose call begins now, and so is that of no forward yet.
    """
    mine = _thread.transactions
    while mine:
        last = mine[-1].outermost
        begun = sum(transaction.outermost is last for transaction in mine)
        if _is_called(last, begun + (last is beginning)):
            return
        mine.pop().abort()


def _is_called(module: nn.Module | None, times: int) -> bool:
    """Whether so many calls of a module have not returned yet in this thread."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and times:
        if frame.f_code.co_name == "_call_impl" and frame.f_locals.get("self") is module:
            times -= 1
        frame = frame.f_back
    return not times


# ------------------------------------------------------------------ hooks


def watch(module: nn.Module) -> list[RemovableHandle]:
    """Hooks that begin and end a forward whose outermost module this is."""
    return [
        module.register_forward_pre_hook(begin, with_kwargs=True, prepend=True),
        module.register_forward_hook(commit),
        module.register_forward_hook(end, always_call=True),
    ]


# A compiler would specialise on the objects that these functions look at.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def begin(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Hook before the call of a module: begins a forward unless it is a part of one.

    Returns:
        The arguments to call it with instead; None for those that were given.
    """
    given = (x for x in (*kwargs.values(), *args) if isinstance(x, ForwardCache))
    cache = next(given, None)
    forget_dead(module)
    mine = _thread.transactions
    if mine and mine[-1].contains(module, cache):
        if cache is not None:
            cache.begin_part(kwargs)
        return None
    mine.append(Transaction(module, cache))
    waiting.last = None
    _put_last(module)
    if cache is None:
        return None
    # Only ids are given by position: what a model takes next differs from one to the next.
    named = (
        {"input_ids": args[0], **kwargs} if args and isinstance(args[0], torch.Tensor) else kwargs
    )
    changed = cache.begin_forward(named)
    return (
        None if changed is None else ((None, *args[1:]) if named is not kwargs else args, changed)
    )


@torch.compiler.disable  # type: ignore[untyped-decorator]
def commit(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    """Hook after the call of a module that raised nothing, nor did any other hook of it."""
    transaction = _innermost(module)
    if transaction is not None:
        transaction.commit()


@torch.compiler.disable  # type: ignore[untyped-decorator]
def end(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    """Hook after any call of a module: what was not committed is aborted."""
    transaction = _innermost(module)
    if transaction is None:
        return
    waiting.last = None
    _thread.transactions.pop()
    transaction.abort()


def _innermost(module: nn.Module) -> Transaction | None:
    """The innermost forward, if it is that of a call of this module."""
    mine = _thread.transactions
    if all(transaction.outermost is not module for transaction in mine):
        return None
    while mine[-1].outermost is not module:  # an interrupt within it that somebody caught
        mine.pop().abort()
    return mine[-1]


def _put_last(module: nn.Module) -> None:
    """Puts the hooks that end a forward behind those that a user has added since: they may fail."""
    hooks = module._forward_hooks
    if next(reversed(hooks.values()), None) is end:
        return
    for key, hook in [*hooks.items()]:
        if hook is commit or hook is end:
            hooks[key] = hooks.pop(key)
