"""Switching a model to paged attention and back.

Attachments are counted per model; when the last one goes, the former attention is restored. Threads
attach and detach one after another; a finalizer, which may run in the middle of that, never waits.
"""

from __future__ import annotations

import itertools
import os
import threading
import weakref
from collections import deque
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from pagedkv.interrupt import Uninterrupted
from pagedkv.models import facts_of

from .adapters import without_adapters
from .attention import attention_function
from .before import Before
from .distance_bias import watch_distances
from .forward_cache import NAME
from .masks import mask_function
from .mixers import watch_mixers
from .model import require_supported, text_config
from .mrope import DeltasPerThread, holder_of, placing
from .release import warn_if_untested
from .transaction import watch


@dataclass
class _Attachment:
    """A model's attention before it was attached, and the hooks that attaching added.

    Attributes:
        name: the name of its former attention.
        before: the former attention and masks, for calls without pages.
        hooks: by module, hooks that begin and end a forward of it.
        others: hooks of modules that compute recurrent states, and other changes to undo.
        count: attachments that were not taken back.
    """

    name: str
    before: Before
    hooks: weakref.WeakKeyDictionary[nn.Module, list[RemovableHandle]]
    others: list[Any]
    count: int = 0

    @property
    def all(self) -> list[Any]:
        """All changes that detaching undoes."""
        return [*self.others, *itertools.chain(*self.hooks.values())]


class _Original:
    """An attribute of an attached model that makes its copies unattached.

    Nobody would detach an attached copy, or know its former attention, least so in another process.
    """

    def __init__(self, config: Any, state: _Attachment) -> None:
        self._config, self._state = config, state

    def __reduce__(self) -> Any:
        hooks = [hook for hook in self._state.all if isinstance(hook, RemovableHandle)]
        found = [
            (hook.id, [ref() for ref in (hook.hooks_dict_ref, *hook.extra_dict_ref)])
            for hook in hooks
        ]
        return _restored, (self._config, self._state.name, found)


def _restored(config: Any, name: str, hooks: list[tuple[int, list[dict[int, Any]]]]) -> None:
    """Undoes, in a copy, what attaching had done to the model."""
    config._attn_implementation = name
    for number, tables in hooks:
        for table in tables:
            table.pop(number, None)


ORIGINAL = "_before_pagedkv"
_ATTACHED: weakref.WeakKeyDictionary[PreTrainedModel, _Attachment] = weakref.WeakKeyDictionary()
_attaching = threading.Lock()
_gone: deque[PreTrainedModel] = deque()  # to be detached by the thread that holds the lock
if hasattr(os, "register_at_fork"):  # not on Windows, which has no fork
    os.register_at_fork(after_in_child=_attaching._at_fork_reinit)  # type: ignore[attr-defined]


def register() -> None:
    """Makes `attn_implementation="pagedkv"` known to transformers. Idempotent.

    If the name were known for attention but not for masks, models would get no mask at all.
    """
    warn_if_untested()
    AttentionInterface.register(NAME, attention_function)
    AttentionMaskInterface.register(NAME, mask_function)


def attach(model: PreTrainedModel) -> None:
    """Switches a model to paged attention; `PagedCache` does this by itself.

    Args:
        model: a decoder of transformers, or a PEFT model of one.

    Raises:
        UnsupportedModelError: paged attention would be wrong for this model; nothing was changed.
    """
    _attach(model, transactions=True)


def leads_to(module: nn.Module, model: PreTrainedModel) -> bool:
    """Whether a called module runs an attached model, or a part of it that has its decoder."""
    state = _ATTACHED.get(model)
    return state is None or any(part in state.hooks for part in module.modules())


def attach_packed(model: PreTrainedModel) -> None:
    """`attach` for packed rows, whose step is opened and committed around the forward."""
    _attach(model, transactions=False)


def _attach(given: PreTrainedModel, transactions: bool) -> None:
    model = without_adapters(given)
    require_supported(model)
    register()
    with _attaching:
        _count_in(given, model, transactions)
    _settle()


