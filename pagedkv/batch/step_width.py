"""How many tokens a step computes where nobody says."""

from __future__ import annotations

import torch
from torch import nn

NARROW, WIDE = 1024, 8192
TOKEN_BYTES = 256 << 10  # what a token takes in the widest layer of 70 B parameters in bfloat16
SHARE = 20  # of what weights leave of a card, half of the tenth that default pages leave


def default_step_tokens(model: nn.Module, device: torch.device) -> int:
    """1,024, or on a card up to 8,192 as far as there is memory for what they take in a layer.

    A card multiplies 8,192 tokens by the same weights in less time than eight times 1,024; a
    processor does not.

    Args:
        device: where steps begin.
    """
    if device.type != "cuda" or any(each.is_meta for each in model.parameters()):
        return NARROW
    memory = torch.cuda.get_device_properties(device).total_memory
    weights = sum(each.nbytes for each in model.parameters() if each.device == device)
    tokens = max(NARROW, (memory - weights) // (SHARE * TOKEN_BYTES))
    return min(WIDE, 1 << (tokens.bit_length() - 1))
