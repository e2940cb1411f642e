"""A model's identity: K and V are never taken for those of a model that would compute others.

`fingerprint_of` is what files and prefixes carry of a model, in memory or streamed; `sums_of` adds
all bytes of its weights, for what is found by itself in a prefix store. `snapshot` and `is_stale`
tell whether a model is still the one that stored K and V were computed with: torch's counts of
writes would not do, because fused optimizers and numpy views write without counting.
"""

from __future__ import annotations

import json
import math
import re
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from hashlib import sha256
from itertools import chain
from numbers import Number
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel, __version__

from pagedkv.cache.identity import Identity
from pagedkv.errors import ModelChangedError
from pagedkv.pages.salts import Salt, first_of, with_first

from .adapters import Held, acting, salted, state_of, tensors_of
from .carried import carried_by
from .foreign_hooks import foreign_hook
from .shards import of_rank

SAMPLES = 64  # elements read of each tensor: a training step changes nearly all elements
GOLDEN = (math.sqrt(5) - 1) / 2
ROW = 8256  # bytes that are summed; no power of two, so that columns do not meet in a cache
# Bytes at a time: a processor's cache keeps them from one sum to the other, a card has launches.
AT_ONCE = {"cpu": 192 * ROW, "cuda": 8192 * ROW}
# Fields of a configuration that name a model or say how it is called, not what it computes.
UNTOLD = re.compile(
    "_.*|output_.*|.*_token_id|architectures|auto_map|dtype|gradient_checkpointing|id2label|"
    "label2id|problem_type|return_dict|torch_dtype|transformers_(version|weights)|use_cache"
)


@torch.no_grad()
def fingerprint_of(model: PreTrainedModel) -> bytes:
    """A digest of what a model's K and V depend on besides the ids, 32 bytes.

    That is its class and configuration, its parameters, the buffers that it saves and computes, and
    the adapters that act. It is the same in every process, on any device, in memory and streamed:
    elements that a `LayerStreamer` brings are read from their files. Only some elements of each
    tensor are read: the digest tells models apart, not forgeries. Weights that another library
    offloaded, or packed into an object of its own, cannot be read; then the digest is empty.
    """
    owned = (own for module in model.modules() for own in vars(module).values())
    if any(isinstance(own, torch.ScriptObject) for own in owned):
        return b""
    adapters = acting(model)
    held = _held(model, adapters)
    if any(each.tensor.is_meta and not hasattr(each.tensor, "elements") for each in held):
        return b""
    kinds = [[each.name, str(each.tensor.dtype), list(each.tensor.shape)] for each in held]
    settings, paths, carried = carried_by(model)
    facts = [type(model).__name__, _told(model.config), adapters, kinds, *settings]
    digest = sha256(json.dumps(facts, sort_keys=True).encode())
    digest.update(of_rank(model, b""))
    for found in bits([_read(model, each) for each in held]):
        digest.update(found)
    digest.update(repr(sorted(zip(paths, bits(carried)))).encode() if carried else b"")
    return digest.digest()


