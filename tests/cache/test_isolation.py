"""One row cannot harm another, whatever it holds."""

import pytest
import torch

from pagedkv import paged_attention, write_kv
from tests.cache.small import ids, make, table_of
from tests.contents import kv_of, start


def attend(cache, step, q, texts):
    outs = []
    for layer in range(cache.config.num_layers):
        parts = [kv_of(t, layer, cache.config) for t in texts]
        k, v = (
            torch.cat([x[i][len(t) - n :] for x, t, n in zip(parts, texts, step.num_new)])
            for i in (0, 1)
        )
        outs.append(paged_attention(q, k, v, step, layer))
    return torch.stack(outs)


def test_nan_in_rejected_tokens_does_not_reach_what_follows():
    outputs = []
    for nan in (False, True):
        cache = make(debug=False)
        seqs = [start(cache, ids(6)), start(cache, ids(9, 1))]
        texts = [ids(14), ids(17, 1)]
        q = torch.randn(16, 4, 4, generator=torch.Generator().manual_seed(1))
        step = cache.prepare(seqs, tokens=[t[-8:] for t in texts])
        attend(cache, step, q, texts)
        if nan:
            for layer in range(2):
                bad = torch.full((16, 2, 4), torch.nan)
                k, v = (torch.cat([x[-8:] for x in xs])
                        for xs in zip(*(kv_of(t, layer, cache.config) for t in texts)))  # fmt: skip
                bad_k, bad_v = bad.clone(), bad.clone()
                for row in (0, 8, 9):
                    bad_k[row], bad_v[row] = k[row], v[row]
                write_kv(bad_k, bad_v, step, layer)
        cache.commit(step, [1, 2], layers=[0, 1])
        for n in range(1, 4):
            longer = [ids(7) + [70] * n, ids(11, 1) + [71] * n]
            with cache.step(seqs, tokens=[70, 71]) as step:
                outputs.append(attend(cache, step, q[:2], longer))
    for clean, dirty in zip(outputs[:3], outputs[3:], strict=True):
        assert torch.isfinite(clean).all()
        assert torch.equal(clean, dirty)


def test_in_debug_mode_what_was_not_committed_is_nan_and_check_sees_a_stray_write():
    from pagedkv.errors import CorruptCacheError

    cache = make()
    a = start(cache, ids(6))
    step = cache.prepare([a], num_new=1)
    page = table_of(step, 0, 2)[1]
    cache.abort(step)
    k = cache._storage.k[0]
    cache.check()
    k[0, page, :, 3] = 1.0  # beyond the two committed slots
    with pytest.raises(CorruptCacheError, match=str(page)):
        cache.check()
