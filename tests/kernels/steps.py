"""Steps for the Triton kernels out of poisoned pools, dense or coded, on any device.

A slot that no query sees is NaN, whether it was written or not; pages 0, which masked lanes fall
back to, and 1 are nobody's. Tables begin with -1 where a window has passed and go on beyond a row's
end. In the interpreter an id from there is in no pool and the longest row ends the table, so that
reading too much is an IndexError; on a card it is a page of NaN, as is the one in front of the
pool, because a fault would lose the device.

On the device "meta" all of this works without memory, as far as calling kernels goes: so
`benchmarks/gpu/precompile.py` learns what will be compiled. Nothing here needs pytest.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from pagedkv.kernels import reference
from pagedkv.kernels.formats import FORMATS, KV_FORMATS, Pages
from pagedkv.kernels.torch.codes import encode

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NOWHERE = 10**6  # a page that no pool has
POISON = 1  # one that nobody owns
LAYOUTS = ("heads outermost", "slots outermost", "K and V side by side")
Rows = Sequence[tuple[int, int]]  # new tokens of each row, and its length with them

EACH = [(k.name, v.name) for k, v in KV_FORMATS.values() if not k.dense]
K_FORMATS, V_FORMATS = zip(*EACH)
MIXTURES = [
    *(("dense", v) for v in V_FORMATS),
    *((k, "dense") for k in K_FORMATS),
    *((k, v) for k in K_FORMATS for v in V_FORMATS if (k, v) not in EACH),
]


@dataclass(frozen=True)
class Step:
    """The arguments of `paged_attention`, and what the host knows.

    Attributes:
        ids: the table, on the host.
        slots: of the new tokens; -1 where a row is shorter than what is new.
        options: the terms of the scores, by their names in `Scoring`.
        causal: if not, no term is by distance.
    """

    rows: Rows
    q: Tensor
    k_pages: Tensor | Pages
    v_pages: Tensor | Pages
    table: Tensor
    ids: Tensor
    kv_lens: Tensor
    starts: Tensor
    slots: Tensor
    options: dict[str, Any]
    causal: bool = True

    @property
    def num_new(self) -> list[int]:
        return [new for new, _ in self.rows]

    @property
    def max_kv(self) -> int:
        return max((length for _, length in self.rows), default=0)

    @property
    def page(self) -> int:
        """Tokens of a page."""
        return Pages.of(self.k_pages).data.shape[2]

    @property
    def tokens(self) -> list[slice]:
        """New tokens of each row, among those of the step."""
        ends = torch.tensor([0, *self.num_new]).cumsum(0).tolist()
        return [slice(*pair) for pair in itertools.pairwise(ends)]

    def row(self, index: int) -> Step:
        """One row by itself, on the same pool."""
        one, mine = slice(index, index + 1), self.tokens[index]
        new = self.num_new[index]
        return replace(
            self,
            rows=self.rows[one],
            q=self.q[mine].clone(),
            table=self.table[one].clone(),
            ids=self.ids[one],
            kv_lens=self.kv_lens[one].clone(),
            starts=torch.tensor([0, new], dtype=torch.int32).to(self.q.device),
            slots=self.slots[mine].clone(),
            options=self.options_of(mine),
        )

    def options_of(self, tokens: slice) -> dict[str, Any]:
        """The terms of the scores of some queries."""
        by_query = {name: self.options[name] for name in ("distance_bias", "tree")}
        cut = {name: None if x is None else x[tokens].clone() for name, x in by_query.items()}
        return self.options | cut

    @property
    def tree(self) -> Tensor | None:
        """`[T]`, its bits of each query."""
        return self.options["tree"]

    def seen(self, row: int) -> range:
        """Tokens of a row that one of its queries sees, if it has any."""
        new, length = self.rows[row]
        window = self.options["window"]
        return range(0 if window is None else max(0, length - new - window + 1), length)

    def contents(self, row: int, pages: Tensor | Pages, dtype: torch.dtype) -> Tensor:
        """K or V of the tokens that are seen of a row, `[n, G, D]`."""
        seen = self.seen(row)
        first = seen.start // self.page
        ids = self.table[row, first : -(-seen.stop // self.page)]
        begin = first * self.page
        return reference.gather_pages(pages, ids, seen.start - begin, seen.stop - begin, dtype)


def pages_of(
    layout: str,
    shape: tuple[int, int, int, int],
    dtype: torch.dtype,
    device: str = DEVICE,
    v_dim: int | None = None,
) -> Sequence[Tensor]:
    """Poisoned K and V pages `[N, G, P, D]`; except in the interpreter, behind one more page.

    Args:
        v_dim: of V, if it is narrower than K.
    """
    count, heads, size, dim = shape
    front = int(device != "cpu")
    if v_dim is not None:
        assert layout != "K and V side by side"
        return [pages_of(layout, (*shape[:3], one), dtype, device)[0] for one in (dim, v_dim)]
    options = {"dtype": dtype, "device": device}
    if layout == "K and V side by side":
        shape = (count + front, 2, heads, size, dim)
        return torch.full(shape, math.nan, **options)[front:].unbind(1)
    swapped = layout == "slots outermost"
    inner = (size, heads, dim) if swapped else (heads, size, dim)
    pages = [torch.full((count + front, *inner), math.nan, **options)[front:] for _ in "kv"]
    return [x.transpose(1, 2) for x in pages] if swapped else pages


@contextmanager
def one_thread() -> Iterator[None]:
    """Small sums, which other threads would make many times slower."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@one_thread()
