"""Texts through a cache, and what attention over each of them by itself would be in float64."""

from dataclasses import dataclass, replace

import torch

from pagedkv import CacheConfig, LayerGroup, PagedKVCache, paged_attention

P = 8


def attention(q, k, v, first, *, scale=None, softcap=None, window=None, sinks=None, rounded=None):
    """Causal attention of one text in plain torch.

    Args:
        q: `[n, H, D]`, the queries at positions first .. first + n.
        k: `[m, G, D]`, the keys of the whole text, as are v.
        sinks: `[H]`, scores of one more key per head, whose value is zero.
        rounded: the dtype every intermediate is rounded to, as the clumsiest kernel would; None
            for none.

    Returns: output `[n, H, D]` and log-sum-exp `[n, H]` in float64.
    """

    def r(x):
        return x if rounded is None else x.to(rounded).double()

    q, k, v = q.double(), k.double(), v.double()
    heads, groups = q.shape[1], k.shape[1]
    k, v = (x.repeat_interleave(heads // groups, 1) for x in (k, v))
    scores = r(torch.einsum("nhd,mhd->hnm", q, k))
    scores = r(scores * (q.shape[2] ** -0.5 if scale is None else scale))
    if softcap is not None:
        scores = r(softcap * torch.tanh(r(scores / softcap)))
    i = torch.arange(first, first + q.shape[0])[:, None]
    j = torch.arange(k.shape[0])[None]
    seen = (j <= i) & (j > i - (window or k.shape[0] + 1))
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:  # as a key and a value of their own, which no kernel has
        column = sinks.double()[:, None, None].expand(heads, q.shape[0], 1)
        scores = torch.cat([scores, column], -1)
        v = torch.cat([v, torch.zeros_like(v[:1])])
    lse = scores.logsumexp(-1)
    weights = r((scores - lse[..., None]).exp())
    return r(torch.einsum("hnm,mhd->nhd", weights, v)), lse.T


def assert_accurate(actual, twin, exact, *, reduction, largest, what=""):
    """The error is at most that of a clumsy twin, and the roundings nobody can avoid.

    Args:
        actual: what is tested, in its dtype.
        twin: float64, the same with every intermediate rounded to that dtype.
        exact: float64, from the same rounded inputs.
        reduction: terms of the longest sum.
        largest: the greatest magnitude of a term.
    """
    assert actual.shape == exact.shape, (what, actual.shape, exact.shape)
    error = (actual.double() - exact).abs()
    # The output is rounded once to its dtype; a sum of n terms in fp32 is off by up to n roundings
    # of the terms. Twice the twin's error, since another order rounds other numbers.
    output = torch.finfo(actual.dtype).eps / 2 * exact.abs()
    sums = reduction * torch.finfo(torch.float32).eps / 2 * largest
    allowed = 2 * (twin - exact).abs().max() + output + sums
    worst = (error - allowed).nan_to_num(torch.inf).argmax()
    at = tuple(x.item() for x in torch.unravel_index(worst, error.shape))
    assert (error <= allowed).all(), (
        f"{what} at {at}: {actual[at].item()} for {exact[at].item()}, error {error[at]:.3g} "
        f"of {allowed[at]:.3g} allowed; {(error > allowed).sum()} of {error.numel()} are off"
    )


@dataclass
class Sizes:
    heads: int = 4
    groups: int = 2
    dim: int = 64
    dtype: torch.dtype = torch.float32
    v_dim: int = 0  # 0: as many
    v_is_k: bool = False


# What attention to some of the tokens is tried with.
SIZES = {
    "groups": Sizes(),
    "latents": Sizes(heads=4, groups=1, dim=64, v_dim=32, v_is_k=True),
    "narrow values": Sizes(heads=4, groups=4, dim=64, v_dim=32),
    "half": Sizes(dtype=torch.float16),
}
TERMS = {
    "plain": {},
    "all terms": {"scale": 0.3, "softcap": 2.0, "sinks": torch.tensor([0.5, -1.0, 2.0, 0.0])},
}


@dataclass
class Text:
    """Queries, keys and values of one text, `[layers, n, heads, dim]`."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor

    @property
    def length(self) -> int:
        return self.q.shape[1]


def text(sizes: Sizes, length: int, seed: int, layers: int = 1) -> Text:
    random = torch.Generator().manual_seed(seed)

    def make(heads, dim=sizes.dim):
        shape = (layers, length, heads, dim)
        return torch.randn(shape, generator=random).to(sizes.dtype)

    q, k = make(sizes.heads), make(sizes.groups)
    v = make(sizes.groups, max(sizes.dim, sizes.v_dim or 0))
    return Text(q, k, (k if sizes.v_is_k else v)[..., : sizes.v_dim or sizes.dim])


def cache_for(
    sizes: Sizes, groups=None, layers: int = 1, backend: str = "auto", **fields
) -> PagedKVCache:
    own = {"v_head_dim": sizes.v_dim, "v_is_k": sizes.v_is_k}
    groups = tuple(replace(g, **own) for g in groups or (LayerGroup(tuple(range(layers))),))
    config = CacheConfig(
        num_layers=layers,
        num_kv_heads=sizes.groups,
        head_dim=sizes.dim,
        dtype=str(sizes.dtype).removeprefix("torch."),
        **{
            "max_tokens": 1024,
            "page_size": P,
            "max_sequences": 16,
            "groups": groups,
            **fields,
        },
    )
    return PagedKVCache(config, device="cpu", backend=backend, debug=True)


def feed(cache, seqs, texts, counts, **options):
    """One step; of each text's new tokens output, LSE, and the output that came with the LSE.

    All `[layers, n, H, ...]`.
    """
    starts = [cache.length(seq) for seq in seqs]
    new = [slice(a, a + n) for a, n in zip(starts, counts, strict=True)]
    outs = []
    layers = range(cache.config.num_layers)
    with cache.step(seqs, num_new=counts, layers=layers) as step:  # each twice
        for layer in layers:
            q, k, v = (
                torch.cat([getattr(t, x)[layer, rows] for t, rows in zip(texts, new, strict=True)])
                for x in "qkv"
            )
            if cache.config.shapes[step.group_of(layer)].v_is_k:
                v = k[..., : v.shape[2]]
            alone = paged_attention(q, k, v, step, layer, **options)
            out, lse = paged_attention(q, k, v, step, layer, return_lse=True, **options)
            outs.append((alone, lse, out))
        cache.check()
    stacked = (torch.stack(x).split(counts, 1) for x in zip(*outs, strict=True))
    return list(zip(*stacked, strict=True))


def run(cache, texts, schedule, seqs=None, **options):
    """Feeds texts by a schedule of counts a step; 0 sits a step out. Outputs of whole texts."""
    seqs = seqs or [cache.add() for _ in texts]
    parts = [[] for _ in texts]
    for counts in schedule:
        rows = [i for i, n in enumerate(counts) if n]
        results = feed(
            cache, [seqs[i] for i in rows], [texts[i] for i in rows], [counts[i] for i in rows],
            **options,
        )  # fmt: skip
        for i, result in zip(rows, results, strict=True):
            parts[i].append(result)
    return [tuple(torch.cat(x, 1) for x in zip(*part, strict=True)) for part in parts]


def all_at_once(texts):
    return [[t.length for t in texts]]


def prefill_then_decode(texts, decode):
    last = [[1] * len(texts)] * decode
    return [[t.length - decode for t in texts], *last]


def check(texts, results, windows=(None,), **options):
    for number, (t, (out, lse, with_lse)) in enumerate(zip(texts, results, strict=True)):
        for layer, window in enumerate(windows):
            rows = t.q[layer], t.k[layer], t.v[layer], 0
            exact, exact_lse = attention(*rows, window=window, **options)
            dtype = t.q.dtype
            twin, twin_lse = attention(*rows, window=window, rounded=dtype, **options)
            what = f"text {number} of {t.length} tokens, layer {layer}"
            reach = min(t.length, window or t.length)
            assert out.dtype == dtype
            assert lse.dtype == torch.float32
            values = t.v[layer].abs().max().item()
            products = (t.q[layer].norm(dim=-1).max() * t.k[layer].norm(dim=-1).max()).item()
            products *= abs(options.get("scale") or t.q.shape[-1] ** -0.5)
            # A sink is a score like others, and no product.
            sink = float(options["sinks"].abs().max()) if "sinks" in options else 0.0
            # A score that is off by e moves the output by up to 2 e of the largest value.
            terms = reach + 2 * t.q.shape[-1] * products + 2 * sink
            for output in (out, with_lse):
                assert_accurate(
                    output[layer], twin, exact, reduction=terms, largest=values, what=what
                )
            assert_accurate(
                lse[layer], twin_lse, exact_lse, reduction=t.q.shape[-1] + reach,
                largest=max(products, sink), what=f"LSE of {what}",
            )  # fmt: skip


HALF = [torch.bfloat16, torch.float16]
LENGTHS = [1, P - 1, P, P + 1, 2 * P + 3, 9 * P + 5]
