"""A model's identity, so that no model is given K and V which it would compute differently.

Files and prefixes carry a model's `fingerprint_of`, in memory or streamed; `sums_of` adds all bytes
of its weights, for prefixes that a store finds by itself.
"""

from __future__ import annotations

import json
import re
import weakref
from collections.abc import Callable, Iterator, Mapping
from hashlib import sha256
from numbers import Number
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel, __version__

from pagedkv.cache.identity import Identity
from pagedkv.pages.salts import Salt, first_of, with_first

from .adapters import Held, acting, parts_of, salted, state_of, tensors_of
from .carried import carried_by
from .foreign_code import foreign_code
from .foreign_hooks import foreign_hook, hooks_of
from .samples import bits, places_of, some_of
from .shards import of_rank
from .snapshot import Snapshot, is_stale, snapshot

ROW = 8256  # bytes of a row; no power of two, so that a column falls into different cache sets
# Bytes at a time: so few stay in a CPU's cache between two sums; a card's launch takes many.
AT_ONCE = {"cpu": 192 * ROW, "cuda": 8192 * ROW}
# Fields of a configuration that name a model or say how it is called, not what it computes.
UNTOLD = re.compile(
    "_.*|output_.*|.*_token_id|architectures|auto_map|dtype|gradient_checkpointing|id2label|"
    "label2id|problem_type|return_dict|torch_dtype|transformers_(version|weights)|use_cache"
)


@torch.no_grad()
def fingerprint_of(model: PreTrainedModel) -> bytes:
    """Returns a digest, 32 bytes, of all that a model's K and V depend on besides the ids.

    These are its class and configuration, its parameters, the buffers that it saves and computes,
    the numbers that its modules keep, such as scales, and the active adapters. It is equal in every
    process, on any device, in memory and streamed: elements that a `LayerStreamer` brings are read
    from their files. Only some elements of each tensor are read: the digest tells models apart, not
    forgeries. Weights that another library offloaded, or packed into an object of its own, cannot
    be read; then the digest is empty.
    """
    # Copied, because a step of another thread may put a forward into a module meanwhile.
    owned = (own for module in model.modules() for own in vars(module).copy().values())
    if any(isinstance(own, torch.ScriptObject) for own in owned):
        return b""
    adapters = acting(model)
    held = _held(model, adapters)
    if any(each.tensor.is_meta and not hasattr(each.tensor, "elements") for each in held):
        return b""
    kinds = [[each.name, str(each.tensor.dtype), list(each.tensor.shape)] for each in held]
    settings, paths, carried = carried_by(model)
    settings += _numbers(model)
    facts = [type(model).__name__, _told(model.config), adapters, kinds, *settings]
    digest = sha256(json.dumps(facts, sort_keys=True).encode())
    digest.update(of_rank(model, b""))
    for found in bits([_read(model, each) for each in held]):
        digest.update(found)
    digest.update(repr(sorted(zip(paths, bits(carried)))).encode() if carried else b"")
    return digest.digest()


@torch.no_grad()
def sums_of(model: PreTrainedModel) -> bytes:
    """Returns a digest of all bytes of a model's tensors: a changed or swapped element changes it.

    It reads every weight once. It is empty if a `LayerStreamer` brings some weights: reading all of
    these from their files would take as long as a pass.
    """
    tensors = {id(each.tensor): each.tensor for each in _held(model, acting(model))}.values()
    if any(hasattr(tensor, "elements") for tensor in tensors):
        return b""
    digest = sha256()
    for tensor in tensors:
        for found in _sums(tensor):
            digest.update(found.cpu().numpy().tobytes())
    _, paths, carried = carried_by(model)
    sums = [[x.cpu().numpy().tobytes() for x in _sums(one)] for one in carried]
    digest.update(repr(sorted(zip(paths, sums))).encode() if carried else b"")
    return digest.digest()


