"""Stands in for forwards of modules while a step of ours computes, in its thread alone.

The module's own forward computes everything that the stand-in was not made for: another weight,
another dtype, another thread, autocast, gradients, torch's compiler.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from threading import Lock, get_ident
from typing import Any

import torch
from torch import Tensor, nn

from .snapshot import SeenTensor

_SITES = Lock()  # one for all models: two kinds of packed weights may come and go at once


def is_its_own(module: nn.Module) -> bool:
    """Whether the forward of a module is its class's, or a `StandIn` for it during a step."""
    forward = vars(module).get("forward")
    return forward is None or isinstance(forward, StandIn)


class StandIn:
    """The forward of a module in the threads that compute a step.

    Args:
        threads: those that compute a step.
    """

    under: Any = None  # a stand-in of another kind of packed weights, for that one's threads
    is_of_class = True  # for `placement.is_plain`: it computes what the module's class does

    def __init__(self, module: nn.Module, threads: list[int]) -> None:
        self.module, self.threads = module, threads

    def put_in(self) -> None:
        """Stands in for the module's forward, unless other code has put one there."""
        own = vars(self.module)
        with _SITES:
            at = first = own.get("forward")
            while isinstance(at, StandIn) and at is not self:
                at = at.under
            if at is None:
                self.under = first
                own["forward"] = self

    def take_back(self) -> None:
        """Undoes `put_in`."""
        own = vars(self.module)
        with _SITES:
            at = own.get("forward")
            if at is self:
                if self.under is None:
                    del own["forward"]
                else:
                    own["forward"] = self.under
                return
            while isinstance(at, StandIn):
                if at.under is self:
                    at.under = self.under
                    return
                at = at.under

    def other(self) -> Any:
        """Returns the stand-in under this one, if another thread than ours calls."""
        return None if get_ident() in self.threads else self.under

    def __reduce__(self) -> tuple[Any, ...]:
        """Lets a model be copied or saved in the middle of a step, with its own forward."""
        return getattr, (self.module, "forward")  # a copy in the making has only its class's

    def serves(self, x: Any) -> bool:
        """Whether it may compute with these rows."""
        return (
            type(x) is Tensor
            and x.is_cpu
            and get_ident() in self.threads
            and not torch.is_grad_enabled()
            and not torch.compiler.is_compiling()
        )


class Swapped(StandIn):
    """The forward of a module that has a weight.

    Args:
        seen: the weight for which it was made.
        threads: those that compute a step.
    """

    def __init__(self, module: nn.Module, seen: SeenTensor, threads: list[int]) -> None:
        super().__init__(module, threads)
        weight = seen.tensor()
        assert weight is not None
        self.seen, self.weight, self.dtype = seen, weight, weight.dtype

    def serves(self, x: Any) -> bool:
        weight, seen = self.weight, self.seen
        return (
            super().serves(x)
            and self.module._parameters.get("weight") is weight
            and weight._version == seen.version
            and weight.data_ptr() == seen.address
            and x.dtype == self.dtype
            and x.dim() > 1
            and x.numel() > 0
            and x.shape[-1] == weight.shape[-1]
            and not torch.is_autocast_enabled("cpu")
        )


class StandIns:
    """Forwards that stand in while any thread acts; they are put in once for all threads."""

    def __init__(self) -> None:
        self._sites: Sequence[StandIn] = ()
        self._threads: list[int] = []
        self._lock = Lock()

    @contextmanager
    def acting(self) -> Iterator[None]:
        """Computes with the forwards in this thread."""
        with self._lock:
            if not self._threads:
                self._put_in()
            self._threads.append(get_ident())
        try:
            yield
        finally:
            with self._lock:
                self._threads.remove(get_ident())
                if not self._threads:
                    self._take_back(self._sites)

    def _put_in(self) -> None:
        for forward in self._sites:
            forward.put_in()

    def _take_back(self, sites: Iterable[StandIn]) -> None:
        for forward in sites:
            forward.take_back()
