"""`LayerStreamer`: a transformers model whose layers are on the device only while they compute.

It opens a checkpoint and plans; `placement.py` puts tensors where the plan says, `forwards.py`
brings streamed ones, and `refusals.py` refuses uses that need all weights at once.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from pagedkv.errors import BudgetExceeded, StreamError
from pagedkv.models import facts_of
from pagedkv.models.checkpoint import Checkpoint
from pagedkv.models.skeleton import find_layers
from pagedkv.models.weighing import packed_advice
from pagedkv.planner import MemoryPlan, plan_memory
from pagedkv.planner.costs import spread
from pagedkv.storage.placement import device_of

from .bandwidth import measure_experts, measure_link
from .experts.modules import size_read_alone
from .forwards import Passes, models_in
from .mxfp4 import require_on_cpu
from .placement import Places, Wanted
from .progress import PassBar
from .refusals import refuse_closed, refuse_whole, require_own_weights
from .ring import Ring
from .skeleton import build, find_folder
from .stats import StreamStats
from .unpacking import unpack_in_forward
from .weights import WeightStore

ROUNDING = 1.01  # a plan that was made from a configuration alone may be off by this factor

_STREAMED: weakref.WeakSet[PreTrainedModel] = weakref.WeakSet()


class LayerStreamer:
    """Runs a model layer by layer. `from_pretrained` makes one; close it, or use `with`.

    Attributes:
        model: the model, used like any other; its weights come and go.
        plan: the memory plan, if there is one.
        bar: progress of the current pass.

    Args:
        model: a model without weights, from `build`.
        store: its weights, from `WeightStore.open`.
        wanted: fields of `Wanted`: which weights stay where.

    Raises:
        StreamError: the model is streamed already.
        LayersNotFound: its list of layers was not found.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        store: WeightStore,
        *,
        device: torch.device,
        plan: MemoryPlan | None = None,
        layers_path: str | None = None,
        progress: bool = True,
        **wanted: Any,
    ) -> None:
        if model in _STREAMED:
            raise StreamError(f"{type(model).__name__}: this model is streamed already")
        self.model, self.plan, self.device = model, plan, device
        self._store = store
        self._stats = StreamStats(link_gbps=plan.link_gbps if plan else 0.0)
        layers = find_layers(model, layers_path)[1]
        if plan is not None and len(layers) != len(plan.shape.layers):
            raise ValueError(
                f"plan: expected one for this model and dtype, {len(layers)} layers, got "
                f"{plan.model} with {len(plan.shape.layers)} layers"
            )
        stays = Wanted.by(plan) if plan else Wanted(**wanted)
        places = Places(model, store, layers, stays, device, self._stats)
        self._require_planned(places)
        ring = None
        if places.units:
            ring = Ring(store, places.units, places.held, stays.depth, device, self._stats)
        self.bar = PassBar(len(places.layers), progress)
        self._passes = Passes(
            model, store, places, ring, device, self._stats, self.bar, stays.most_alone
        )
        self._undo = refuse_whole(model)
        model.in_turn = self._passes.in_turn  # code that looks at all weights waits for its turn
        self._undo.append(lambda: model.__dict__.pop("in_turn", None))
        self._closed = False
        _STREAMED.add(model)

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        *,
        plan: MemoryPlan | None = None,
        device_memory: int | str | None = None,
        host_memory: int | str | None = None,
        batch: int | None = None,
        length: int | None = None,
        page_size: int | str | None = None,
        kv_dtype: str | None = None,
        kv_format: str | tuple[str, str] | None = None,
        step_tokens: int | None = None,
        max_tokens: int | None = None,
        growth_step: int | None = None,
        link_gbps: float | None = None,
        compute_tflops: float | None = None,
        expert_gbps: float | None = None,
        device: str | torch.device = "auto",
        dtype: str | torch.dtype = "auto",
        resident_layers: int | Sequence[int] | None = None,
        expert_slots: int | None = None,
        layers_path: str | None = None,
        images: bool = False,
        progress: bool = True,
        **kwargs: Any,
    ) -> LayerStreamer:
        """Opens a checkpoint for streaming; nothing is converted, copied or written.

        Args:
            path: a folder with `config.json` and safetensors files, or an id on the hub.
            plan: says which weights stay where. Without it `device_memory` makes one; without both,
                the layers stream and the rest stays on the device.
            device_memory: as for `plan_memory`. So are the sizes from `host_memory` to
                `expert_gbps`, but the link, and on a CPU reads of experts, are measured. Without
                `length`, if its default does not fit, the longest length that fits is planned,
                with a warning.
            device: `auto` is a GPU if there is one.
            dtype: the dtype in which weights are used; `auto` is the checkpoint's.
            resident_layers: without a plan, how many layers stay on the device, evenly spread, or
                the indices of these layers.
            expert_slots: how many experts of a layer stay in memory; others are read when they are
                routed to, and the rest of a layer is placed as without it. 0 reads layers as a
                whole. None takes the number planned for `device_memory`, or 0 without it.
            layers_path: the name of the list of layers, for a model in which it is not found.
            images: opens it as the class that takes images, even if transformers has another one
                for text alone. Without it such a checkpoint is opened for text alone.
            progress: show a bar on a terminal in passes of more than three seconds.
            kwargs: as for transformers' `from_pretrained`.

        Raises:
            CheckpointError: the folder is no checkpoint, or a file in it is damaged.
            CheckpointMismatch: the checkpoint's tensors do not match the model's.
            LayersNotFound: the model's list of layers was not found.
            BudgetExceeded: the memory is too small.
            UnsupportedModelError: the model, or a tensor's form, is not served.
        """
        sizes = {
            "host_memory": host_memory,
            "batch": batch,
            "length": length,
            "page_size": page_size,
            "kv_dtype": kv_dtype,
            "kv_format": kv_format,
            "step_tokens": step_tokens,
            "max_tokens": max_tokens,
            "growth_step": growth_step,
            "link_gbps": link_gbps,
            "compute_tflops": compute_tflops,
            "expert_gbps": expert_gbps,
        }
        sizes = {name: value for name, value in sizes.items() if value is not None}
        _require_alone(plan, device_memory, sizes, resident_layers)
        if expert_slots is not None and plan is not None:
            raise ValueError("expert_slots: expected none beside plan, which says how many stay")
        if advice := packed_advice(dtype):
            raise ValueError(f"dtype: expected 'auto' or floats of torch, got {dtype!r}{advice}")
        device = _device(device)
        checkpoint = Checkpoint.open(find_folder(path, **kwargs))
        require_own_weights(checkpoint.folder, kwargs)
        require_on_cpu(checkpoint, device)
        left_out = facts_of(checkpoint.config.get("model_type")).text_alone
        if plan is not None and left_out and images and not plan.shape.tower:
            raise ValueError("plan: expected one made with images=True, it is for text alone")
        built = build(checkpoint, dtype, images, **kwargs)
        model = built.model
        if device_memory is not None:
            sizes.setdefault("link_gbps", measure_link(checkpoint, device))
            sizes |= {"device_memory": device_memory, "device": device.type, "images": images}
            if dtype != "auto":
                sizes["weight_dtype"] = str(dtype).removeprefix("torch.")
        unpack_in_forward(model)
        store = WeightStore.open(checkpoint, built, kwargs.get("key_mapping"))
        options: dict[str, Any] = {"layers_path": layers_path, "device": device, "plan": plan}
        options["progress"] = progress
        try:
            layers = find_layers(model, layers_path)[1]
            if device_memory is not None:
                size = size_read_alone(model, layers, store)
                plan = options["plan"] = _planned(checkpoint, sizes, expert_slots, device, size)
            if plan is not None:
                return cls(model, store, **options)
            options["resident"] = _resident(resident_layers, len(layers))
            return cls(model, store, **options, expert_slots=expert_slots or 0)
        except BaseException:
            store.close()
            raise

    def __enter__(self) -> LayerStreamer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def stats(self) -> StreamStats:
        """Returns counts of bytes moved so far, and times."""
        return self._stats.snapshot()

    def close(self) -> None:
        """Removes the hooks and frees all memory; the model cannot be used after. Idempotent.

        It waits for a pass that another thread computes. A new streamer can be opened on the same
        folder.
        """
        if self._closed:
            return
        self._passes.close()
        self._closed = True
        for module in models_in(self.model):
            module.register_forward_pre_hook(refuse_closed)
        for undo in self._undo:
            undo()
        self._store.close()

    def _require_planned(self, places: Places) -> None:
        """Raises ValueError for a plan of a smaller model, or of this model in a narrower dtype."""
        if self.plan is None:
            return
        experts = self.plan.shape.experts
        for what, units, planned in (
            ("layers", places.units, self.plan.ring_slot),
            ("experts", [unit for unit, _ in places.expert_units], experts and experts.widest),
        ):
            widest = max((unit.nbytes for unit in units), default=0)
            if widest > (planned or 0) * ROUNDING:
                raise ValueError(
                    f"plan: expected one for this model and dtype, {what} of at most {widest:,} "
                    f"bytes a layer, got {self.plan.model} with {planned or 0:,}"
                )


