"""Pretended devices are as strict as cards are."""

import numpy as np
import pytest
import torch

from tests.devices import HOST, A, B, Devices, MixedDevicesError


@pytest.fixture
def devices():
    with Devices() as devices:
        yield devices


def test_tensors_are_where_they_were_made_or_moved_and_so_is_what_becomes_of_them(devices):
    x = torch.ones(3, device=A)
    for same in (x + 1, x[1:], x.view(3, 1), x.new_zeros(2), x.to(A), torch.zeros_like(x)):
        assert same.device == A
    assert x.to(B).device == B
    assert devices.crossed == {(A, B): 1}
    assert torch.tensor([1], device=B).device == B
    assert torch.ones(2).device == x.cpu().device == torch.from_numpy(np.ones(2)).device == HOST


@pytest.mark.parametrize(
    "meet",
    [
        lambda x, y: x + y,
        lambda x, y: torch.cat([x, y]),
        lambda x, y: x.index_select(0, y.long()),
        lambda x, y: torch.nn.functional.linear(x[None], y[None]),
        lambda x, y: torch.where(x > 0, x, y),
        lambda x, y: x.add_(y),
    ],
)
@pytest.mark.parametrize("other", [B, HOST])
def test_an_operation_takes_tensors_of_one_device(devices, meet, other):
    x, y = torch.ones(3, device=A), torch.ones(3, device=A)
    with pytest.raises(MixedDevicesError):
        meet(x, y.to(other))


def test_scalars_and_indices_may_come_from_the_host_and_copies_may_cross(devices):
    x, first = torch.arange(3.0, device=A), torch.tensor([0])
    assert (x * torch.tensor(2.0)).device == x[first].device == A
    with pytest.raises(MixedDevicesError):
        x[first.to(B)]
    there = torch.zeros(3, device=B)
    there.copy_(x)
    assert there.device == B
    assert there.tolist() == [0, 1, 2]


def test_the_host_does_not_look_into_the_memory_of_a_device(devices):
    with pytest.raises(TypeError, match="cpu:1 tensor to numpy"):
        torch.ones(3, device=A).numpy()
    assert torch.ones(3, device=A).cpu().numpy().tolist() == [1, 1, 1]
