"""Words are decoded as `formats.py` says, whatever the tensors that they go through."""

import pytest
import torch

from pagedkv.kernels.formats import FORMATS
from pagedkv.kernels.torch.codes import decode

CODED = [*FORMATS][1:]
EVERY = torch.arange(-(2**15), 2**15, dtype=torch.int32)
GROUPS, SLOTS, WIDTH = 2, 32, 16


def every_word(format):
    """All words as pages, and scales of theirs that are not alike."""
    words = EVERY.to(torch.int16).view(-1, GROUPS, SLOTS, WIDTH)
    if format.static:
        return words, torch.tensor([0.25, 2.0**-20])[:, None, None]
    shape = format.scales_shape(len(words), GROUPS, SLOTS, WIDTH * format.per_word)
    return words, torch.rand(shape).half()


def one_by_one(format, scales):
    """Decodes the words by the table in `formats.py`, each part of a word by itself."""
    parts = []
    for j in range(format.per_word):
        codes = ((EVERY >> (format.bits * j)) & (2**format.bits - 1)).view(-1, GROUPS, SLOTS, WIDTH)
        parts.append(codes)
    codes = torch.cat(parts, -1)
    if format.code == "e4m3":
        return codes.to(torch.uint8).view(torch.float8_e4m3fn).float() * scales
    if format.code == "signed":
        return (codes - 128) * scales.float().unsqueeze(-1)
    axis = -2 if format.scales == "channel" else -1
    step, least = (x.float().unsqueeze(axis) for x in scales.unbind(-1))
    return step * codes + least


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", CODED)
def test_every_word_is_what_the_format_says(name, dtype):
    words, scales = every_word(FORMATS[name])
    before, true = words.clone(), one_by_one(FORMATS[name], scales).to(dtype)
    found = decode(words, scales, FORMATS[name], dtype)
    by_slot = torch.empty_like(found).transpose(1, 2).contiguous().transpose(1, 2)
    for values in found, decode(words, scales, FORMATS[name], dtype, by_slot):
        assert torch.equal(values.isnan(), true.isnan())
        assert torch.equal(values.nan_to_num(), true.nan_to_num())
    assert torch.equal(words, before)
    assert bool(true.isnan().any()) == (name == "fp8")