@torch.no_grad()
def sums_of(model: PreTrainedModel) -> bytes:
    """A digest of all bytes of a model's tensors: one changed or exchanged element changes it.

    It reads every weight once. Empty where a `LayerStreamer` brings some: their elements are looked
    at in their files, and reading them all would take as long as a pass.
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
    """Sums over the rows and over the columns of words, and what is less than a row as it is."""
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
    elif callable(getattr(value, "to_dict", None)):  # of a quantisation
        value = value.to_dict()
    if isinstance(value, Mapping):
        named = ((str(name), each) for name, each in value.items())
        return {name: _told(each) for name, each in named if not UNTOLD.fullmatch(name)}
    if isinstance(value, (list, tuple)):
        return [_told(each) for each in value]
    if value is None or isinstance(value, (int, float, str)):
        return value
    return str(value) if isinstance(value, (torch.dtype, Number)) else str(type(value))


def _held(model: PreTrainedModel, adapters: list[Any]) -> list[Held]:
    """Parameters and buffers, in the order of their names, but for those of adapters at rest."""
    names = {name for _, own, *_ in adapters for name, *_ in own}

    def found() -> list[Held]:
        acts = (
            each
            for each in tensors_of(model)
            if not each.of_adapter or names.intersection(each.name.replace("+", ".").split("."))
        )
        return sorted(acts, key=lambda each: each.name)

    # Between the passes of a streamed model.
    between = getattr(model, "in_turn", None)
    return found() if between is None else between(found)


def _read(model: PreTrainedModel, held: Held) -> Tensor:
    """Returns the elements of a tensor that a fingerprint is made of."""
    tensor: Any = held.tensor
    if hasattr(tensor, "elements"):  # which a `LayerStreamer` brings
        streamed: Tensor = tensor.elements(places_of(tensor)).to(model.device)
        return streamed
    some = some_of(tensor) if held.computed and tensor.is_floating_point() else None
    # Another machine may compute other last bits. Integers are what no autocast changes.
    return tensor if some is None else some.to(torch.bfloat16).view(torch.int16)


class ModelIdentity(Identity):
    """The identity of a model: its weights and adapters as they are when it is asked for.

    Args:
        given: a fingerprint that a caller gave the cache, used in place of the model's.
        made: the fingerprint that is used once the model was collected.
        rounded: how its weights are rounded where K and V are computed; empty if they are not.
    """

    def __init__(
        self, model: PreTrainedModel, given: bytes | None, made: bytes, rounded: bytes = b""
    ) -> None:
        super().__init__(made + rounded)
        self.model = weakref.ref(model)
        self.given, self.rounded = given, rounded
        self._seen = snapshot(model)
        self._sums: tuple[Snapshot, bytes] | None = None

    def fingerprint(self) -> bytes:
        model = self.model()
        if model is None:
            return super().fingerprint()
        found = fingerprint_of(model) if self.given is None else self.given + state_of(model)
        return found + self.rounded

    def weights(self) -> bytes:
        model = self.model()
        if model is None or foreign_hook(model):  # what a hook computes is unknown
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

    def forget_stale(self, forget: Callable[[], None]) -> None:
        model = self.model()
        if model is None:
            return
        now = snapshot(model)
        if is_stale(self._seen, now):
            forget()
        self._seen = now


# ------------------------------------------------------------------ whether it has changed


class Seen(NamedTuple):
    """A tensor at the time of a snapshot.

    Attributes:
        tensor: the tensor itself.
        version: writes to it that torch counted.
        address: where its bytes lie.
        bits: the bytes of some of its elements.
        of_adapter: whether it belongs to an adapter.
    """

    tensor: weakref.ref[Tensor]
    version: int
    address: int
    bits: bytes
    of_adapter: bool

    def is_same(self, other: Seen) -> bool:
        """Whether no sign shows that the tensor was changed in between."""
        return self.tensor() is other.tensor() and self[1:4] == other[1:4]


Snapshot = dict[str, Seen]


def snapshot(model: nn.Module) -> Snapshot:
    """The weights of a model as they are now, by name."""
    held = list(tensors_of(model))
    return {
        each.name: Seen(weakref.ref(each.tensor), *_counted(each.tensor), some, each.of_adapter)
        for each, some in zip(held, bits([each.tensor for each in held]))
    }


def is_stale(before: Snapshot, now: Snapshot) -> bool:
    """Whether K and V computed at one snapshot may differ from those computed at a later one.

    Adapters that were added do not count: where they act, the salt of prefixes differs
    (`adapters.state_of`), and elsewhere they change nothing.
    """
    for name, seen in before.items():
        if name not in now or not seen.is_same(now[name]):
            return True
    return any(not seen.of_adapter for name, seen in now.items() if name not in before)


class Weights(NamedTuple):
    """The weights and adapters that the rows of a cache were begun with."""

    seen: Snapshot
    adapters: bytes

    @classmethod
    def of(cls, model: Any, by_row: Sequence[str] | None = None) -> Weights:
        """Weights and adapters of a model as it is now; `by_row` names the adapter of each row."""
        return cls(snapshot(model), state_of(model, by_row))

    def require_same(self, model: Any, by_row: Sequence[str] | None = None) -> None:
        """Raises ModelChangedError where K and V computed now would be others."""
        now = Weights.of(model, by_row)
        if now.adapters != self.adapters or is_stale(self.seen, now.seen):
            others = now.adapters != self.adapters
            what = "adapters (`set_adapter`, `adapter_names`)" if others else "weights"
            raise ModelChangedError(
                f"model: its {what} have changed since this PagedCache was filled; `reset()` it "
                "or start a new one"
            )


# ------------------------------------------------------------------ some elements of each


@torch.inference_mode()
def bits(tensors: Sequence[Tensor]) -> list[bytes]:
    """The exact bytes of some elements of each tensor; none where a tensor has none here."""
    views: dict[torch.device, dict[torch.dtype, list[tuple[int, Tensor]]]] = {}
    for i, tensor in enumerate(tensors):
        view = some_of(tensor)
        if view is not None:
            views.setdefault(view.device, {}).setdefault(view.dtype, []).append((i, view))
    found = [b""] * len(tensors)
    for kinds in views.values():
        packed = [torch.cat([view for _, view in kind]) for kind in kinds.values()]
        raw = torch.cat([one.view(torch.uint8) for one in packed]).cpu().numpy().tobytes()
        begin = 0
        for i, view in chain(*kinds.values()):
            end = begin + view.numel() * view.element_size()
            found[i] = raw[begin:end]
            begin = end
    return found


def some_of(tensor: Tensor) -> Tensor | None:
    """`[n]`, at most `SAMPLES` elements from all over a tensor, of which nothing else is read.

    None for a tensor without readable elements: it is empty, its bytes are elsewhere, or it is of a
    class of its own.
    """
    if type(tensor) not in (nn.Parameter, Tensor, nn.Buffer):
        try:
            tensor = tensor.data
            is_plain = type(tensor) is Tensor
        except Exception:  # a class of its own may raise anything
            return None
        if not is_plain:
            return None
    if tensor.is_meta or tensor.layout != torch.strided or not tensor.numel():
        return None
    if not tensor.is_contiguous():
        return tensor[_grid(tensor.shape)].reshape(-1)
    places = places_of(tensor)
    return tensor.as_strided((len(places),), (places.step,))


def places_of(tensor: Tensor) -> range:
    """Where in a contiguous tensor of this shape its samples lie."""
    if not tensor.numel():
        return range(0)
    step, count = _stride(tensor.numel(), tensor.shape[-1] if tensor.ndim else 1)
    return range(0, step * count, step)


@cache
def _stride(size: int, width: int) -> tuple[int, int]:
    """How far apart samples of a contiguous tensor of rows lie, and how many there are.

    Each lies some rows further and the golden ratio of a row to the right of the last, so that they
    fall into as many rows and columns as there are samples.
    """
    count = min(size, SAMPLES)
    step = size // count
    if step > 2 * width:
        step = (step // width - 1) * width + round(GOLDEN * width)
    while math.gcd(step, width) > 1:
        step -= 1
    return step, count


def _grid(shape: Sequence[int]) -> tuple[slice, ...]:
    """At most `SAMPLES` elements of a tensor that lies in memory in any way."""
    left, cuts = SAMPLES, []
    for i, size in enumerate(shape):
        count = min(size, max(1, round(left ** (1 / (len(shape) - i)))))
        cuts.append(slice(0, None, -(-size // count)))
        left //= count
    return tuple(cuts)


def _counted(tensor: Tensor) -> tuple[int, int]:
    try:
        address = tensor.data_ptr()
    except Exception:  # of a class of its own, without memory
        address = 0
    return -1 if tensor.is_inference() else tensor._version, address
