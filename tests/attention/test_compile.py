"""An own loop under torch.compile: attention over pages is one operator to it."""

import pytest
import torch
import torch._dynamo.testing
from torch import nn

from pagedkv import CacheConfig, PagedKVCache, attend_again, attend_pages, paged_attention, write_kv

H, G, D, LAYERS = 4, 2, 16, 2


class Model(nn.Module):
    """Two layers of attention, as somebody might write them for their own loop."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(32, H * D)
        self.qkv = nn.ModuleList(nn.Linear(H * D, (H + 2 * G) * D) for _ in range(LAYERS))
        self.sinks = nn.Parameter(torch.randn(H))

    def forward(self, tokens, positions, step):
        x = self.embed(tokens) + positions[:, None] / 100
        for layer, project in enumerate(self.qkv):
            q, k, v = project(x).split([H * D, G * D, G * D], -1)
            q, k, v = (t.unflatten(-1, (-1, D)).contiguous() for t in (q, k, v))
            sinks = self.sinks if layer else None
            out, lse = paged_attention(
                q, k, v, step, layer, softcap=5.0, sinks=sinks, return_lse=True
            )
            x = x + out.flatten(1) + lse.mean(1, keepdim=True)
        return x


@torch.no_grad()
def run(forward):
    config = CacheConfig(
        num_layers=LAYERS, num_kv_heads=G, head_dim=D, dtype="float32", max_tokens=256, page_size=4
    )
    cache = PagedKVCache(config, device="cpu", debug=True)
    seqs = [cache.add([1, 2, 3, 4, 5]), cache.add([7, 8, 9])]
    outs = []
    new = [cache.uncached(seq) for seq in seqs]
    for turn in range(6):
        with cache.step(seqs, tokens=new) as step:
            x = forward(step.tokens, step.positions, step)
        outs.append(x.clone())
        if turn == 2:
            seqs += cache.fork(seqs[0])
        new = [[turn + seq] for seq in range(len(seqs))]
    cache.check()
    return outs


def test_an_own_loop_compiles_as_one_graph_and_computes_the_same():
    torch.manual_seed(0)
    model = Model()
    expected = run(model)
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    got = run(torch.compile(model, fullgraph=True, backend=counter))
    for a, b in zip(got, expected):
        torch.testing.assert_close(a, b)
    assert counter.frame_count <= 3  # of one number of tokens, and of any
    again = run(torch.compile(model, fullgraph=True, backend=counter))  # another cache
    for a, b in zip(again, expected):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("write_kv", lambda k, step: write_kv(k, k, step, 0)),
        ("attend_again", lambda k, step: attend_again(k, step, 0)),
        ("q", lambda k, step: attend_pages(k, *step.storage.layer(0), None)),
    ],
)
def test_what_cannot_be_compiled_says_so(name, call):
    config = CacheConfig(
        num_layers=1, num_kv_heads=G, head_dim=D, dtype="float32", max_tokens=64, page_size=4
    )
    cache = PagedKVCache(config, device="cpu")

    def part(k, step):
        call(k, step)
        return k + 1

    step = cache.prepare([cache.add([1, 2, 3])])
    with pytest.raises(Exception, match=f"{name}: expected to be called outside"):
        torch.compile(part, fullgraph=True, backend="aot_eager")(torch.randn(3, G, D), step)


def test_the_operator_keeps_the_promises_of_its_schema():
    operator = torch.ops.pagedkv.paged_attention
    config = CacheConfig(
        num_layers=1, num_kv_heads=G, head_dim=D, dtype="float32", max_tokens=64, page_size=4
    )
    cache = PagedKVCache(config, device="cpu")
    with cache.step([cache.add([1, 2, 3])], layers=[0]) as step:
        q, k, v = torch.randn(3, H, D), torch.randn(3, G, D), torch.randn(3, G, D)
        checks = ("test_schema", "test_faketensor")
        torch.library.opcheck(operator, (q, k, v, step.handle, 0), test_utils=checks)
