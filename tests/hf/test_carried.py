"""Quantised weights of other libraries: what they carry beside their elements is of the identity.

Alone finds: K and V of one quantisation that another one takes for its own, from a store or a file,
because libraries keep scales where neither parameters nor buffers are.
"""

import pytest
import torch
from torch import nn
from torch.nn import functional

from pagedkv.hf import foreign_code
from pagedkv.hf.fingerprint import fingerprint_of, sums_of
from tests.hf.test_prefix_store import found
from tests.hf.tiny import prompts, tiny


class Scale:
    """As bitsandbytes keeps it: an object, in which a scale may be coded once more."""

    def __init__(self, absmax, nested=None, blocksize=64):
        self.absmax, self.nested, self.blocksize = absmax, nested, blocksize


class Coded(nn.Parameter):
    """A weight of a class of its own, with the scale as an attribute."""


class CodedLinear(nn.Module):
    """A layer that takes the scale over from its weight in the first forward."""

    def __init__(self, weight, factor=1.0, threshold=0.0, plain=False):
        super().__init__()
        scale = weight.abs().amax(1) / 127
        codes = (weight / scale[:, None]).round().to(torch.int8)
        self.weight = (nn.Parameter if plain else Coded)(codes, requires_grad=False)
        self.state, self.threshold, self.latest = None, threshold, None
        kept = Scale(scale * factor, Scale(torch.ones(2)))
        if plain:
            self.meta = {"scale": kept}
        else:
            self.weight.scale = kept

    def forward(self, x):
        if self.state is None:
            self.state = self.__dict__.pop("meta", None) or vars(self.weight).pop("scale")
        self.latest = x.long()
        scale = self.state["scale"] if isinstance(self.state, dict) else self.state
        return functional.linear(x, self.weight * scale.absmax[:, None])


def coded(changed=None, **options):
    """A model of which the MLPs are quantised, one of them otherwise."""
    torch.manual_seed(0)
    model = tiny()
    for i, layer in enumerate(model.model.layers):
        own = options if changed in (None, i) else {}
        layer.mlp.up_proj = CodedLinear(layer.mlp.up_proj.weight.detach(), **own)
    return model


def identities(model):
    return fingerprint_of(model), sums_of(model)


@pytest.mark.parametrize("plain", [False, True])
def test_scales_and_settings_tell_quantisations_apart(plain):
    same = identities(coded(plain=plain))
    assert identities(coded(plain=plain)) == same
    for i in (0, 1):
        fingerprint, sums = identities(coded(i, plain=plain, factor=2.0))
        assert fingerprint != same[0]
        assert sums != same[1]
    one, other = (identities(coded(i, plain=plain, factor=2.0)) for i in (0, 1))
    assert one != other
    assert fingerprint_of(coded(plain=plain, threshold=6.0)) != same[0]
    nested = coded(plain=plain)
    layer = nested.model.layers[0].mlp.up_proj
    (layer.meta["scale"] if plain else layer.weight.scale).nested.absmax[1] = 5
    assert fingerprint_of(nested) != same[0]


@pytest.mark.parametrize("plain", [False, True])
def test_a_first_forward_makes_no_other_model_of_a_quantised_one(plain):
    model = coded(plain=plain)
    before = identities(model)
    model(torch.stack(prompts(7)))
    assert identities(model) == before


def test_one_quantisation_finds_its_own_prefixes_in_a_store_and_not_those_of_another(
    tmp_path, monkeypatch
):
    rows = prompts(140)
    assert found(coded(), tmp_path, rows)[0] == found(coded(), tmp_path, rows)[0] == [0]
    monkeypatch.setattr(foreign_code, "KNOWN", {*foreign_code.KNOWN, "tests"})
    first, tokens = found(coded(), tmp_path, rows)
    assert first == [0]
    assert found(coded(factor=2.0), tmp_path, rows)[0] == [0]
    assert found(coded(), tmp_path, rows) == ([128], tokens)
