"""Switching a model to paged attention and back.

Attachments are counted per model; the last one to go restores what was there before.
"""

from __future__ import annotations

import itertools
import weakref
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from .adapters import without_adapters
from .attention import attention_function
from .before import Before
from .forward import NAME
from .masks import mask_function
from .mixers import watch_mixers
from .model import require_supported, text_config
from .release import warn_if_untested
from .transaction import watch


@dataclass
class _Attachment:
    """What a model was before, and what was added to it.

    Attributes:
        name: of its attention.
        before: the same, for calls without pages.
        hooks: by module, what begins and ends a forward of it.
        mixers: hooks of the modules that compute recurrent states.
        count: attachments that were not taken back.
    """

    name: str
    before: Before
    hooks: weakref.WeakKeyDictionary[nn.Module, list[RemovableHandle]]
    mixers: list[RemovableHandle]
    count: int = 0


_ATTACHED: weakref.WeakKeyDictionary[PreTrainedModel, _Attachment] = weakref.WeakKeyDictionary()


def register() -> None:
    """Makes `attn_implementation="pagedkv"` known to transformers. Idempotent.

    A name known for attention but not for masks would get no mask at all, so both go together.
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


def attach_packed(model: PreTrainedModel) -> None:
    """`attach` for packed rows, whose step is opened and committed around the forward."""
    _attach(model, transactions=False)


def _attach(model: PreTrainedModel, transactions: bool) -> None:
    given, model = model, without_adapters(model)
    require_supported(model)
    register()
    state = _ATTACHED.get(model)
    if state is None:
        name, before = text_config(model)._attn_implementation, Before.of(model)
        _switch(model, NAME)
        hooks: weakref.WeakKeyDictionary[nn.Module, list[RemovableHandle]]
        hooks = weakref.WeakKeyDictionary()
        state = _ATTACHED[model] = _Attachment(name, before, hooks, watch_mixers(model))
    for part in (*_around(given, model), *_on_the_way(model)) if transactions else ():
        if part not in state.hooks:
            state.hooks[part] = watch(part)
    state.count += 1


def detach(model: PreTrainedModel) -> None:
    """Takes back one `attach`; the last one restores the model's own attention."""
    model = without_adapters(model)
    state = _ATTACHED.get(model)
    if state is None:
        raise ValueError("model: expected a model that was attached, this one is not")
    state.count -= 1
    if not state.count:
        del _ATTACHED[model]
        for hook in itertools.chain(state.mixers, *state.hooks.values()):
            hook.remove()
        # A user who switched away in between keeps that choice.
        if text_config(model)._attn_implementation == NAME:
            _switch(model, state.name)


def _around(given: Any, model: PreTrainedModel) -> list[nn.Module]:
    """The modules of PEFT around a model; some call its `forward`, which runs no hooks of it."""
    around = () if given is model else (given, getattr(given, "base_model", None))
    return [part for part in around if isinstance(part, nn.Module)]


def _on_the_way(model: PreTrainedModel) -> list[nn.Module]:
    """The models from this one to its decoder, each of which may be the one that is called."""
    models = {n: m for n, m in model.named_modules() if isinstance(m, PreTrainedModel)}
    decoders = [f"{name}." for name, part in models.items() if part.config is text_config(model)]
    return [
        part
        for name, part in models.items()
        if part is model or any(decoder.startswith(f"{name}.") for decoder in decoders)
    ]


def _switch(model: PreTrainedModel, name: str) -> None:
    """Sets the attention of the decoder alone; a vision tower keeps its own."""
    decoder = text_config(model)
    parts = [part for part in model.config.sub_configs if getattr(model.config, part) is decoder]
    model.set_attn_implementation(dict.fromkeys(parts or [""], name))
