"""A format is what its `Format` says: nobody else has to hear of it."""

import pytest
import torch

from pagedkv import PagedKVCache, paged_attention
from pagedkv.cli.plan import kv_formats
from pagedkv.kernels.formats import KV_FORMATS, Format
from tests.cases import in_few_bits, one_group
from tests.contents import kv_of, start

# Codes of 8 bits with a step and a minimum, which nobody offers.
BY_TOKEN = Format("wide", "wide", "ranged", 8, "token")
STAGED = (
    Format("wide_channel", "wide", "ranged", 8, "channel", staged=True),
    Format("wide_token", "wide", "ranged", 8, "token", staged=True),
)


@pytest.mark.parametrize("pair", [(BY_TOKEN, BY_TOKEN), STAGED], ids=["by token", "staged"])
def test_a_format_that_is_only_described_is_counted_stored_saved_and_read(
    pair, monkeypatch, tmp_path
):
    monkeypatch.setitem(KV_FORMATS, "wide", pair)
    config = in_few_bits(kv_formats("wide"), page_size="auto", max_tokens=256, max_sequences=4)
    assert (config.page_size, config.staged) == ((32, True) if pair is STAGED else (16, False))
    assert config.bytes_per_token < 0.4 * one_group(head_dim=32).bytes_per_token
    caches, text = [PagedKVCache(config, device="cpu", debug=True) for _ in "ab"], [*range(100)]
    assert caches[0]._storage.nbytes == config.nbytes
    seq = start(caches[0], text)
    caches[0].save(seq, tmp_path / "text")
    for cache, row in (caches[0], seq), (caches[1], caches[1].load(tmp_path / "text")):
        cache.check()
        for found, true in zip(cache.gather(row, 1), kv_of(text, 1, config), strict=True):
            assert (found - true).abs().max() < 0.04  # half a step of 16 / 255, and rounding
        with cache.step([row], [[7]]) as step:
            for layer in range(config.num_layers):
                k, v = (x[-1:] for x in kv_of([*text, 7], layer, config))
                written = paged_attention(torch.ones_like(k), k, v, step, layer)
                assert written.abs().max() <= 8  # a mean of values, whichever backend attends
