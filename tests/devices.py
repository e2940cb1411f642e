"""Devices that a CPU only pretends to have, strict about which tensors meet.

`Devices` is a context in which `cpu:1`, `cpu:2`, ... are devices of their own. Their tensors are
plain ones in host memory; which device one is on is noted by its storage. As on cards, an operation
takes tensors of one device, to which scalars and index tensors of the host may come, and only
copies cross a border. The host cannot look into their memory.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import pagedkv
from pagedkv.storage.host_region import LazyRegion

_PACKAGE = Path(pagedkv.__file__).parent  # a clone, and so its `.venv`, is called pagedkv as well
HOST = torch.device("cpu")
A, B, C = (torch.device("cpu", i) for i in (1, 2, 3))

# What crosses a border; all else takes tensors of one device.
_COPIES = {"aten::_to_copy", "aten::copy_", "aten::_local_scalar_dense", "aten::set_.source_Tensor"}
# Operations whose index tensors may lie on the host.
_INDEXED = {"aten::index", "aten::index_put_", "aten::index_put", "aten::_index_put_impl_"}
_DEVICE = Tensor.device.__get__  # type: ignore[attr-defined]


class MixedDevicesError(AssertionError):
    """Tensors of two devices met in an operation."""


class Devices:
    """The context.

    Attributes:
        crossed: copies from one device to another, the host not counted.
        waited: copies between the host and a device that the host waits for, by the function of
            the package that asks for them.
    """

    def __init__(self) -> None:
        self.waited: Counter[str] = Counter()
        self._places: dict[int, tuple[StorageWeakRef, torch.device]] = {}
        self.crossed: Counter[tuple[torch.device, torch.device]] = Counter()
        # Of the arguments of the function under way: what it makes for itself is made there.
        self.within: torch.device | None = None
        self._modes = _Operations(self), _Functions(self)

    def __enter__(self) -> Devices:
        for mode in self._modes:
            mode.__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        for mode in reversed(self._modes):
            mode.__exit__(*exc)

    def of(self, tensor: Tensor) -> torch.device:
        """Where a tensor is."""
        if tensor.is_meta:
            return torch.device("meta")
        if (staged := getattr(tensor, "staged", None)) is not None:  # a handle has no storage
            tensor = staged.k
        if (places := getattr(tensor, "places", None)) is not None:  # another one
            tensor = places
        found = self._places.get(tensor.untyped_storage()._cdata)
        return HOST if found is None else found[1]

    def put(self, tensor: Tensor, device: torch.device) -> None:
        """Notes where a tensor is."""
        storage = tensor.untyped_storage()
        if len(self._places) > 20_000:
            gone = [key for key, (ref, _) in self._places.items() if ref.expired()]
            for key in gone:
                del self._places[key]
        if device == HOST:
            self._places.pop(storage._cdata, None)
        else:  # the weak reference keeps the number from being given to another storage
            self._places[storage._cdata] = StorageWeakRef(storage), device


def let_grow(devices: Devices, patch: Any) -> None:
    """Puts growing pages, which lie in host memory, on the device they are asked for."""
    make = LazyRegion.__init__

    def there(region: Any, shape: Any, dtype: Any, device: Any, pages: int) -> None:
        make(region, shape, dtype, device, pages)
        devices.put(region.tensor, device)

    patch.setattr(LazyRegion, "__init__", there)


def _plain(device: Any) -> torch.device:
    """A device by its one name."""
    device = torch.device(device)
    return HOST if device == torch.device("cpu", 0) else device


def _real(device: Any) -> Any:
    """The device that a tensor is really made on."""
    if device is None:
        return None
    device = torch.device(device)
    return HOST if device.type == "cpu" else device


def _asker() -> str:
    """The innermost function of the package that is under way."""
    frame = sys._getframe(1)
    while frame is not None:
        file = Path(frame.f_code.co_filename)
        if file.is_relative_to(_PACKAGE):
            return f"{file.relative_to(_PACKAGE)}: {frame.f_code.co_name}"
        frame = frame.f_back  # type: ignore[assignment]
    return "nobody"


class _Operations(TorchDispatchMode):
    """Notes where what operations return is, and refuses to mix devices."""

    def __init__(self, devices: Devices) -> None:
        super().__init__()
        self._devices = devices

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        name, devices = func._schema.name, self._devices
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        asked = kwargs.get("device")
        if asked is not None:
            kwargs["device"] = _real(asked)
        inputs = [(x, devices.of(x)) for x in given]
        out = func(*args, **kwargs)
        if asked is not None:
            place = _plain(asked)
            if place == HOST and name != "aten::_to_copy" and devices.within is not None:
                place = devices.within
        elif name == "aten::copy_" or name in _COPIES:
            place = inputs[0][1]
        else:
            place = self._only(name, args, inputs)
        if name in ("aten::_to_copy", "aten::copy_"):
            self._note(inputs, place, name, args, kwargs)
        known = {x.untyped_storage()._cdata for x in given if not x.is_meta}
        made = (x for x in tree_leaves(out) if isinstance(x, Tensor) and not x.is_meta)
        for x in made:
            if x.untyped_storage()._cdata not in known:
                devices.put(x, place)
        return out

    def _only(self, name: str, args: Any, inputs: list[tuple[Tensor, torch.device]]) -> Any:
        """The one device of an operation."""
        if name in _INDEXED:
            index = {id(x) for x in args[1] if x is not None}
            inputs = [(x, at) for x, at in inputs if not (id(x) in index and at == HOST)]
        places = {at for x, at in inputs if x.ndim or at != HOST}
        if len(places) > 1:
            shapes = [(list(x.shape), str(at)) for x, at in inputs]
            raise MixedDevicesError(f"{name}: got tensors {shapes}")
        return next(iter(places), HOST)

    def _note(
        self,
        inputs: list[tuple[Tensor, torch.device]],
        place: torch.device,
        name: str,
        args: Any,
        kwargs: Any,
    ) -> None:
        tensor, source = inputs[-1]
        if source == place:
            return
        if HOST not in (source, place):
            self._devices.crossed[source, place] += 1
            return
        last = args[2:3] if name == "aten::copy_" else ()
        if not (kwargs.get("non_blocking") or any(last)) and tensor.ndim:
            self._devices.waited[_asker()] += 1


class _Functions(TorchFunctionMode):
    """Makes tensors say where they are, and copies those that are to be elsewhere."""

    def __init__(self, devices: Devices) -> None:
        super().__init__()
        self._devices = devices

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, devices = dict(kwargs or {}), self._devices
        if func == _DEVICE:
            return devices.of(args[0])
        if func in (Tensor.numpy, Tensor.__array__) and devices.of(args[0]) != HOST:
            raise TypeError(f"can't convert {devices.of(args[0])} tensor to numpy")
        if func is Tensor.cpu:
            return self._moved(args[0], HOST)
        if func in (torch.tensor, torch.as_tensor) and kwargs.get("device") is not None:
            target = torch.device(kwargs.pop("device"))
            return self._moved(func(*args, **kwargs), target)
        if func is Tensor.to:
            return self._to(*args, **kwargs)
        places = {self._devices.of(x) for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)}
        before, places = devices.within, places - {HOST}
        devices.within = places.pop() if len(places) == 1 and "device" not in kwargs else None
        try:
            return func(*args, **kwargs)
        finally:
            devices.within = before

    def _to(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        target, dtype = kwargs.pop("device", None), kwargs.pop("dtype", None)
        for arg in args:
            if isinstance(arg, Tensor):
                target, dtype = self._devices.of(arg), arg.dtype
            elif isinstance(arg, torch.dtype):
                dtype = arg
            elif isinstance(arg, (str, torch.device)):
                target = arg
        copy = kwargs.get("copy", False)
        if target is not None:
            target = torch.device(target)
            if target.type != "cpu":
                return Tensor.to(x, target, dtype)
            moved = self._moved(x, target, copy, kwargs.get("non_blocking", False))
            return moved if dtype is None else Tensor.to(moved, dtype)
        return Tensor.to(x, dtype, copy=copy) if dtype is not None else x

    def _moved(
        self, x: Tensor, target: torch.device, copy: bool = False, non_blocking: bool = False
    ) -> Tensor:
        target = _plain(target)
        if self._devices.of(x) == target and not copy:
            return x
        made: Tensor = torch.ops.aten._to_copy(x, device=target, non_blocking=non_blocking)
        return made