def _sums(tensor: Tensor) -> Iterator[Tensor]:
    """Yields the bytes beyond the last whole row, then sums of words over columns and over rows."""
    if some_of(tensor) is None:
        return
    raw = tensor.detach().contiguous().flatten().view(torch.uint8)
    size = raw.numel() // ROW * ROW
    yield raw[size:]
    if not size:
        return
    columns, rows = raw.new_zeros(ROW // 8, dtype=torch.int64), []
    for part in raw[:size].split(AT_ONCE.get(raw.device.type, size)):
        aligned = part if part.storage_offset() % 8 == 0 else part.clone()
        words = aligned.view(torch.int64).view(-1, ROW // 8)
        rows.append(words.sum(1))
        columns += words.sum(0)
    yield torch.cat([columns, *rows])


def _told(value: Any) -> Any:
    """Returns the part of a configuration on which its model's results depend, as JSON."""
    if isinstance(value, PreTrainedConfig):
        value = {**vars(value), "model_type": value.model_type}
    elif callable(getattr(value, "to_dict", None)):  # the configuration of a quantisation
        value = value.to_dict()
    if isinstance(value, Mapping):
        named = ((str(name), each) for name, each in value.items())
        return {name: _told(each) for name, each in named if not UNTOLD.fullmatch(name)}
    if isinstance(value, (list, tuple)):
        return [_told(each) for each in value]
    if value is None or isinstance(value, (int, float, str)):
        return value
    return str(value) if isinstance(value, (torch.dtype, Number)) else str(type(value))


def _numbers(model: PreTrainedModel) -> list[str]:
    """Returns the numbers that modules compute with besides tensors, such as scales."""
    return sorted(
        f"{part.path} {name} {own!r}"
        for part in parts_of(model, adapters=False)
        if not part.of_adapter
        for name, own in vars(part.module).copy().items()
        if type(own) is float
    )


def _others(model: PreTrainedModel) -> Any:
    """Returns what changes K and V besides tensors: hooks and code of others, modules' numbers."""
    return hooks_of(model), foreign_code(model), _numbers(model)


def _held(model: PreTrainedModel, adapters: list[Any]) -> list[Held]:
    """Returns parameters and buffers in the order of their names, without inactive adapters'."""
    names = {name for _, own, *_ in adapters for name, *_ in own}

    def found() -> list[Held]:
        acts = (
            each
            for each in tensors_of(model)
            if not each.of_adapter or names.intersection(each.name.replace("+", ".").split("."))
        )
        return sorted(acts, key=lambda each: each.name)

    # A streamed model is looked at between two passes.
    between = getattr(model, "in_turn", None)
    return found() if between is None else between(found)


def _read(model: PreTrainedModel, held: Held) -> Tensor:
    """Returns the elements of a tensor that a fingerprint is made of."""
    tensor: Any = held.tensor
    if hasattr(tensor, "elements"):  # a `LayerStreamer` brings it
        streamed: Tensor = tensor.elements(places_of(tensor)).to(model.device)
        return streamed
    some = some_of(tensor) if held.computed and tensor.is_floating_point() else None
    # Another machine may compute other last bits; autocast does not change integers.
    return tensor if some is None else some.to(torch.bfloat16).view(torch.int16)


class ModelIdentity(Identity):
    """The identity of a model: its weights and adapters at the moment of asking.

    Args:
        given: a fingerprint that a caller gave the cache, used in place of the model's.
        made: the fingerprint that is used once the model was garbage-collected.
        rounded: how the weights that compute K and V are rounded; empty if they are not.
    """

    def __init__(
        self, model: PreTrainedModel, given: bytes | None, made: bytes, rounded: bytes = b""
    ) -> None:
        super().__init__(made + rounded)
        self.model = weakref.ref(model)
        self.given, self.rounded = given, rounded
        self._seen, self._others = snapshot(model), _others(model)
        self._sums: tuple[Snapshot, bytes] | None = None

    def fingerprint(self) -> bytes:
        model = self.model()
        if model is None:
            return super().fingerprint()
        found = fingerprint_of(model) if self.given is None else self.given + state_of(model)
        return found + self.rounded

    def weights(self) -> bytes:
        model = self.model()
        # Nobody knows what a hook computes, or whether code of others will be the same again.
        if model is None or foreign_hook(model) or foreign_code(model):
            return b""
        fingerprint = fingerprint_of(model)
        if not fingerprint:
            return b""
        now = snapshot(model)
        if self._sums is None or is_stale(self._sums[0], now):
            self._sums = now, sums_of(model)
        facts = fingerprint, self._sums[1], __version__, self.given
        return sha256(repr(facts).encode()).digest()

    def salted(self, salt: Salt) -> Salt:
        model = self.model()
        state = self.rounded if model is None else state_of(model) + self.rounded
        return with_first(salt, salted(state, first_of(salt)))

    def forget_stale(self, forget: Callable[[], None]) -> bool:
        model = self.model()
        if model is None:
            return False
        now, others = snapshot(model), _others(model)
        changed = others != self._others or is_stale(self._seen, now)
        if changed:
            forget()
        self._seen, self._others = now, others
        return changed
