"""Device functions: pages out of a page table, tiles out of pages and into them.

Page ids become int64 before they are multiplied; otherwise addresses in a pool beyond 2^31 elements
would be wrong. No load leaves a page: ids of tokens out of range are replaced before they are used.
A tile has as many parts of the head dim as a word holds elements (`codes.py`).
"""

from __future__ import annotations

import triton
import triton.language as tl

# Columns that a part of a dense tile has at most; wider heads fall into several.
WIDEST: tl.constexpr = tl.constexpr(256)


@triton.jit
def page_ids(
    table_ptr,
    start,
    begin,
    end,
    PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):
    """Pages of the tile at `start`: one id where a page holds whole tiles, else one a token.

    Tokens outside the range get page 0, which can be read like any other.
    """
    if PAGE % BLOCK_N == 0:
        return tl.load(table_ptr + start // PAGE, mask=start < end, other=0)
    else:
        offs_n = tl.arange(0, BLOCK_N)
        mask = start + offs_n < end
        if HAS_WINDOW:
            mask = mask & (start + offs_n >= begin)
        if BLOCK_N % PAGE == 0:
            return tl.load(table_ptr + start // PAGE + offs_n // PAGE, mask=mask, other=0)
        else:
            return tl.load(table_ptr + (start + offs_n) // PAGE, mask=mask, other=0)


@triton.jit
def pages_of(ids, first_staging, STAGING: tl.constexpr):
    """Pages of the tensor that is read, -1 for a page that is not in it."""
    if STAGING == "skipped":
        return tl.where(ids < first_staging, ids, -1).to(tl.int64)
    elif STAGING == "read":
        return tl.maximum(ids - first_staging, -1).to(tl.int64)
    else:
        return ids.to(tl.int64)


@triton.jit
def place(
    pages,  # from `pages_of`
    start,
    begin,
    end,
    PAGE: tl.constexpr,
    STAGING: tl.constexpr,
    BLOCK_N: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):
    """Returns the pages and slots that a tile may read, and which of its tokens lie there."""
    offs_n = tl.arange(0, BLOCK_N)
    inside = start + offs_n < end
    if HAS_WINDOW:
        inside = inside & (start + offs_n >= begin)
    if STAGING != "absent":
        inside = inside & (pages >= 0)
        pages = tl.maximum(pages, 0)
    if PAGE % BLOCK_N == 0:
        in_page = start % PAGE + offs_n
    elif BLOCK_N % PAGE == 0:
        in_page = offs_n % PAGE
    else:
        in_page = (start + offs_n) % PAGE
    return pages, in_page, inside


@triton.jit
def next_staging(table_ptr, column, columns, first_staging):
    """Finds the first column, from this one on, that has a staging page; else `columns`."""
    found = columns
    while (column < columns) & (found == columns):
        offs = column + tl.arange(0, 128)
        ids = tl.load(table_ptr + offs, mask=offs < columns, other=-1)
        found = tl.min(tl.where(ids >= first_staging, offs, columns))
        column += 128
    return found


@triton.jit
def load_tile(
    ptr,
    offsets,  # [BLOCK_N]
    inside,  # [BLOCK_N], or None: tokens that are not are zeros
    PARTS: tl.constexpr,  # 1 if it is of words
    WIDTH: tl.constexpr,  # of a part
    BLOCK: tl.constexpr,  # the same, padded
    REST: tl.constexpr = 0,  # width of one more part behind them
):
    """A tile of words, or the parts of a tile of elements."""
    offs = tl.arange(0, BLOCK)
    real = (offs < WIDTH)[None, :]
    tiles = tl.tuple([])
    for part in tl.static_range(PARTS):
        at = ptr + (offsets[:, None] + (part * WIDTH + offs)[None, :])
        if BLOCK != WIDTH:
            mask = real if inside is None else inside[:, None] & real
            tiles += (tl.load(at, mask=mask, other=0),)
        elif inside is None:
            tiles += (tl.load(at),)
        else:
            tiles += (tl.load(at, mask=inside[:, None], other=0),)
    if REST:
        REST_BLOCK: tl.constexpr = triton.next_power_of_2(REST)
        tiles += load_tile(ptr + PARTS * WIDTH, offsets, inside, 1, REST, REST_BLOCK)
    return tiles


@triton.jit
def store_tile(ptr, offsets, inside, parts, WIDTH: tl.constexpr, REST: tl.constexpr = 0):
    """Stores parts where `load_tile` loads them from."""
    PARTS: tl.constexpr = len(parts) - (REST != 0)
    offs = tl.arange(0, parts[0].shape[1])
    mask = inside[:, None] & (offs < WIDTH)[None, :]
    for part in tl.static_range(PARTS):
        at = ptr + (offsets[:, None] + (part * WIDTH + offs)[None, :])
        tl.store(at, parts[part].to(ptr.dtype.element_ty), mask=mask)
    if REST:
        store_tile(ptr + PARTS * WIDTH, offsets, inside, (parts[PARTS],), REST)


@triton.jit
def zeros(ROWS: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """Sums to begin with."""
    parts = tl.tuple([])
    for _ in tl.static_range(PARTS):
        parts += (tl.zeros([ROWS, BLOCK], tl.float32),)
    return parts


@triton.jit
def times(parts, factor):
    """Multiplies each of the parts by a factor."""
    found = tl.tuple([])
    for part in tl.static_range(len(parts)):
        found += (parts[part] * factor,)
    return found


_FUNCTIONS = page_ids, pages_of, place, next_staging, load_tile, store_tile, zeros, times

# Triton hashes a kernel with the functions it calls, and the hash depends on whether these were
# hashed before. In a fixed order a kernel has one hash in every process, and caches on disk serve.
for _function in _FUNCTIONS:
    getattr(_function, "cache_key", None)  # the interpreter's functions have none


@triton.jit
def at_layer(ptr, layer, stride):
    """Where a layer of pages begins; strides of layers are in units of 16 bytes."""
    return ptr + layer.to(tl.int64) * stride * (128 // ptr.dtype.element_ty.primitive_bitwidth)
