"""How many tokens a step computes: for all rows, and for a decoding one."""

from __future__ import annotations

import torch
from torch import nn

from pagedkv.planner import MemoryPlan

NARROW, WIDE = 1024, 8192
TOKEN_BYTES = 256 << 10  # of a token in the widest layer of a 70 B model in bfloat16
WITH_DRAFT = 5  # four drafts behind a row's last token: more are seldom all right
SHARE = 20  # a step takes 1/20 of what weights leave of a card: default pages leave a tenth


def default_step_tokens(model: nn.Module, device: torch.device) -> int:
    """Returns 1,024, or on a card up to 8,192 if there is memory for so many in a layer.

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


def widths(
    step_tokens: int | None, verify_width: int | None, plan: MemoryPlan | None, has_draft: bool
) -> tuple[int | None, int]:
    """Chooses the tokens of a step and of a decoding row: as given, as planned, or by default.

    Returns:
        `step_tokens`, None if the device decides, and `verify_width`.

    Raises:
        ValueError: one is no positive int, or leaves no room for drafts.
    """
    if step_tokens is None and plan is not None:
        step_tokens = plan.step_tokens
    if verify_width is None:
        verify_width = 1 if plan is None else plan.verify_width
        verify_width = WITH_DRAFT if has_draft and verify_width == 1 else verify_width
    for name, value in (("step_tokens", step_tokens), ("verify_width", verify_width)):
        if value is not None and (type(value) is not int or value < 1):
            raise ValueError(f"{name}: expected a positive int, got {value!r}")
    if has_draft and verify_width == 1:
        raise ValueError("verify_width: expected 2 or more with a draft, got 1")
    return step_tokens, verify_width
