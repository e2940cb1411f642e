"""`Absent`: a stand-in for a weight that streams, while the weight is not on the device.

A plain tensor on the meta device is not enough: torch multiplies by one without an error, and
returns memory that was never written.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from pagedkv.errors import StreamError

# Methods of a tensor that do not need its values.
METHODS = frozenset(
    str.split(
        "dim element_size is_complex is_contiguous is_floating_point is_inference ndimension "
        "nelement numel requires_grad_ size stride"
    )
)
VALUES = {"data", "T", "H", "mT", "mH", "real", "imag"}  # attributes that need values
SETTABLE = {"requires_grad", "grad"}
# Attributes that tell a device: they tell the device on which the weight will be.
PLACES: dict[str, Callable[[torch.device], Any]] = {
    "device": lambda device: device,
    "is_cpu": lambda device: device.type == "cpu",
    "is_cuda": lambda device: device.type == "cuda",
}


class Absent(Tensor):
    """A weight with a shape and a dtype but without values. Operations that need values raise.

    It tells the device on which its layer computes, so that modules which are added to the layer,
    for example adapters, are put there.

    Attributes:
        path: the weight's name in the model.
    """

    path: str
    _device: torch.device
    _read: Callable[[range], Tensor]
    _known: tuple[range, Tensor] | None

    @staticmethod
    def of(
        tensor: Tensor,
        path: str,
        parameter: bool,
        device: torch.device,
        read: Callable[[range], Tensor],
    ) -> Absent:
        """Makes a stand-in with the shape and dtype of a tensor on the meta device.

        Args:
            read: reads elements from the checkpoint.
        """
        absent = Tensor._make_subclass(Absent, tensor, tensor.requires_grad)
        absent.__dict__.update(vars(tensor))  # transformers' notes on it
        absent.path, absent._device, absent._read, absent._known = path, device, read, None
        if parameter:
            absent._is_param = True  # marks an nn.Parameter of another class
        return absent

    def elements(self, places: range) -> Tensor:
        """Returns elements of the flat tensor as the model uses them; keeps the last ones read."""
        if self._known is None or self._known[0] != places:
            self._known = places, self._read(places)
        return self._known[1]

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Absent({self.path}, {list(self.shape)}, {self.dtype})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        absent = next(x for x in tree_leaves((args, kwargs)) if isinstance(x, Absent))
        if func is Tensor.detach:
            return absent  # torch would compute with a plain meta tensor
        if func.__name__ == "__get__" and _name(func) in PLACES:
            return PLACES[_name(func)](absent._device)
        if not _without_values(func):
            raise _missing(absent, _name(func))
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Refuses operations that bypass `__torch_function__`: torch's own copies, code in C++."""
        absent = next(x for x in tree_leaves((args, kwargs)) if isinstance(x, Absent))
        raise _missing(absent, func.name())


def _missing(absent: Absent, what: str) -> StreamError:
    alone = ", or open it with expert_slots=0" if "experts." in absent.path else ""
    return StreamError(
        f"{absent.path} is streamed: it has values only while its layer computes, in a pass of the "
        f"model by an open streamer, and {what} needs them. Change or copy the checkpoint, or the "
        f"model in memory{alone}"
    )


def _without_values(func: Any) -> bool:
    if func.__name__ == "__get__":
        return _name(func) not in VALUES
    if func.__name__ == "__set__":
        return _name(func) in SETTABLE
    return func.__name__ in METHODS


def _name(func: Any) -> str:
    """Returns the name of the function that was called, or of the attribute."""
    slot = func.__name__ in ("__get__", "__set__")
    return str(func.__self__.__name__ if slot else func.__name__)
