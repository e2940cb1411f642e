"""A model's identity, so that its K and V are never taken for those of other weights."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from hashlib import sha256

import torch
from transformers import PreTrainedModel

from pagedkv.cache.identity import Identity
from pagedkv.config import field_of

from .adapters import acting, salted, state_of, tensors_of
from .staleness import is_stale, look, places_of, plain, some_of


@torch.no_grad()
def fingerprint_of(model: PreTrainedModel) -> bytes:
    """A digest of a model's parameters, rotary embedding and acting adapters, 32 bytes.

    The same for a checkpoint in every process, on any device, and in float32 as in bfloat16. Some
    elements of each parameter stand for all: it tells models apart, not forgeries. Adapters that do
    not act do not count. Those of weights that a `LayerStreamer` brings are read from their files;
    where weights are elsewhere, because somebody else offloaded them, nothing is known: no bytes.
    """
    adapters = acting(model)
    names = {name for _, own, _ in adapters for name, *_ in own}
    with getattr(model, "in_turn", nullcontext)():  # between the passes of a streamed model
        parameters = {
            name: tensor
            for name, tensor, of_adapter in tensors_of(model)
            if isinstance(tensor, torch.nn.Parameter)
            and (not of_adapter or names.intersection(name.replace("+", ".").split(".")))
        }
    if any(p.is_meta and not hasattr(p, "elements") for p in parameters.values()):
        return b""
    rope = field_of(model.config.get_text_config(decoder=True), "rope_parameters")
    shapes = {name: list(parameter.shape) for name, parameter in parameters.items()}
    facts = json.dumps([rope, shapes, adapters], sort_keys=True, default=str)
    digest = sha256(facts.encode())
    samples: dict[torch.device, list[torch.Tensor]] = {}
    for name in sorted(parameters):
        for _, part in plain(name, parameters[name]):
            if hasattr(part, "elements"):  # it streams
                some = part.elements(places_of(part)).to(model.device)
            else:
                some = some_of(part)
            if some is not None:
                samples.setdefault(some.device, []).append(_rounded(some))
    for each in samples.values():
        digest.update(torch.cat(each).view(torch.int16).cpu().numpy().tobytes())
    return digest.digest()


def _rounded(some: torch.Tensor) -> torch.Tensor:
    """Numbers as they are in bfloat16; the bytes of what are none by themselves."""
    if some.is_complex():
        return torch.view_as_real(some).flatten().to(torch.bfloat16)
    try:
        return some.to(torch.bfloat16)
    except (RuntimeError, NotImplementedError):  # several in a byte, say
        return some.view(torch.uint8).to(torch.bfloat16)


class ModelIdentity(Identity):
    """A model as what K and V in a cache are computed with: its weights and adapters as they are.

    Args:
        given: a fingerprint that a caller gave the cache; it stands for the weights.
        made: what stands for a model that is gone.
    """

    def __init__(self, model: PreTrainedModel, given: bytes | None, made: bytes) -> None:
        super().__init__(made)
        self.model = weakref.ref(model)
        self.given = given
        self._seen = look(model)

    def fingerprint(self) -> bytes:
        model = self.model()
        if model is None:
            return super().fingerprint()
        return fingerprint_of(model) if self.given is None else self.given + state_of(model)

    def salted(self, salt: bytes) -> bytes:
        model = self.model()
        return salt if model is None else salted(state_of(model), salt)

    def forget_stale(self, forget: Callable[[], None]) -> None:
        model = self.model()
        if model is None:
            return
        now = look(model)
        if is_stale(self._seen, now):
            forget()
        self._seen = now
