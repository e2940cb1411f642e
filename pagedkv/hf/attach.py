"""Switching a model to paged attention and back.

Attachments are counted per model; the last one to go restores what was there before.
"""

from __future__ import annotations

import weakref
from dataclasses import dataclass

from torch.utils.hooks import RemovableHandle
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from .adapters import without_adapters
from .attention import after_forward, attention_function, before_forward, mask_function
from .continuous import CONTINUOUS, continuous_attention
from .forward import NAME
from .model import require_supported, text_config


@dataclass
class _Attachment:
    before: str
    hooks: list[RemovableHandle]
    count: int = 0


_ATTACHED: weakref.WeakKeyDictionary[PreTrainedModel, _Attachment] = weakref.WeakKeyDictionary()


def register() -> None:
    """Makes `attn_implementation="pagedkv"` known to transformers. Idempotent.

    A name known for attention but not for masks would get no mask at all, so both go together.
    `generate_batch` asks for `paged|pagedkv`, which needs no mask and shall get none.
    """
    AttentionInterface.register(NAME, attention_function)
    AttentionMaskInterface.register(NAME, mask_function)
    AttentionInterface.register(CONTINUOUS, continuous_attention)


def attach(model: PreTrainedModel) -> None:
    """Switches a model to paged attention; `PagedCache` does this by itself.

    Args:
        model: a decoder of transformers, or a PEFT model of one.

    Raises:
        UnsupportedModelError: paged attention would be wrong for this model; nothing was changed.
    """
    model = without_adapters(model)
    require_supported(model)
    register()
    state = _ATTACHED.get(model)
    if state is None:
        before = text_config(model)._attn_implementation
        _switch(model, NAME)
        hooks = [
            model.register_forward_pre_hook(before_forward, with_kwargs=True),
            model.register_forward_hook(after_forward, always_call=True),
        ]
        state = _Attachment(before, hooks)
        _ATTACHED[model] = state
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
        for hook in state.hooks:
            hook.remove()
        # A user who switched away in between keeps that choice.
        if text_config(model)._attn_implementation == NAME:
            _switch(model, state.before)


def _switch(model: PreTrainedModel, name: str) -> None:
    """Sets the attention of the decoder alone; a vision tower keeps its own."""
    decoder = text_config(model)
    parts = [part for part in model.config.sub_configs if getattr(model.config, part) is decoder]
    model.set_attn_implementation(dict.fromkeys(parts or [""], name))