def step_of(
    rows: Rows,
    *,
    heads: int = 4,
    groups: int = 2,
    dim: int = 16,
    v_dim: int | None = None,
    latent: bool = False,
    page: int = 16,
    dtype: torch.dtype = torch.float32,
    layout: str = LAYOUTS[0],
    shared: int = 0,
    pages: int | None = None,
    columns: int | None = None,
    seed: int = 0,
    order: int = 0,
    scale: float | None = None,
    window: int | None = None,
    softcap: float | None = None,
    sinks: bool = False,
    alibi: bool = False,
    distances: int = 0,
    by_query: bool = True,
    tree: bool = False,
    device: str = DEVICE,
) -> Step:
    """A step on shuffled pages.

    Args:
        v_dim: columns of V; default, as many as K has.
        latent: V is K's first columns.
        shared: how many leading pages all rows have in common.
        pages: of the pool; those in use are its last ones.
        columns: of the table.
        tree: new tokens see but their ancestors among them, any tree's.
        order: which pages rows get; what is in them does not depend on it.
        alibi: whether there are slopes.
        distances: how far a bias by distance reaches, which differs by query, or by head alone.
    """
    shuffle = torch.Generator().manual_seed(order)
    where = "cpu" if device == "meta" else device
    random = torch.Generator(where).manual_seed(seed)

    def drawn(*shape: int) -> Tensor:
        # In float32 on the device itself, so that a narrower type has the same numbers, rounded.
        return torch.randn(shape, generator=random, device=where).to(device)

    counts = [-(-length // page) for _, length in rows]
    used = shared + sum(max(0, count - shared) for count in counts)
    pages = used + POISON + 2 if pages is None else pages
    left = iter((pages - used + torch.randperm(used, generator=shuffle)).tolist())
    common = [next(left) for _ in range(shared)]
    interpreted = device == "cpu"
    if columns is None:
        columns = max(counts, default=0) + (0 if interpreted else 2)
    beyond = NOWHERE if interpreted else POISON
    table = torch.full((len(rows), columns), beyond, dtype=torch.int32)
    k_pages, v_pages = pages_of(layout, (pages, groups, page, dim), dtype, device, v_dim)
    if latent:
        v_pages = k_pages[..., :v_dim]
    slots = [torch.empty(0, dtype=torch.int64)]
    for row, ((new, length), count) in enumerate(zip(rows, counts, strict=True)):
        mine = torch.tensor((common + [next(left) for _ in range(count - shared)])[:count])
        mine = mine.long()
        table[row, :count] = mine
        first = 0 if window is None else max(0, length - new - window + 1)
        table[row, : first // page] = -1  # pages that a window has left are dropped
        token = torch.arange(first, length)
        at = mine[token // page].to(device), slice(None), (token % page).to(device)
        for content in (k_pages,) if latent else (k_pages, v_pages):
            content[at] = drawn(len(token), groups, content.shape[3]).to(dtype)
        token = torch.arange(length - new, length)
        known = token.clamp(min=0)
        places = mine[known // page] * page + known % page if count else known
        slots.append(places.where(token >= 0, -1))
    starts = torch.tensor([0, *(new for new, _ in rows)]).cumsum(0).int()
    q, each = drawn(int(starts[-1]), heads, dim).to(dtype), drawn(heads)
    scale = dim**-0.5 if scale is None else scale
    options = {"scale": scale, "window": window, "softcap": softcap}
    options["sinks"] = each if sinks else None
    options["alibi_slopes"] = 0.1 * drawn(heads).abs() if alibi else None
    bias = drawn(len(q) if by_query else 1, heads, distances) if distances else None
    options["distance_bias"] = None if bias is None else bias.expand(len(q), -1, -1)
    options["tree"] = _tree_of(rows, shuffle).to(device) if tree else None
    return Step(
        rows,
        q,
        k_pages,
        v_pages,
        table.to(device),
        table,
        torch.tensor([length for _, length in rows], dtype=torch.int32).to(device),
        starts.to(device),
        torch.cat(slots).to(device),
        options,
    )


def _tree_of(rows: Rows, random: torch.Generator) -> Tensor:
    """The bits of trees of which every token but the first may follow any one before it."""
    bits: list[int] = []
    for new, _ in rows:
        above = [0]  # the ancestors of each token, by their places in the row
        for token in range(1, new):
            parent = int(torch.randint(token, (), generator=random))
            above.append(above[parent] | 1 << parent)
        for token, seen in enumerate(above[:new]):
            near = min(token, 62)
            own = sum((seen >> (token - d) & 1) << d for d in range(1, near + 1)) | 1
            bits.append(own | -1 << (near + 1))  # and all in front of the new tokens
    return torch.tensor(bits, dtype=torch.int64)


# ------------------------------------------------------------------ coded pages


def coded(step: Step, k_format: str, v_format: str, staging: bool | None = None) -> Step:
    """The step with its pages coded.

    What nobody wrote, or sees, is as bad as the format can make it: words are any bits, scales are
    NaN. Where there are staging pages, a row has them wherever it may: its first page, and those
    that it got tokens for in the step, but for some that the step filled.

    Args:
        staging: whether there are staging pages; default, if half of it is int4.
    """
    if staging is None:
        staging = FORMATS[k_format].staged or FORMATS[v_format].staged
    assert isinstance(step.k_pages, Tensor)
    assert isinstance(step.v_pages, Tensor)
    count, size, ids = len(step.k_pages), step.page, step.ids.clone()
    staged: list[int] = []
    for row, (new, length) in enumerate(step.rows if staging else ()):
        written = max(0, length - new) // size
        for column in range(-(-length // size)):
            page = int(ids[row, column])
            filled = (column + 1) * size <= length
            # Every other page that the step filled was coded as it was written.
            direct = column * size >= length - new and filled and column % 2
            if page >= 0 and (column == 0 or (column >= written and not direct)):
                if page not in staged:
                    staged.append(page)
                ids[row, column] = count + 1 + staged.index(page)
    halves = ((step.k_pages, k_format), (step.v_pages, v_format))
    k, v = (_coded(x, format, staged if staging else None) for x, format in halves)
    return replace(step, k_pages=k, v_pages=v, ids=ids, table=ids.to(step.q.device))


def _coded(dense: Tensor, format: str, staged: list[int] | None) -> Pages:
    """Pages in a format; those that are staged become staging pages, from the second one on."""
    random, device = torch.Generator().manual_seed(7), dense.device
    staging = None
    if staged is not None:
        staging = torch.full_like(dense[:1], math.nan).repeat(len(staged) + 3, 1, 1, 1)
        staging[1 : 1 + len(staged)] = dense[staged]
        dense = dense.clone()
        dense[staged] = math.nan
    if format == "dense":
        return Pages(FORMATS[format], dense, None, staging)
    x = dense.float()
    seen = ~x.isnan().any(-1)  # [N, G, P]
    if FORMATS[format].scales == "channel":
        # A page is coded whole: what no query sees of it was seen once.
        whole = seen.any(-1)[..., None]
        x = torch.where(seen[..., None], x, torch.randn(x.shape, generator=random).to(device))
        seen = whole.expand_as(seen)
    x = x.nan_to_num(0)
    if FORMATS[format].static:
        scales = (2.0 ** (torch.arange(x.shape[1]) % 3 - 6)).to(device)
        words, _ = encode(x, FORMATS[format], scales[:, None, None])
    else:
        words, scales = encode(x, FORMATS[format])
        shown = seen[:, :, 0] if FORMATS[format].scales == "channel" else seen
        scales = scales.where(shown.view(*shown.shape, *[1] * (scales.ndim - shown.ndim)), math.nan)
    noise = torch.randint(-(2**15), 2**15, words.shape, generator=random, dtype=torch.int16)
    noise[..., ::3] = 0x7F7F  # of fp8 two that are NaN
    words = torch.where(seen[..., None], words, noise.to(device))
    return Pages(FORMATS[format], words, scales.contiguous(), staging)
