"""Experts in mxfp4, as gpt-oss's checkpoints have them, unpacked as they are read.

A byte holds two elements of four bits, and 32 elements share a scale: an exponent of two. For a
parameter `[E, 32 G, O]` a checkpoint has `blocks` `[E, O, G, 16]` and `scales` `[E, O, G]`, so an
expert is one contiguous piece of each.

The values equal, bit for bit, those that transformers unpacks a whole model to if it has no kernels
for mxfp4; this holds for all bytes and scales. Experts in memory stay unpacked, because unpacking
an expert takes longer than reading it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from inspect import signature

import torch
from torch import Tensor
from transformers.integrations.mxfp4 import dequantize_convertops

from pagedkv.errors import CheckpointMismatch, UnsupportedModelError
from pagedkv.models.checkpoint import Checkpoint, TensorRange
from pagedkv.models.packing import method_of

BLOCKS, SCALES = "_blocks", "_scales"  # how names of the two tensors end
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # and the same below zero
BIAS = 127  # bias of a scale's exponent
IN_BLOCK = 32  # elements of one scale, in 16 bytes
ROWS = 256  # rows of an expert unpacked at once, which the processor's cache holds


@dataclass(frozen=True, slots=True)
class Packed:
    """A parameter of experts, in two tensors of a checkpoint."""

    blocks: TensorRange
    scales: TensorRange

    @property
    def shape(self) -> tuple[int, ...]:
        """The unpacked shape: experts, input width, output width."""
        experts, out, groups, _ = self.blocks.shape
        return experts, groups * IN_BLOCK, out

    @property
    def nbytes(self) -> int:
        """Bytes in the files."""
        return self.blocks.nbytes + self.scales.nbytes

    def parts(self, expert: int) -> list[tuple[TensorRange, int, int]]:
        """Returns where the two tensors have an expert: offsets in their files, and bytes."""
        found = []
        for tensor in (self.blocks, self.scales):
            nbytes = tensor.nbytes // tensor.shape[0]
            found.append((tensor, tensor.offset + expert * nbytes, nbytes))
        return found

    def unpack(self, raw: Sequence[Tensor], target: Tensor) -> None:
        """Unpacks an expert.

        Args:
            raw: the bytes of its `parts`.
            target: `[32 G, O]`, of any floating dtype; it is overwritten.
        """
        blocks, scales = (
            bytes_.view(tensor.shape[1:])
            for bytes_, tensor in zip(raw, (self.blocks, self.scales), strict=True)
        )
        for first in range(0, len(scales), ROWS):
            some = slice(first, first + ROWS)
            index = blocks[some].int()
            index += (scales[some].int() << 8)[..., None]
            pairs = _pairs().index_select(0, index.view(-1))
            target[:, some].copy_(pairs.view(torch.bfloat16).view(len(index), -1).t())

    def places(self, element: int) -> list[tuple[TensorRange, list[int]]]:
        """Returns where the two tensors have the byte and the scale of an element."""
        _, inside, out = self.shape
        expert, rest = divmod(element, inside * out)
        row, column = divmod(rest, out)
        group = (expert * out + column) * (inside // IN_BLOCK) + row // IN_BLOCK
        byte = group * (IN_BLOCK // 2) + row % IN_BLOCK // 2
        return [
            (self.blocks, [self.blocks.offset + byte]),
            (self.scales, [self.scales.offset + group]),
        ]

    def element(self, element: int, byte: int, scale: int) -> Tensor:
        """Computes an element of the parameter from its byte and scale."""
        row = element // self.shape[2]  # the number of rows of an expert is even
        return _pairs()[scale << 8 | byte].view(1).view(torch.bfloat16)[row % 2]


@cache
def _pairs() -> Tensor:
    """Returns both elements of each byte with each scale as one number, at `scale << 8 | byte`."""
    every = [*VALUES, *(-value for value in VALUES)]
    values = torch.tensor(every, dtype=torch.bfloat16, device="cpu")
    byte = torch.arange(256, dtype=torch.int32, device="cpu")
    both = torch.stack([values[byte & 15], values[byte >> 4]], dim=1).expand(256, 256, 2)
    exponents = (byte - BIAS)[:, None, None].expand(256, 256, 2)
    return torch.ldexp(both, exponents).to(torch.bfloat16).view(torch.int32).view(-1)


def packed_in(checkpoint: Checkpoint) -> dict[str, Packed]:
    """Returns the parameters that a checkpoint has in mxfp4, by name.

    Raises:
        CheckpointMismatch: two tensors do not belong together.
    """
    if method_of(checkpoint.config) != "mxfp4":
        return {}
    found = {}
    for name, scales in checkpoint.tensors.items():
        parameter = name.removesuffix(SCALES)
        blocks = checkpoint.tensors.get(parameter + BLOCKS)
        if parameter == name or blocks is None:
            continue  # the model refuses a tensor that is no parameter's
        belong = (*scales.shape, IN_BLOCK // 2) == blocks.shape and len(scales.shape) == 3
        if not belong or {scales.dtype, blocks.dtype} != {"U8"}:
            wrong = (
                f"{parameter}: expected U8 blocks [E, O, G, 16] and scales [E, O, G], got "
                f"{blocks.dtype} {list(blocks.shape)} and {scales.dtype} {list(scales.shape)}"
            )
            raise CheckpointMismatch(f"{checkpoint.folder}: {wrong}", mismatched=(wrong,))
        found[parameter] = Packed(blocks, scales)
    return found


def unpacked_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype that unpacked experts have in a model of this dtype.

    It is the model's own, or bfloat16 if transformers' operation knows no other, as in 5.17.0.
    """
    known = "dtype" in signature(dequantize_convertops).parameters
    return dtype if known else torch.bfloat16


def require_on_cpu(checkpoint: Checkpoint, device: torch.device) -> None:
    """Raises UnsupportedModelError for a card, on which transformers leaves experts packed."""
    if device.type != "cpu" and method_of(checkpoint.config) == "mxfp4":
        raise UnsupportedModelError(
            f"{checkpoint.folder}: weights in mxfp4 stream on CPUs, which unpack them as they are "
            "read; on a card transformers computes with them as they are"
        )
