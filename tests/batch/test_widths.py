"""The width of a step follows the device, where nobody says it."""

import types

import pytest
import torch
from torch import nn

from pagedkv import BatchGenerator
from pagedkv.batch import generator as module
from pagedkv.batch.widths import default_step_tokens
from pagedkv.planner import plan_memory
from tests.hf.tiny import tiny

CARD = torch.device("cuda", 0)


def of_bytes(gib, device=CARD):
    weight = types.SimpleNamespace(device=device, nbytes=gib << 30, is_meta=device.type == "meta")
    return types.SimpleNamespace(parameters=lambda: iter([weight]))


@pytest.mark.parametrize(
    ("card", "weights", "expected"),
    [
        (80, 16, 8192),
        (80, 0, 8192),
        (80, 64, 2048),
        (24, 0, 4096),
        (24, 16, 1024),
        (80, 80, 1024),
        (4, 6, 1024),  # more than there is: some lie elsewhere, or it will fail of itself
    ],
)
def test_a_card_computes_what_its_memory_has_room_for(monkeypatch, card, weights, expected):
    properties = types.SimpleNamespace(total_memory=card << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    assert default_step_tokens(of_bytes(weights), CARD) == expected
    elsewhere = of_bytes(weights, torch.device("cuda", 1))  # takes nothing of this card
    assert default_step_tokens(elsewhere, CARD) == default_step_tokens(of_bytes(0), CARD)
    streamed = of_bytes(0, torch.device("meta"))
    assert default_step_tokens(streamed, CARD) == 1024


def test_a_processor_computes_few_and_what_is_said_counts_first(monkeypatch):
    assert default_step_tokens(nn.Linear(2, 2), torch.device("cpu")) == 1024
    model = tiny()
    monkeypatch.setattr(module, "default_step_tokens", lambda model, device: 8192)
    with BatchGenerator(model, max_tokens=64, page_size=4) as batched:
        assert batched.step_tokens == 8192
    with BatchGenerator(model, max_tokens=64, page_size=4, step_tokens=5) as batched:
        assert batched.step_tokens == 5
    plan = plan_memory(model.config, device_memory="1GiB", device="cpu", length=64)
    with BatchGenerator(model, plan=plan) as batched:
        assert batched.step_tokens == plan.step_tokens