def _require_alone(
    plan: MemoryPlan | None,
    device_memory: int | str | None,
    sizes: dict[str, Any],
    resident_layers: int | Sequence[int] | None,
) -> None:
    """Raises ValueError for sizes beside a plan, which has its own, or without device memory."""
    if plan is not None:
        if device_memory is not None:
            sizes = {"device_memory": device_memory, **sizes}
        for name in sizes:
            raise ValueError(f"{name}: expected none beside plan, which was made with its own")
    elif device_memory is None:
        for name in sizes:
            raise ValueError(f"{name}: expected with device_memory, which it is planned with")
    if (plan is not None or device_memory is not None) and resident_layers is not None:
        raise ValueError("resident_layers: expected none, the plan says which")


def _planned(
    checkpoint: Checkpoint,
    sizes: dict[str, Any],
    expert_slots: int | None,
    device: torch.device,
    size: int,
) -> MemoryPlan:
    """Makes a plan of these sizes; without `length` it may plan for the longest texts that fit.

    Args:
        size: bytes of an expert that can be read alone; 0 if none can.
    """
    on_cpu = device.type == "cpu"
    if size and on_cpu:
        sizes.setdefault("expert_gbps", measure_experts(checkpoint, size))
    falls_back = expert_slots is None and on_cpu and not size
    sizes["expert_slots"] = 0 if falls_back else expert_slots
    try:
        plan = plan_memory(checkpoint, **sizes)
    except BudgetExceeded as error:
        if "length" in sizes or "length" not in error.advice:
            raise
        length = int(error.advice["length"])
        warnings.warn(
            f"length: planned for {length} tokens, the most that fit {sizes['device_memory']} "
            f"for a batch of {sizes.get('batch', 1)}; say length= to have it otherwise",
            stacklevel=3,
        )
        plan = plan_memory(checkpoint, **sizes, length=length)
    if falls_back and plan.shape.settings.experts and plan.streams:
        warnings.warn(
            f"expert_slots: experts of {plan.model} cannot be read alone, as their class or the "
            "checkpoint has them; whole layers stream",
            stacklevel=3,
        )
    return plan


def _resident(layers: int | Sequence[int] | None, count: int) -> Sequence[int]:
    """Returns the indices of the layers that stay on the device without a plan."""
    if layers is None:
        return ()
    if not isinstance(layers, int):
        return layers
    if isinstance(layers, bool) or layers < 0:
        raise ValueError(f"resident_layers: expected a count or indices, got {layers!r}")
    return spread(min(layers, count), count)


def _device(device: str | torch.device) -> torch.device:
    found = device_of(device)
    if found.type not in ("cpu", "cuda"):
        raise ValueError(f"device: expected 'auto', 'cpu' or a CUDA device, got {device!r}")
    if found.type == "cuda" and found.index is None:
        found = torch.device("cuda", torch.cuda.current_device())
    return found