def _count_in(given: PreTrainedModel, model: PreTrainedModel, transactions: bool) -> None:
    state = _ATTACHED.get(model)
    if state is None:
        _unpack(model)
        alike = _alike(model)
        name = text_config(model)._attn_implementation if alike is None else alike.name
        before = Before.of(model)
        _switch(model, NAME)
        hooks: weakref.WeakKeyDictionary[nn.Module, list[RemovableHandle]]
        hooks = weakref.WeakKeyDictionary()
        others = [*watch_mixers(model), *watch_distances(model), *placing(model)]
        state = _ATTACHED[model] = _Attachment(name, before, hooks, others)
        if (holder := holder_of(model)) is not None:
            others.append(DeltasPerThread(holder))
        vars(model)[ORIGINAL] = _Original(text_config(model), state)
    # Some PEFT models call the model's `forward`, which skips its hooks.
    for part in (given, *_on_the_way(model)) if transactions else ():
        if part not in state.hooks:
            state.hooks[part] = watch(part)
    state.count += 1


@torch.inference_mode(False)
@torch.no_grad()
def _unpack(model: PreTrainedModel) -> None:
    """Lets libraries bring packed weights into the form in which they compute.

    compressed-tensors, and bitsandbytes on a CPU, do so in a first forward. That would put other
    weights in the place of those with which a cache was begun.
    """
    hook = getattr(model, "ct_decompress_hook", None)
    if isinstance(hook, RemovableHandle):
        model._forward_pre_hooks[hook.id](model, ())
    for module in model.modules():
        is_packed = type(module).__module__.startswith("bitsandbytes.")
        if is_packed and isinstance(module, nn.Linear) and module.weight.is_cpu:
            module.forward(module.weight.new_zeros(2, module.in_features, dtype=model.dtype))


def detach(model: PreTrainedModel) -> None:
    """Takes back one `attach`; the last one restores the model's own attention."""
    model = without_adapters(model)
    with _attaching:
        if model not in _ATTACHED:
            raise ValueError("model: expected a model that was attached, this one is not")
        _count_out(model)
    _settle()


def detach_later(model: PreTrainedModel) -> None:
    """Runs `detach` for finalizers: at once, or when the thread that holds the lock is done."""
    _gone.append(model)
    _settle()


def _settle() -> None:
    while _gone:
        with Uninterrupted():
            if not _attaching.acquire(blocking=False):
                return  # the thread that holds it settles this, too
            try:
                while _gone:
                    _count_out(_gone.popleft())
            finally:
                _attaching.release()


def _count_out(model: PreTrainedModel) -> None:
    state = _ATTACHED[model]
    state.count -= 1
    if not state.count:
        del _ATTACHED[model]
        for hook in state.all:
            hook.remove()
        vars(model).pop(ORIGINAL, None)
        config, alike = text_config(model), _alike(model)
        if config._attn_implementation != NAME:
            return  # a user who switched away in between keeps that choice
        if alike is None:
            _switch(model, state.name)
        elif all(config is not used for one in _ATTACHED for used in _configs_of(one)):
            config._attn_implementation = state.name  # its decoder stays attached by another head


def _configs_of(model: PreTrainedModel) -> tuple[Any, Any]:
    """Returns the configuration that a head has of its decoder, and the decoder's own."""
    return text_config(model), getattr(model.get_decoder(), "config", None)


def _alike(model: PreTrainedModel) -> _Attachment | None:
    """Returns an attachment of the same configuration or decoder; None without one."""
    config, decoder = text_config(model), model.get_decoder()
    return next(
        (
            state
            for one, state in _ATTACHED.items()
            if text_config(one) is config or one.get_decoder() is decoder
        ),
        None,
    )


def _on_the_way(model: PreTrainedModel) -> list[nn.Module]:
    """Lists the models from this one down to its decoder; a caller may call any of them."""
    models = {n: m for n, m in model.named_modules() if isinstance(m, PreTrainedModel)}
    decoders = [f"{name}." for name, part in models.items() if part.config is text_config(model)]
    return [
        part
        for name, part in models.items()
        if part is model or any(decoder.startswith(f"{name}.") for decoder in decoders)
    ]


def _switch(model: PreTrainedModel, name: str) -> None:
    """Sets the attention of the decoder only; a vision tower keeps its own."""
    decoder = text_config(model)
    if facts_of(decoder.model_type).written:  # transformers would leave its name as it is
        decoder._attn_implementation = name
        return
    parts = [part for part in model.config.sub_configs if getattr(model.config, part) is decoder]
    model.set_attn_implementation(dict.fromkeys(parts or [""], name))
    own = _configs_of(model)[1]
    if type(own) is type(decoder) and own is not decoder:  # of another head; 5.17 leaves it
        own._attn_implementation = name
