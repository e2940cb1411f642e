"""A model's identity, so that its K and V are never taken for those of other weights."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable
from hashlib import sha256
from typing import Any

import torch
from transformers import PreTrainedModel, __version__

from pagedkv.cache.identity import Identity
from pagedkv.config import field_of
from pagedkv.ranks import ranks_of

from .adapters import acting, parts_of, salted, state_of, tensors_of
from .staleness import Snapshot, bits, is_stale, places_of, plain, snapshot, some_of

SUMMED = 4096  # bytes that have a sum of their own, so that parts which change places are seen
AT_ONCE = 1 << 26  # bytes that are copied to be summed


@torch.no_grad()
def fingerprint_of(model: PreTrainedModel) -> bytes:
    """A digest of a model's parameters, rotary embedding and acting adapters, 32 bytes.

    A checkpoint has the same digest in every process, on any device, in float32 and in bfloat16.
    Only some elements of each parameter are read: the digest tells models apart, not forgeries.
    Adapters that do not act do not count. Elements of weights that a `LayerStreamer` brings are
    read from their files. Weights that another library offloaded, or packed into an object of its
    own, cannot be read; then the digest is empty.
    """
    if any(
        isinstance(own, torch.ScriptObject) for m in model.modules() for own in vars(m).values()
    ):
        return b""
    adapters = acting(model)
    parameters = {
        name: tensor
        for name, tensor in _tensors(model, adapters).items()
        if isinstance(tensor, torch.nn.Parameter)
    }
    if any(p.is_meta and not hasattr(p, "elements") for p in parameters.values()):
        return b""
    rope = field_of(model.config.get_text_config(decoder=True), "rope_parameters")
    shapes = {name: list(parameter.shape) for name, parameter in parameters.items()}
    facts = json.dumps([rope, shapes, adapters], sort_keys=True, default=str)
    digest = sha256(facts.encode())
    digest.update(of_rank(model, b""))
    samples: dict[torch.device, list[torch.Tensor]] = {}
    for name in sorted(parameters):
        for _, part in plain(name, parameters[name]):
            some = _streamed(part, model) if hasattr(part, "elements") else some_of(part)
            if some is not None:
                bits = _rounded(some).view(torch.int16)  # which no autocast changes
                samples.setdefault(some.device, []).append(bits)
    for each in samples.values():
        digest.update(torch.cat(each).cpu().numpy().tobytes())
    return digest.digest()


def of_rank(model: PreTrainedModel, fingerprint: bytes) -> bytes:
    """A fingerprint of the pages of one rank, which hold heads of their own."""
    ranks = ranks_of(model)
    if ranks.size == 1:
        return fingerprint
    return fingerprint + b" rank %d of %d" % (ranks.rank, ranks.size)


@torch.no_grad()
def weights_of(model: PreTrainedModel) -> bytes:
    """A digest of what K and V depend on besides the ids, for prefixes that outlast the process.

    It is stricter than `fingerprint_of`: it also has the exact bits of some elements, buffers that
    are saved with the model, its configuration and the version of transformers. Empty where the
    fingerprint is.
    """
    fingerprint = fingerprint_of(model)
    if not fingerprint:
        return b""
    settings = {k: v for k, v in model.config.to_dict().items() if not k.startswith("_")}
    settings["transformers_version"] = __version__  # in place of that which wrote the files
    said = json.dumps(settings, sort_keys=True, default=lambda value: type(value).__name__)
    digest = sha256(fingerprint + type(model).__name__.encode() + said.encode())
    tensors = _tensors(model, acting(model))
    named = [part for name in sorted(tensors) for part in plain(name, tensors[name])]
    streamed = {n: _streamed(part, model) for n, part in named if hasattr(part, "elements")}
    for (name, part), found in zip(named, bits([streamed.get(n, part) for n, part in named])):
        digest.update(f"{name} {part.dtype} {len(found)} ".encode() + found)
    return digest.digest()


@torch.no_grad()
def sums_of(model: PreTrainedModel) -> bytes:
    """A digest of all bytes of a model's weights, which one changed element changes too.

    It reads every weight once. Empty where a `LayerStreamer` brings some: their elements are looked
    at in their files, and reading them all would take as long as a pass.
    """
    tensors = _tensors(model, acting(model))
    parts = [part for name in sorted(tensors) for _, part in plain(name, tensors[name])]
    if any(hasattr(part, "elements") for part in parts):
        return b""
    digest = sha256()
    for part in parts:
        if some_of(part) is not None:
            digest.update(_sums(part.detach().contiguous().view(torch.uint8).flatten()))
    return digest.digest()


def _sums(raw: torch.Tensor) -> bytes:
    """Sums over the 8-byte words of each `SUMMED` bytes, and over the bytes that are left."""
    whole = raw.numel() // SUMMED * SUMMED
    words = []
    for chunk in raw[:whole].split(AT_ONCE):
        aligned = chunk if chunk.storage_offset() % 8 == 0 else chunk.clone()
        words.append(aligned.view(torch.int64).view(-1, SUMMED // 8).sum(1))
    return torch.cat([*words, raw[whole:].sum(dtype=torch.int64)[None]]).cpu().numpy().tobytes()


def _tensors(model: PreTrainedModel, adapters: list[Any]) -> dict[str, torch.Tensor]:
    """Parameters, and buffers that are saved with them, but for those of adapters at rest."""
    names = {name for _, own, *_ in adapters for name, *_ in own}

    def found() -> dict[str, torch.Tensor]:
        passing = {
            f"{path}.{name}"
            for path, module, _ in parts_of(model)
            for name in module._non_persistent_buffers_set
        }
        return {
            name: tensor
            for name, tensor, of_adapter in tensors_of(model)
            if name not in passing
            and (not of_adapter or names.intersection(name.replace("+", ".").split(".")))
        }

    # Between the passes of a streamed model.
    between = getattr(model, "in_turn", None)
    return found() if between is None else between(found)


def _streamed(part: Any, model: PreTrainedModel) -> torch.Tensor:
    """Samples of a tensor that a `LayerStreamer` brings, out of its file."""
    some: torch.Tensor = part.elements(places_of(part)).to(model.device)
    return some


def _rounded(some: torch.Tensor) -> torch.Tensor:
    """Numbers rounded to bfloat16; of packed dtypes the bytes as numbers."""
    if some.is_complex():
        return torch.view_as_real(some).flatten().to(torch.bfloat16)
    try:
        return some.to(torch.bfloat16)
    except (RuntimeError, NotImplementedError):  # several in a byte, say
        return some.view(torch.uint8).to(torch.bfloat16)


class ModelIdentity(Identity):
    """The identity of a model: its weights and adapters as they are when it is asked for.

    Args:
        given: a fingerprint that a caller gave the cache, used in place of the weights'.
        made: the fingerprint that is used once the model was collected.
    """

    def __init__(self, model: PreTrainedModel, given: bytes | None, made: bytes) -> None:
        super().__init__(made)
        self.model = weakref.ref(model)
        self.given = given
        self._seen = snapshot(model)
        self._sums: tuple[Snapshot, bytes] | None = None

    def fingerprint(self) -> bytes:
        model = self.model()
        if model is None:
            return super().fingerprint()
        return fingerprint_of(model) if self.given is None else self.given + state_of(model)

    def weights(self) -> bytes:
        model = self.model()
        if model is None:
            return b""
        now = snapshot(model)
        if self._sums is None or is_stale(self._sums[0], now):
            self._sums = now, sums_of(model)
        return weights_of(model) + self._sums[1] + (self.given or b"")

    def salted(self, salt: bytes) -> bytes:
        model = self.model()
        return salt if model is None else salted(state_of(model), salt)

    def forget_stale(self, forget: Callable[[], None]) -> None:
        model = self.model()
        if model is None:
            return
        now = snapshot(model)
        if is_stale(self._seen, now):
            forget()
        self._seen = now
