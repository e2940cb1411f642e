"""Stands in for forwards of modules while a step of ours computes, in its thread alone.

Whatever it was not made for is computed by the module's own forward: another weight, another
dtype, another thread, autocast, gradients, torch's compiler.
"""

from __future__ import annotations

from threading import get_ident
from typing import Any

import torch
from torch import Tensor, nn

from .fingerprint import Seen


class Swapped:
    """The forward of a module that has a weight.

    Args:
        seen: the weight that it is for.
        threads: those that compute a step.
    """

    is_of_class = True  # for `placement.is_plain`: it computes what the module's class does

    def __init__(self, module: nn.Module, seen: Seen, threads: list[int]) -> None:
        self.module, self.seen, self.threads = module, seen, threads
        weight = seen.tensor()
        assert weight is not None
        self.weight, self.dtype = weight, weight.dtype

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and saves a model in the middle of a step with the forward that is its own."""
        return getattr, (self.module, "forward")  # a copy that is just begun has its class's alone

    def serves(self, x: Any) -> bool:
        """Whether it may compute with these rows."""
        weight, seen = self.weight, self.seen
        return (
            type(x) is Tensor
            and self.module._parameters.get("weight") is weight
            and weight._version == seen.version
            and weight.data_ptr() == seen.address
            and x.dtype == self.dtype
            and x.dim() > 1
            and x.numel() > 0
            and x.shape[-1] == weight.shape[-1]
            and x.is_cpu
            and get_ident() in self.threads
            and not torch.is_grad_enabled()
            and not torch.is_autocast_enabled("cpu")
            and not torch.compiler.is_compiling()
        )
