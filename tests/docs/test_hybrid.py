"""The layer with a state that a page shows computes what it should, also after an abort."""

import pytest

from tests.docs.pages import DOCS, blocks


def test_a_layer_over_copies_of_states_computes_what_the_kernels_do():
    import torch

    pagedkv = pytest.importorskip("pagedkv")
    namespace = {}
    for block in blocks(DOCS / "hybrid.md"):
        if block.language == "python":
            exec(compile(block.body, "docs/hybrid.md", "exec"), namespace)

    def heads(x):
        return [part.unflatten(1, (2, -1)) for part in x.split([8, 8, 16], 1)]

    namespace["split_into_heads"] = heads
    tensors = (((32, 4), "float32"), ((2, 4, 8), "float32"))
    states = (namespace["StateLayer"](tensors),)
    sizes = {"num_kv_heads": 1, "head_dim": 4, "dtype": "float32", "max_tokens": 64}
    cache = pagedkv.PagedKVCache(pagedkv.CacheConfig(1, states=states, **sizes), device="cpu")
    seq, weight = cache.add(), torch.randn(32, 4)
    plain = [torch.zeros(1, *shape) for shape, _ in tensors]
    zero = torch.zeros(1, dtype=torch.int64)
    for _ in range(3):
        x, gate, beta = torch.randn(1, 32), -torch.rand(1, 2), torch.rand(1, 2)
        dropped = cache.prepare([seq], num_new=1)
        namespace["decode_layer"](dropped, 0, x, weight, gate, beta)
        cache.abort(dropped)
        with cache.step([seq], num_new=1) as step:
            pagedkv.write_kv(*torch.randn(2, 1, 1, 4), step, 0)
            out = namespace["decode_layer"](step, 0, x, weight, gate, beta)
        mixed = namespace["convolution_step"](x, plain[0], weight, None, zero, zero)
        wanted = namespace["delta_rule_step"](*heads(mixed), gate, beta, plain[1], zero, zero)
        assert torch.equal(out, wanted)
    for kept, expected in zip(cache.read_state(seq, 0), plain):
        assert torch.equal(kept, expected)
