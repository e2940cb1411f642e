"""One transaction a forward: its writes are committed when it returns, undone when it raises.

The modules on the way from an attached model to its decoder are watched. A forward begins when the
outermost of them is called, and is over when that call returns. The call's arguments show which
cache takes part, or the first layer does, if the model makes the cache itself. The step opens
later, in the first layer, since shapes and mask are known there.

Layers that are called without any of these modules, such as one by one, make a forward without a
transaction: it is committed behind the last layer.

Threads take turns on the pages, a forward each (`cache/fair_turns.py`): from the moment when the
forward's cache is known, at its beginning or first layer, to its end.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections import OrderedDict
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import takewhile
from time import sleep
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from pagedkv.cache.cache import PagedKVCache
from pagedkv.cache.fair_turns import Turn, Turns
from pagedkv.errors import OpenStepError, UnsupportedModelError

from .forward_cache import ForwardCache, changed_after_cache, uncompiled, waiting
from .release import CACHE

# Seconds. Frames of a running thread are read one by one, so a call may wrongly seem to have ended.
LOOK_AGAIN = 0.001


class Transaction:
    """A forward that has begun.

    Args:
        outermost: the module whose call the forward is.
        cache: the cache among its arguments, if there is one.
    """

    running: Sequence[Any] = ()  # rows that may leave: none, a cache keeps its rows
    turn: Turn

    def __init__(self, outermost: nn.Module, cache: ForwardCache | None) -> None:
        self._outermost = weakref.ref(outermost)
        self._cache = None if cache is None else weakref.ref(cache)
        self._all = weakref.ref(_thread.transactions)  # gone when the thread is
        self._turns: Turns | None = None
        self._committed = False

    @property
    def outermost(self) -> nn.Module | None:
        """The module whose call the forward is; None if the module is gone."""
        return self._outermost()

    @property
    def cache(self) -> ForwardCache | None:
        """The cache that takes part; None as long as none is known."""
        return None if self._cache is None else self._cache()

    def may_hold(self, cache: ForwardCache) -> bool:
        """Whether a cache takes part in this forward, or may still do so."""
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

    def take_turn(self, cache: ForwardCache) -> None:
        """Waits until this forward has its turn on the pages of its cache."""
        if self.outermost is not None:
            cache.require_own(self.outermost)
        self.turn, self._turns = cache.turn, cache.kv.turns
        self._turns.begin_forward(self)

    def enter(self, cache: ForwardCache) -> None:
        """Called before the first layer of a cache is updated."""
        self._cache = weakref.ref(cache)
        if self._turns is None:
            self.take_turn(cache)
        _require_none_on(cache.kv)
        cache.abort_step()  # a forward whose end no hook saw may have left a step open
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
        self._committed = True

    def end(self) -> None:
        """Ends the forward; restores everything as it was before, unless it is committed."""
        begun = self._turns is not None and not self._committed
        cache = self.cache if begun else None  # after os.fork the parent's is not asked
        if cache is not None:
            with cache.kv.lock:  # another thread may have taken the turn away
                self.abort()
        if self._turns is not None:
            self._turns.end_forward(self)

    def abort(self) -> None:
        """Restores everything as it was before the forward. The caller holds the lock."""
        cache = self.cache
        if cache is not None:
            if self.has_entered(cache):
                cache.abort_step()
            cache.end_forward()

    @property
    def is_mine(self) -> bool:
        """Whether it is a forward of the current thread."""
        return self in _thread.transactions

    def is_over(self) -> bool:
        """Whether its thread has ended, or an interrupt ended it, which hooks do not see."""
        if not self._is_left():
            return False
        sleep(LOOK_AGAIN)
        return self._is_left()

    def _is_left(self) -> bool:
        begun = self._all()
        top = None if begun is None else sys._current_frames().get(begun.thread)
        if begun is None or top is None or self not in begun:
            return True
        before = takewhile(lambda transaction: transaction is not self, [*begun])
        times = 1 + sum(transaction.outermost is self.outermost for transaction in before)
        return not _is_called(self.outermost, times, top)

    def _require_complete(self, cache: ForwardCache) -> None:
        for layer in cache.paged:
            if layer.staged is not None:
                raise changed_after_cache(layer.index)
        layers, passed = len(cache.paged), cache.forward_layer + 1
        if passed != layers:
            raise UnsupportedModelError(
                f"{type(self.outermost).__name__}: its forward passed {passed} of {layers} layers "
                "through the cache it was given"
            )
        if not cache.all_attended_again:
            raise UnsupportedModelError(
                f"{cache.attended_again} of {cache.shared_layers} layers without K and V of "
                "their own attended over the pages of others: the others were given copies"
            )


class _Transactions(list[Transaction]):
    """The forwards of a thread, in a list that can be referred to weakly."""

    def __init__(self) -> None:
        self.thread = threading.get_ident()


class _Thread(threading.local):
    """The forwards of this thread that have begun and are not over, the innermost last."""

    def __init__(self) -> None:
        self.transactions = _Transactions()


_thread = _Thread()


# ------------------------------------------------------------------ what layers and caches ask


def enter(cache: ForwardCache) -> None:
    """Called before the first layer of a cache is updated, in any forward.

    Raises:
        OpenStepError: another forward of this thread is under way on the same pages, or, if layers
            are called by hand, one of another thread.
        UnsupportedModelError: this forward has passed the cache's layers already.
    """
    forget_dead()
    mine = _thread.transactions
    within = mine[-1] if mine and mine[-1].may_hold(cache) else None
    if within is not None and within.has_entered(cache):
        raise UnsupportedModelError(f"{CACHE}: this forward passes the layers of its cache twice")
    if within is not None:
        within.enter(cache)
        return
    _require_none_on(cache.kv)
    with by_hand(cache):
        cache.abort_step()


def by_hand(cache: ForwardCache) -> AbstractContextManager[None]:
    """Returns a context that holds the pages for layers called by hand; a forward holds its own.

    Layers that are called by hand do not wait, since nobody knows what their thread holds.

    Raises:
        OpenStepError: a forward of another thread is under way.
    """
    if cache.transaction is not None:
        return nullcontext()
    cache.kv.lock.require_free()
    return cache.kv.lock


def require_none_on(kv: PagedKVCache) -> None:
    """Raises `OpenStepError` if a forward of this thread is under way on these pages."""
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
    """Aborts forwards that an interrupt ended: hooks see errors, but not interrupts.

    Args:
        beginning: the module whose call begins now, so that this call is no forward yet.
    """
    mine = _thread.transactions
    while mine:
        last = mine[-1].outermost
        begun = sum(transaction.outermost is last for transaction in mine)
        if _is_called(last, begun + (last is beginning)):
            return
        mine[-1].end()
        mine.pop()


def _is_called(module: nn.Module | None, times: int, frame: FrameType | None = None) -> bool:
    """Whether `times` calls of a module have not returned yet, seen from this or another frame."""
    frame = sys._getframe(1) if frame is None else frame
    while frame is not None and times:
        if frame.f_code.co_name == "_call_impl" and frame.f_locals.get("self") is module:
            times -= 1
        frame = frame.f_back
    return not times


# ------------------------------------------------------------------ hooks


def watch(module: nn.Module) -> list[RemovableHandle]:
    """Adds the hooks that begin and end a forward whose outermost module this is."""
    return [
        module.register_forward_pre_hook(begin, with_kwargs=True, prepend=True),
        module.register_forward_hook(commit),
        module.register_forward_hook(end, always_call=True),
    ]


@uncompiled
def begin(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Hook before the call of a module: begins a forward unless it is a part of one.

    Returns:
        The arguments to call it with instead; None for those that were given.
    """
    cache = next((x for x in (*kwargs.values(), *args) if isinstance(x, ForwardCache)), None)
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
    mine[-1].take_turn(cache)
    # Of arguments given by position only ids are named: what comes next differs between models.
    has_ids = bool(args) and isinstance(args[0], torch.Tensor)
    changed = cache.begin_forward({"input_ids": args[0], **kwargs} if has_ids else kwargs)
    if changed is None:
        return None
    return (None, *args[1:]) if has_ids else args, changed


@uncompiled
def commit(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    """Hook after the call of a module, if neither the call nor another hook has raised."""
    transaction = _innermost(module)
    if transaction is not None:
        transaction.commit()


@uncompiled
def end(module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
    """Hook after any call of a module; aborts a forward that was not committed."""
    transaction = _innermost(module)
    if transaction is None:
        return
    waiting.last = None
    transaction.end()
    _thread.transactions.pop()


def _innermost(module: nn.Module) -> Transaction | None:
    """Returns the innermost forward, if it is a call of this module."""
    mine = _thread.transactions
    if all(transaction.outermost is not module for transaction in mine):
        return None
    forget_dead()  # an interrupt within it was caught
    return mine[-1]


def _put_last(module: nn.Module) -> None:
    """Puts the hooks that end a forward behind hooks that a user added since, which may fail."""
    hooks: OrderedDict[int, Any] = module._forward_hooks  # type: ignore[assignment]
    if next(reversed(hooks.values()), None) is end:
        return
    for key, hook in [*hooks.items()]:
        if hook is commit or hook is end:
            hooks.move_to_end(key)  # other threads never find it missing
