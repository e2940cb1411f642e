"""`LayerStreamer`: a transformers model whose layers are on the device only while they compute.

It owns the hooks. A hook before a layer waits for the layer's weights and binds them; one behind
it, called whatever happens, takes them back. The forward in between is transformers' own.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from pagedkv.checkpoint import Checkpoint
from pagedkv.errors import GradModeError, StreamError, UnsupportedModelError
from pagedkv.planner import MemoryPlan, plan_memory
from pagedkv.planner.items import spread

from .arena import HostArena
from .glue import EmbeddingRows, blockwise, head_units
from .layers import find_layers
from .link import measure_link
from .progress import PassBar
from .ring import Ring
from .skeleton import build, find_folder
from .spots import GLUE, Spot, by_layer, show_device, spots_of
from .stats import StreamStats
from .weights import Unit, WeightStore

DEPTH = 2
ROUNDING = 1.01  # a plan from a configuration alone may be that far off

_STREAMED: weakref.WeakSet[PreTrainedModel] = weakref.WeakSet()


class LayerStreamer:
    """Runs a model layer by layer. `from_pretrained` makes one; close it, or use `with`.

    Attributes:
        model: to be used like any other; its weights come and go.
        plan: what was planned, if anything.
        bar: how far the pass at hand is.

    Args:
        model, store: of `build` and `WeightStore.open`.
        resident: layers that stay on the device.
        host: layers that stay in host memory.
        embedding, head: whether these stay on the device.
        head_rows: of the head that pass at once.

    Raises:
        StreamError: the model is streamed already.
        LayersNotFound: its layers could not be told.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        store: WeightStore,
        *,
        device: torch.device,
        resident: Sequence[int] = (),
        host: Sequence[int] = (),
        embedding: bool = True,
        head: bool = True,
        head_rows: int = 0,
        head_in_host: bool = False,
        depth: int = DEPTH,
        plan: MemoryPlan | None = None,
        layers_path: str | None = None,
        progress: bool = True,
    ) -> None:
        if model in _STREAMED:
            raise StreamError(f"{type(model).__name__}: this model is streamed already")
        self.model, self.plan, self.device = model, plan, device
        self._store = store
        self._stats = StreamStats(link_gbps=plan.link_gbps if plan else 0.0)
        self._path, layers = find_layers(model, layers_path)
        self._hooks: list[Any] = []
        self._undo: list[Callable[[], None]] = []
        self._ring: Ring | None = None
        self._units: list[Unit] = []
        self._spots: list[list[Spot]] = []  # of units that are layers
        self._views: dict[tuple[Any, int], list[Tensor]] = {}  # by layout and slot
        self._bound: list[Spot] = []
        self._started = 0.0
        self._lock = threading.RLock()
        self._closed = False
        try:
            self._place(layers, resident, host, embedding, head, head_rows, head_in_host, depth)
            self.bar = PassBar(len(self._spots), progress)
        except BaseException:
            self.close()
            raise
        _STREAMED.add(model)

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        plan: MemoryPlan | None = None,
        device_memory: int | str | None = None,
        host_memory: int | str | None = None,
        batch: int = 1,
        device: str | torch.device = "auto",
        dtype: str | torch.dtype = "auto",
        resident_layers: int | Sequence[int] | None = None,
        layers_path: str | None = None,
        progress: bool = True,
        **kwargs: Any,
    ) -> LayerStreamer:
        """Opens a checkpoint for streaming; nothing is converted, copied or written.

        Args:
            path: a folder with `config.json` and safetensors files, or an id on the hub.
            plan: what stays where. Without it `device_memory` makes one, for the link as it is
                measured; without that either, the layers stream and the rest stays on the device.
            device_memory, host_memory, batch: as for `plan_memory`.
            device: `auto` is a GPU where there is one.
            dtype: weights are used in; `auto` is the checkpoint's.
            resident_layers: without a plan, how many layers stay on the device, evenly spread; or
                which.
            layers_path: the name of the list of layers, where it cannot be told.
            progress: show a bar on a terminal in passes of more than three seconds.
            kwargs: as for transformers' `from_pretrained`.

        Raises:
            CheckpointError: the folder is not what it has to be.
            CheckpointMismatch: its tensors are not the model's.
            LayersNotFound: it has no list of layers that could be told.
            BudgetExceeded: the memory does not suffice.
            UnsupportedModelError: the model, or a tensor's form, is not served.
        """
        device = _device(device)
        folder = find_folder(path)
        checkpoint = Checkpoint.open(folder)
        if plan is None and device_memory is not None:
            plan = plan_memory(
                folder,
                device_memory=device_memory,
                host_memory=host_memory,
                batch=batch,
                link_gbps=measure_link(checkpoint, device),
                device=device.type,
                weight_dtype=None if dtype == "auto" else str(dtype).removeprefix("torch."),
            )
        elif host_memory is not None and plan is None:
            raise ValueError("host_memory: expected with device_memory, which it is planned with")
        if plan is not None and resident_layers is not None:
            raise ValueError("resident_layers: expected none, the plan says which")
        model, dtypes = build(checkpoint, dtype, **kwargs)
        store = WeightStore.open(checkpoint, model, dtypes, kwargs.get("key_mapping"))
        options: dict[str, Any] = {"layers_path": layers_path, "device": device, "plan": plan}
        options["progress"] = progress
        try:
            if plan is not None:
                return cls(model, store, **options, **_placement(plan))
            count = len(find_layers(model, layers_path)[1])
            if resident_layers is None:
                resident_layers = 0
            if isinstance(resident_layers, int):
                if isinstance(resident_layers, bool) or resident_layers < 0:
                    raise ValueError(
                        f"resident_layers: expected a count or indices, got {resident_layers!r}"
                    )
                resident_layers = spread(min(resident_layers, count), count)
            return cls(model, store, **options, resident=resident_layers)
        except BaseException:
            store.close()
            raise

    def __enter__(self) -> LayerStreamer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def stats(self) -> StreamStats:
        """What was moved so far, and where the time went."""
        return self._stats.snapshot()

    def close(self) -> None:
        """Takes the hooks back and frees what it holds; the model cannot be used after. Idempotent.

        A new streamer can be opened on the same folder.
        """
        if self._closed:
            return
        self._closed = True
        self._unbind()
        for hook in self._hooks:
            hook.remove()
        for undo in self._undo:
            undo()
        if self._ring is not None:
            self._ring.close()
        self._store.close()
        for module in _models(self.model):
            module.register_forward_pre_hook(_refuse)
        self._views.clear()

    # ---- placing

    def _place(
        self,
        layers: nn.ModuleList,
        resident: Sequence[int],
        host: Sequence[int],
        embedding: bool,
        head: bool,
        head_rows: int,
        head_in_host: bool,
        depth: int,
    ) -> None:
        """Gives every tensor its place: on the device, in host memory, or in its file."""
        _require_layers(resident, len(layers))
        cpu = self.device.type == "cpu"  # host memory is where it computes
        head = head or (cpu and head_in_host)
        groups = by_layer(self.model, layers)
        held: dict[int, HostArena] = {}
        for index, layer in enumerate(layers):
            spots = self._to_fill(groups.get(index, []))
            unit = self._unit(f"layer {index}", spots)
            if index in resident or not spots or (cpu and index in host):
                self._settle(unit, spots)
                continue
            if index in host:
                held[len(self._units)] = self._read(unit, pin=True)
            self._hook(layer, len(self._units))
            self._units.append(unit)
            self._spots.append(spots)
        elsewhere = set()
        if not embedding:
            elsewhere.add(self._stream_embedding())
        if not head:
            elsewhere.add(self._stream_head(head_rows, held if head_in_host else None))
        glue = [spot for spot in self._to_fill(groups[GLUE]) if spot.name not in elsewhere]
        self._settle(self._unit("glue", glue), glue)
        if self._units:
            # Units of one layout share the tensors over a slot.
            self._layouts = [_layout(u, i < len(self._spots)) for i, u in enumerate(self._units)]
            self._require_planned(len(layers))
            self._ring = Ring(self._store, self._units, held, depth, self.device, self._stats)
        # A whole pass keeps no graph; a part that is called by itself is refused one.
        self.model.forward = self._alone(torch.no_grad()(self.model.forward))
        self._undo.append(lambda: self.model.__dict__.pop("forward"))
        self._undo += [show_device(module, self.device) for module in _models(self.model)]
        self._hooks += [
            self.model.register_forward_pre_hook(self._begin, with_kwargs=True),
            self.model.register_forward_hook(self._end, always_call=True),
        ]

    def _require_planned(self, layers: int) -> None:
        """Raises ValueError for the plan of another model, or of one in a narrower dtype."""
        if self.plan is None:
            return
        slot, planned = max(unit.nbytes for unit in self._units), self.plan.ring_slot
        if layers != len(self.plan.shape.layers) or slot > planned * ROUNDING:
            raise ValueError(
                f"plan: expected one for this model and dtype, {layers} layers of at most "
                f"{slot:,} bytes, got {self.plan.model} with {len(self.plan.shape.layers)} layers "
                f"of at most {planned:,}"
            )

    def _alone(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """A forward that threads take turns in: weights are those of one layer at a time."""

        @functools.wraps(forward)
        def one_at_a_time(*args: Any, **kwargs: Any) -> Any:
            with self._lock:
                return forward(*args, **kwargs)

        return one_at_a_time

    def _to_fill(self, spots: list[Spot]) -> list[Spot]:
        """Those that have a source; others are moved to the device."""
        for spot in spots:
            if not spot.tensor.is_meta:
                spot.set(spot.like(spot.tensor.detach().to(self.device)))
        return [spot for spot in spots if spot.tensor.is_meta]

    def _name(self, spot: Spot) -> str:
        """What a tensor is called in the store."""
        tied = self.model.all_tied_weights_keys.get(spot.name)
        return spot.name if spot.name in self._store or tied not in self._store else tied

    def _unit(self, name: str, spots: list[Spot]) -> Unit:
        return self._store.unit(name, {self._name(spot): spot.tensor for spot in spots})

    def _settle(self, unit: Unit, spots: list[Spot]) -> None:
        """Reads a unit once, for good."""
        if spots:
            buffer = self._read(unit).tensor.to(self.device)
            for spot, view in zip(spots, self._made(unit, spots, buffer)):
                spot.set(view)

    def _made(self, unit: Unit, spots: list[Spot], buffer: Tensor) -> list[Tensor]:
        """A unit's tensors over its bytes, as the model holds them; one object where tied."""
        places = {place.name: place for place in unit.places}
        made: dict[str, Tensor] = {}
        for spot in spots:
            name = self._name(spot)
            if name not in made:
                made[name] = spot.like(places[name].view(buffer))
        return [made[self._name(spot)] for spot in spots]

    def _read(self, unit: Unit, pin: bool = False) -> HostArena:
        arena = HostArena(unit.nbytes, pin and self.device.type == "cuda")
        self._store.fill(unit, arena)
        return arena

    def _stream_embedding(self) -> str:
        """Has rows of the embedding gathered from the file; its name."""
        spot = self._weight_of(self.model.get_input_embeddings())
        rows = EmbeddingRows(self._store, spot, self._name(spot), self.device, self._stats)
        self._undo.append(rows.close)
        return spot.name

    def _stream_head(self, rows: int, held: dict[int, HostArena] | None) -> str:
        """Has blocks of the head's rows pass through the ring; its name."""
        self._head = self._weight_of(self.model.get_output_embeddings())
        name, first = self._name(self._head), len(self._units)
        blocks = head_units(self._store, self._head, name, rows)
        for number, unit in enumerate(blocks, first):
            if held is not None:
                held[number] = self._read(unit, pin=True)
        self._units += blocks
        module: Any = self._head.owner
        module.forward = blockwise(
            module, len(blocks), lambda block: self._in_slot(first + block)[0], self._give_back
        )
        self._undo.append(lambda: module.__dict__.pop("forward"))
        return self._head.name

    def _weight_of(self, module: nn.Module | None) -> Spot:
        """Where the embedding or the head has its weight."""
        for spot in spots_of(self.model):
            if spot.owner is module and spot.key == "weight":
                return spot
        raise UnsupportedModelError(
            f"{type(self.model).__name__}: its embedding or head has no weight to stream"
        )

    # ---- a pass

    def _begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        ids = kwargs.get("input_ids", args[0] if args else None)
        ids = kwargs.get("inputs_embeds") if ids is None else ids
        self._stats.passes += 1
        self._stats.tokens += ids.shape[:2].numel() if ids is not None else 0
        self._started = perf_counter()
        self.bar.begin()

    def _end(self, model: nn.Module, args: Any, output: Any) -> None:
        self._stats.pass_seconds += perf_counter() - self._started
        self.bar.end()

    def _hook(self, layer: nn.Module, index: int) -> None:
        def before(module: nn.Module, args: tuple[Any, ...]) -> None:
            self._bind(index)

        def after(module: nn.Module, args: Any, output: Any) -> None:
            if self._unbind():
                self._give_back()

        self._hooks += [
            layer.register_forward_pre_hook(before),
            layer.register_forward_hook(after, always_call=True),
        ]

    def _bind(self, index: int) -> None:
        self._unbind()  # a layer that was interrupted
        self.bar.step()
        spots = self._spots[index]
        for spot, view in zip(spots, self._in_slot(index)):
            spot.where[spot.key] = view
        self._bound = spots

    def _unbind(self) -> bool:
        """Takes a layer's weights back; whether there were any."""
        bound, self._bound = self._bound, []
        for spot in bound:
            spot.where[spot.key] = spot.empty
        return bool(bound)

    def _in_slot(self, index: int) -> list[Tensor]:
        """A unit's tensors, when they have arrived. Layers of one layout share theirs."""
        assert self._ring is not None
        if torch.is_grad_enabled():
            raise GradModeError(
                f"{self._units[index].name}: gradients cannot be computed through streamed "
                "weights, which are gone by then; use torch.no_grad()"
            )
        slot, unit = self._ring.acquire(index), self._units[index]
        layout = self._layouts[index]
        if (layout, slot) not in self._views:
            buffer = self._ring.ring.slots[slot]
            if index < len(self._spots):
                views = self._made(unit, self._spots[index], buffer)
            else:
                views = [self._head.like(unit.places[0].view(buffer))]
            self._views[layout, slot] = views
        return self._views[layout, slot]

    def _give_back(self) -> None:
        assert self._ring is not None
        self._ring.release()


def _placement(plan: MemoryPlan) -> dict[str, Any]:
    return {
        "resident": plan.resident_layers,
        "host": plan.host_layers,
        "embedding": plan.embedding_resident,
        "head": plan.head_resident,
        "head_rows": plan.head_rows,
        "head_in_host": plan.head_in_host,
        "depth": plan.ring_depth or DEPTH,
    }


def _layout(unit: Unit, layer: bool) -> Any:
    return layer, tuple((p.offset, p.shape, p.dtype) for p in unit.places)


def _device(device: str | torch.device) -> torch.device:
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    found = torch.device(device)
    if found.type not in ("cpu", "cuda"):
        raise ValueError(f"device: expected 'auto', 'cpu' or a CUDA device, got {device!r}")
    if found.type == "cuda" and found.index is None:
        found = torch.device("cuda", torch.cuda.current_device())
    return found


def _require_layers(resident: Sequence[int], count: int) -> None:
    for i in resident:
        if type(i) is not int or not 0 <= i < count:
            raise ValueError(f"resident_layers: expected ints from 0 to {count - 1}, got {i!r}")


def _models(model: PreTrainedModel) -> list[PreTrainedModel]:
    """The model and the models inside."""
    return [module for module in model.modules() if isinstance(module, PreTrainedModel)]


def _refuse(module: nn.Module, args: Any) -> None:
    raise StreamError(f"{type(module).__name__}: the streamer of this model was closed")
