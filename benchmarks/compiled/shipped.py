"""Every kernel configuration that is shipped, as the launchers compile it for an architecture.

The tensors are small and on the CPU; under `absent_card` a launcher only compiles. It compiles what
a user's call compiles, because it reads the tuning tables as always.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import triton

from benchmarks.compiled.launched import compiled_by
from benchmarks.kernel_report import Shipped
from pagedkv.kernels import formats
from pagedkv.kernels.formats import Format, Pages
from pagedkv.kernels.scoring import Scoring
from pagedkv.kernels.triton import backend as paged
from pagedkv.kernels.triton import (
    copy,
    delta_rule,
    page_coding,
    prefill,
    select_pages,
    shared_prefix,
    short_convolution,
)
from pagedkv.kernels.triton.proved import is_compiled_well, trying

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


class Heads(NamedTuple):
    """A model's attention, the page size it is served with, and the formats of K and V."""

    num_heads: int = 32
    num_kv_heads: int = 8
    head_dim: int = 128
    page: int = 16
    dtype: torch.dtype = BF16
    k: Format = formats.DENSE
    v: Format = formats.DENSE
    v_dim: int | None = None  # V's, if it has pages of its own that are narrower than K's
    latent: int | None = None  # columns of K that V is a view of

    @property
    def dense(self) -> bool:
        return self.k.dense and self.v.dense

    def q(self, tokens: int) -> torch.Tensor:
        """`[T, H, D]`."""
        return torch.zeros(tokens, self.num_heads, self.head_dim, dtype=self.dtype)

    def pages(self, layers: tuple[int, ...] = ()) -> tuple[Pages, Pages]:
        """Two pages `[2, G, P, D]` of K and of V, and two staging pages if either has any."""
        shape = *layers, 2, self.num_kv_heads, self.page, self.head_dim
        staged = self.k.staged or self.v.staged
        staging = torch.zeros(shape, dtype=self.dtype) if staged else None
        k, of_v = self._coded(self.k, shape, staging), (*shape[:-1], self.v_dim or self.head_dim)
        if self.latent:
            return k, Pages.of(k.data[..., : self.latent])
        return k, self._coded(self.v, of_v, staging)

    def _coded(self, format: Format, shape: tuple[int, ...], staging: torch.Tensor | None) -> Pages:
        if format.dense:
            return Pages(format, torch.zeros(shape, dtype=self.dtype), None, staging)
        *layers, pages, heads, page, dim = shape
        words = torch.zeros(*shape[:-1], dim // format.per_word, dtype=torch.int16)
        kind = FP32 if format.static else FP16
        scales = torch.ones(*layers, *format.scales_shape(pages, heads, page, dim), dtype=kind)
        return Pages(format, words, scales, staging)


# True stands for a number for each head, or with a tree for each query; a bias by distance is given
# by how far it reaches.
ALL_TERMS: dict[str, Any] = {"window": 1024, "softcap": 30.0, "sinks": True}
SLOPES: dict[str, Any] = {"alibi_slopes": True}
BIASED: dict[str, Any] = {"distance_bias": 1024}
TREE: dict[str, Any] = {"tree": True}  # no layer with a window has one
MASS: dict[str, Any] = {"mass": True}  # no term of scores: the weights of attention are noted down
ACROSS: dict[str, Any] = {"causal": False}  # no term of scores either
LARGE_PAGES = Heads(page=64)
GEMMA4, MIMO = Heads(32, 4, 512), Heads(64, 4, 192, v_dim=128)  # full layers of 31B, windows
LATENT = Heads(128, 1, 576, latent=512)  # DeepSeek V3, absorbed
FP8, INT8 = ({"k": half, "v": half} for half in (formats.FP8, formats.INT8))
INT4: dict[str, Any] = {"k": formats.INT4_CHANNEL, "v": formats.INT4_TOKEN, "page": 32}

DECODE: dict[str, tuple[Heads, int, dict[str, Any]]] = {
    # name: heads, new tokens a row, terms of the scores
    "D64 p16": (Heads(head_dim=64), 1, {}),
    "D80 p16": (Heads(head_dim=80), 1, {}),
    "D96 p16": (Heads(head_dim=96), 1, {}),
    "D128 p1": (Heads(page=1), 1, {}),
    "D128 p16": (Heads(), 1, {}),
    "D128 p64": (LARGE_PAGES, 1, {}),
    "D128 p16 mass": (Heads(), 1, MASS),
    "D128 p16 mass 8 queries": (Heads(), 8, MASS),
    "D128 int4 mass": (Heads(**INT4), 1, MASS),
    "D128 p16 all terms": (Heads(), 1, ALL_TERMS),
    "D128 p16 slopes": (Heads(), 1, SLOPES),
    "D128 p16 biased": (Heads(), 1, BIASED),
    "D128 p16 8 queries": (Heads(), 8, {}),
    "D128 p16 8 queries tree": (Heads(), 8, TREE),
    "D128 p64 16 queries": (LARGE_PAGES, 16, {}),
    "D256 p16": (Heads(8, 1, 256), 1, {}),
    "D64 p16 fp32": (Heads(head_dim=64, dtype=FP32), 1, {}),
    "D128 p16 fp32": (Heads(dtype=FP32), 1, {}),
    "D256 p16 fp32 8 queries": (Heads(8, 1, 256, dtype=FP32), 8, {}),
    "D64 p16 71 heads": (Heads(71, 1, 64), 1, {}),
    "D192 V128": (MIMO, 1, {"window": 128, "sinks": True}),
    "D512 p16": (GEMMA4, 1, {}),
    "D512 4 queries": (GEMMA4, 4, {}),
    "D512 fp32": (GEMMA4._replace(dtype=FP32), 1, {}),
    "latent 16 heads": (LATENT._replace(num_heads=16), 1, {}),
    "latent 20 heads": (LATENT._replace(num_heads=20), 1, {}),
    "latent 128 heads": (LATENT, 1, {}),
    "latent p64": (LATENT._replace(page=64), 1, {}),
    "latent mass": (LATENT, 1, MASS),
    "latent p1 mass": (LATENT._replace(page=1), 1, MASS),
    "latent 8 queries": (LATENT, 8, {}),
    "latent fp32": (LATENT._replace(dtype=FP32), 1, {}),
    "latent 288 40 heads": (Heads(40, 1, 288, latent=256), 1, {}),
    **{
        f"D{dim} {name}": (Heads(heads, groups, dim, **pair), 1, {})
        for dim, heads, groups in ((64, 32, 8), (128, 32, 8), (256, 8, 1))
        for name, pair in (("int8", INT8), ("int4", INT4))
    },
    "D128 fp8": (Heads(**FP8), 1, {}),
    "D128 int8 all terms": (Heads(**INT8), 1, ALL_TERMS),
    "D128 int4 p16": (Heads(**INT4 | {"page": 16}), 1, {}),
    "D128 int8 8 queries": (Heads(**INT8), 8, {}),
    "D128 int4 8 queries": (Heads(**INT4), 8, {}),
    "D128 int8 K int4 V": (Heads(**INT4 | {"k": formats.INT8}), 1, {}),
    "D128 int4 K fp8 V": (Heads(**INT4 | {"v": formats.FP8}), 1, {}),
    "D128 bf16 K int4 V": (Heads(**INT4 | {"k": formats.DENSE}), 1, {}),
}
PREFILL: dict[str, tuple[Heads, dict[str, Any]]] = {
    "D64 p16": (Heads(head_dim=64), {}),
    "D96 p16": (Heads(head_dim=96), {}),
    "D128 p16": (Heads(), {}),
    "D128 p64": (LARGE_PAGES, {}),
    "D128 p16 all terms": (Heads(), ALL_TERMS),
    "D128 p16 slopes": (Heads(), SLOPES),
    "D128 p16 biased": (Heads(), BIASED),
    "D128 p16 tree": (Heads(), TREE),
    "D256 p16": (Heads(8, 1, 256), {}),
    "D256 64 heads": (Heads(64, 1, 256), ALL_TERMS),
    "D64 p16 fp32": (Heads(head_dim=64, dtype=FP32), {}),
    "D128 p16 fp32": (Heads(dtype=FP32), {}),
    "D64 p16 71 heads": (Heads(71, 1, 64), {}),
    "D192 V128": (MIMO, {"window": 128, "sinks": True}),
    "D512 p16": (GEMMA4, {}),
    "latent": (LATENT, {}),
    "D64 int4": (Heads(head_dim=64, **INT4), {}),
    "D128 fp8": (Heads(**FP8), {}),
    "D128 int8": (Heads(**INT8), {}),
    "D128 int4": (Heads(**INT4), {}),
    "D256 int8": (Heads(8, 1, 256, **INT8), {}),
    "D256 int4": (Heads(8, 1, 256, **INT4), {}),
}
DELTA_RULE = {  # key heads, value heads, keys and values of a head, gates
    "64 x 64": (16, 16, 64, 64, ()),
    "96 x 192": (16, 16, 96, 192, ()),
    "128 x 128": (16, 32, 128, 128, ()),
    "128 x 128 channels": (32, 32, 128, 128, (128,)),
    "256 x 256": (8, 8, 256, 256, ()),
}

# Bytes that a thread spills, by architecture. On sm_90 latents take 0.86 of the time in tiles of 64
# tokens although these spill in the loop; the others spill outside of their loops.
SPILLS: dict[int, dict[str, int]] = {
    80: {"shared prefix latent": 24, "prefill D128 p16 biased": 96},
    86: {"shared prefix latent": 24, "prefill D128 p16 biased": 56},
    89: {"shared prefix latent": 24, "prefill D128 p16 biased": 56},
    90: {
        "decode latent 128 heads": 88,
        "decode latent p64": 24,
        "decode latent mass": 48,
        "decode latent p1 mass": 48,
        "decode latent 8 queries": 40,
        "shared prefix latent": 128,
        "prefill D128 p16 biased": 24,
        "decode D128 int4 8 queries": 24,  # with Triton 3.6.0
        "prefill D64 p16 fp32": 8,  # the same
    },
    100: {"prefill D64 p16": 8, "score columns latent": 24},
    120: {
        "decode latent 20 heads": 16,
        "shared prefix latent": 24,
        "prefill D128 p16 biased": 64,
    },
}
# With Triton 3.9.0 those of `CORE` spill more.
SPILLS_NEWER = {"decode latent 128 heads": 304, "Gluon prefill D128 p16": 64}
MEASURED = {name for name in SPILLS[90] if "latent" in name}  # as the fastest although they spill

GLUON: dict[str, tuple[Heads, dict[str, Any], int]] = {  # bytes that may spill at edges
    "D64 p16": (Heads(head_dim=64), {}, 0),
    "D128 p16": (Heads(), {}, 32),
    "D128 p64": (LARGE_PAGES, {}, 16),
    "D128 p16 window": (Heads(), {"window": 1024}, 24),
    "D64 p16 sinks": (Heads(head_dim=64), {"window": 128, "sinks": True}, 16),
    "D128 p16 softcap": (Heads(), {"softcap": 30.0}, 40),
    "D256 p16": (Heads(8, 1, 256), {}, 16),
    "D256 p64 all terms": (Heads(8, 4, 256, page=64), ALL_TERMS, 40),
}
DECODE_NAMES = "gluon_decode", "gluon_decode_rest"
GLUON_DECODE: dict[str, tuple[Heads, int, dict[str, Any], int]] = {  # with new tokens a row
    "D64 p16": (Heads(head_dim=64), 1, {}, 0),
    "D128 p16": (Heads(), 1, {}, 0),
    "D128 p64": (LARGE_PAGES, 1, {}, 0),
    "D128 p16 8 queries": (Heads(), 8, {}, 0),
    "D128 p16 all terms": (Heads(), 1, ALL_TERMS, 0),
    "D256 p16": (Heads(8, 1, 256), 1, {}, 16),
    "D256 p16 all terms": (Heads(8, 1, 256), 1, ALL_TERMS, 64),
}

# Hopper's own decode of latents: heads, new tokens a row, and bytes that may spill at edges.
GLUON_LATENTS: dict[str, tuple[Heads, int, int]] = {
    "p16": (LATENT, 1, 32),
    "p64": (LATENT._replace(page=64), 1, 16),
    "67 heads 4 queries": (LATENT._replace(num_heads=67), 4, 32),
    "p48 64 heads": (LATENT._replace(num_heads=64, page=48), 1, 32),
}

# Kernels that a first hour on a card needs, one of each kind; every supported Triton compiles them.
CORE = {
    "decode D128 p16",
    "decode D128 p16 8 queries",
    "decode D128 int4",
    "decode D128 fp8",
    "decode D512 p16",
    "decode latent 128 heads",
    "prefill D128 p16",
    "prefill D128 p16 all terms",
    "prefill D128 int4",
    "Gluon prefill D128 p16",
    "Gluon decode D128 p16",
    "Gluon latents p64",
    "shared prefix D128 p16",
    "merge D128",
    "cut rows",
    "fold chunks",
    "write D128 bf16",
    "write D128 int8",
    "encode D128 int4",
    "decode pages D128 int4",
    "copy bf16",
    "delta rule 128 x 128",
    "convolution bf16",
    "score columns D128",
}


def shipped(arch: int) -> list[Shipped]:
    """The list for an architecture; each entry is compiled while that architecture is active."""
    found = [
        Shipped(
            f"decode {name}",
            _by("_decode", _attend, *case),
            **_promise(arch, *case[:2]),
        )
        for name, case in DECODE.items()
        if name != "latent p1 mass" or arch == 90  # its tiles are the largest
    ]
    found += [
        Shipped(
            f"prefill {name}",
            _by("_prefill", _attend, heads, 100, terms),
            **_promise(arch, heads, _rows(heads)),
        )
        for name, (heads, terms) in PREFILL.items()
        if (arch, terms)
        != (100, BIASED)  # spills 296 bytes a thread within its loop: right, and slow
    ]
    found += [
        Shipped(
            f"Gluon prefill {name}",
            _by(
                "_prefill_hopper",
                _tried,
                ("gluon_prefill", "gluon_rest"),
                _attend,
                heads,
                100,
                terms,
            ),
            buffers=0,
            mma="hgmma",
            stack=stack,
            int64_args=(),
            hidden=32 if heads.head_dim == 256 else 64,  # all of a tile but those that rescale sums
        )
        for name, (heads, terms, stack) in GLUON.items()
        if arch == 90
    ]
    found += [
        Shipped(
            f"Gluon decode {name}",
            _by("_decode_hopper", _tried, DECODE_NAMES, _attend, heads, new, terms),
            buffers=0,
            mma="hgmma",
            stack=stack,
            int64_args=(),
            hidden=16 if heads.head_dim == 256 else 32,
        )
        for name, (heads, new, terms, stack) in GLUON_DECODE.items()
        if arch == 90
    ]
    found += [
        Shipped(
            f"Gluon latents {name}",
            _by("_latents_hopper", _tried, ("gluon_latents",), _attend, heads, new, {}),
            buffers=0,
            mma="hgmma",
            stack=stack,
            int64_args=(),
        )
        for name, (heads, new, stack) in GLUON_LATENTS.items()
        if arch == 90 and is_compiled_well()
    ]
    plain, coded = Heads(), Heads(**INT4)
    few, prefixes = LATENT._replace(num_heads=16), [paged.Prefix(slice(0, 2), 64)]
    prefix, latent = (_by("_decode", _attend, one, 1, {}, prefixes) for one in (plain, few))
    one = {"buffers": 0, "mma": "none"}
    alone = one | {"wide": False, "int64_args": ()}
    pools = one | {"int64_args": ("k_pages_ptr", "v_pages_ptr")}
    slots = one | {"int64_args": ("states_ptr", "into_ptr")}
    fold, small = _by("_fold", _attend, plain, 1, MASS), Heads(head_dim=64, dtype=FP32)
    found += [
        Shipped("shared prefix D128 p16", prefix, **_promise(arch, plain, 64)),
        Shipped("shared prefix latent", latent, **_promise(arch, few, 64)),
        Shipped("merge D128", _by("_merge", _attend, plain, 1, {}), **alone),
        Shipped("merge D512", _by("_merge", _attend, GEMMA4, 1, {}), **alone),
        Shipped("fold chunks", fold, **alone | {"int64_args": ("chunks_ptr",)}),
        Shipped("cut rows", _by("_cut_rows", _attend, plain, 1, {}), **alone),
        Shipped("cut rows across", _by("_cut_rows", _attend, plain, 1, ACROSS), **alone),
        Shipped("write D128 bf16", _by("_write_kv", _write, plain), **pools),
        Shipped("write D64 fp32", _by("_write_kv", _write, small), **pools),
        Shipped("write latent", _by("_write_kv", _write, LATENT), **pools),
        Shipped("write D128 int8", _by("_write_kv", _write, Heads(**INT8)), **pools),
        Shipped("encode D128 int4", _by("_encode_pages", _encode, coded), **pools),
        Shipped("decode pages D128 int4", _by("_decode_pages", _decode, coded), **pools),
        *(Shipped(f"delta rule {name}", _by("_delta_rule", _delta_rule, *case), **slots)
          for name, case in DELTA_RULE.items()),
        Shipped("convolution bf16", _by("_convolve", _convolve), **slots | {"wide": False}),
        Shipped("copy bf16", _by("_copy_pages", _copy), **one, int64_args=("from_ptr", "to_ptr")),
        *(Shipped(f"score columns {name}", _by("_score_columns", _score, one), 0, "hmma",
                  int64_args=("bounds_ptr",)) for name, one in (("D128", plain), ("latent", few))),
        Shipped("choose columns", _by("_choose_columns", _score, plain), **alone),
    ]  # fmt: skip
    spilt = SPILLS[arch]
    if arch == 90 and triton.__version__ == "3.9.0":
        spilt = spilt | SPILLS_NEWER
    return [
        one._replace(
            stack=spilt.get(one.name, one.stack), measured=arch == 90 and one.name in MEASURED
        )
        for one in found
    ]


def _by(kernel: str, call: Callable[..., None], *args: Any) -> Callable[[], Any]:
    return partial(compiled_by, kernel, partial(call, *args))


def _tried(names: tuple[str, ...], call: Callable[..., None], *args: Any) -> None:
    """Calls with kernels on that are off until a card has shown that they are right."""
    with trying(*names):
        call(*args)


def _rows(heads: Heads) -> int:
    """Returns a chunk's rows: enough to fill its tile, if that has 64 rows and more."""
    small = heads.head_dim > 256 if heads.dense else heads.head_dim in prefill.CODED
    return 0 if small else 100


def _promise(arch: int, heads: Heads, new: int) -> dict[str, Any]:
    """Returns the least buffers of K and V, and the kind of product: Hopper's own from 64 rows on.

    10.x has its own, too, but not for coded keys, which are added up in parts of fewer rows there.
    Tiles of wide heads are 16 or 32 tokens, too few for all warps; memory bounds most of them.
    """
    full = heads.num_heads // heads.num_kv_heads * new >= 64
    if heads.dtype == FP32:
        return {"buffers": 1, "mma": "ffma"}
    wide, few = heads.head_dim > 256, arch == 100 and not heads.k.dense
    own = {90: "hgmma", 100: "tcgen05"}.get(arch, "hmma") if full else "hmma"
    if arch == 100 and (wide or few):
        own = "hmma"
    return {"buffers": 2, "mma": own, "repeats": 2 if wide or few else 1}


def _scoring(heads: Heads, terms: dict[str, Any], tokens: int) -> Scoring:
    by_head = torch.zeros(heads.num_heads, dtype=heads.dtype)
    found = {name: by_head if term is True else term for name, term in terms.items()}
    if distances := terms.get("distance_bias"):
        found["distance_bias"] = torch.zeros(tokens, heads.num_heads, distances, dtype=heads.dtype)
    if "tree" in found:
        found["tree"] = torch.zeros(tokens, dtype=torch.int64)
    return Scoring(1.0, **{name: found[name] for name in found if name in Scoring._fields})


def _attend(heads: Heads, new: int, terms: dict[str, Any], prefixes: Any = ()) -> None:
    """Two rows of `new` tokens through the backend."""
    q, (k_pages, v_pages) = heads.q(2 * new), heads.pages()
    lens = torch.full((2,), 4096, dtype=torch.int32)
    starts = torch.tensor([0, new, 2 * new], dtype=torch.int32)
    table = torch.zeros(2, 4096 // heads.page, dtype=torch.int32)
    scoring = _scoring(heads, terms, len(q))
    shared = None
    if prefixes:
        cut = paged.cut_prefixes(prefixes, [new, new], heads.num_heads, k_pages, heads.dtype)
        shared = shared_prefix.plan(cut, q.device)
    plan = paged.plan(
        *(lens, starts, q, k_pages, v_pages),
        num_new=[new, new],
        max_kv=4096,
        window=scoring.window,
        causal=terms.get("causal", True),
        shared=shared,
    )
    tensors = q, k_pages, v_pages, table, lens, starts
    watched = None
    if terms.get("mass"):
        rows = np.array([new, new]), lens.numpy(), np.array([1, 1])
        watched = paged.watch(*rows, table.shape[1], heads.num_heads, heads.page, q.device)
    _, lse = paged.paged_attention(*tensors, plan, **scoring._asdict(), watched=watched)
    if watched is not None:
        paged.page_mass(watched, lse)


def _write(heads: Heads) -> None:
    k = torch.zeros(4, heads.num_kv_heads, heads.head_dim, dtype=heads.dtype)
    paged.write_kv(k, k[..., : heads.v_dim], *heads.pages(), torch.zeros(4, dtype=torch.int64))


def _encode(heads: Heads) -> None:
    ids = torch.zeros(1, dtype=torch.int64)
    page_coding.encode_pages(*heads.pages(layers=(1,)), ids + 2, ids)


def _decode(heads: Heads) -> None:
    ids = torch.zeros(1, dtype=torch.int64)
    page_coding.decode_pages(*heads.pages(layers=(1,)), ids, ids + 2)


def _copy() -> None:
    pages, one = Heads().pages()[0].data, torch.tensor([1])
    copy.copy_pages(pages[None], one - 1, one)


def _delta_rule(keys: int, values: int, dim: int, width: int, channels: tuple[int, ...]) -> None:
    q, v = torch.zeros(1, keys, dim, dtype=BF16), torch.zeros(1, values, width, dtype=BF16)
    gate, beta = torch.zeros(1, values, *channels), torch.zeros(1, values, dtype=BF16)
    states, slot = torch.zeros(2, values, dim, width), torch.ones(1, dtype=torch.int64)
    delta_rule.delta_rule_step(q, q, v, gate, beta, states, slot - 1, slot)


def _convolve() -> None:
    x, slot = torch.zeros(1, 8192, dtype=BF16), torch.ones(1, dtype=torch.int64)
    states = torch.zeros(2, 8192, 4, dtype=BF16)
    short_convolution.convolution_step(x, states, states[0], None, slot - 1, slot)


def _score(heads: Heads) -> None:
    q, bounds = heads.q(2), torch.zeros(2, heads.num_kv_heads, heads.head_dim, 2, dtype=FP16)
    table, lens = torch.zeros(2, 256, dtype=torch.int32), torch.full((2,), 4096, dtype=torch.int32)
    starts = torch.arange(3, dtype=torch.int32)
    select_pages.chosen_table(q, bounds, table, lens, starts, heads.page, 64, True)
