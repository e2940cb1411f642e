"""The layout of tensors that a call was bound for."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd import forward_ad


class Like(NamedTuple):
    """The properties that another layer's tensor must share."""

    shape: torch.Size
    strides: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: Tensor) -> Like:
        """Takes the layout of a tensor."""
        return cls(tensor.shape, tensor.stride(), tensor.dtype, tensor.device)

    def fits(self, tensor: Tensor) -> bool:
        """Whether a tensor has this layout, and neither derivatives nor a lazy minus."""
        return (
            tensor.__class__ is Tensor
            and tensor.shape == self.shape
            and tensor.stride() == self.strides
            and tensor.dtype is self.dtype
            and tensor.device == self.device
            and not tensor.requires_grad
            and not has_tangent(tensor)
            and not tensor.is_neg()
        )


def has_tangent(tensor: Tensor) -> bool:
    """Whether a tensor has a derivative of forward mode; fast where no code asks for any."""
    return forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None
