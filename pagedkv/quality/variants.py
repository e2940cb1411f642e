"""Ways of keeping K and V that are compared."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from itertools import count, takewhile
from typing import Any

from pagedkv.batch.packed import PackedModel
from pagedkv.config import CacheConfig, auto_page_size, format_pair

FEWEST = 4  # pages that a query reads where a share of the text is asked for
LONGEST = 8192  # tokens of a row up to which two ways are compared


@dataclass(frozen=True)
class Variant:
    """One way of keeping K and V.

    Attributes:
        name: its row in tables.
        fields: fields of `CacheConfig`.
        runner: makes the object that reads the texts; takes the model and `cache`.
    """

    name: str
    fields: Mapping[str, Any] = field(default_factory=dict)
    runner: Callable[..., PackedModel] = PackedModel


FULL = Variant("full cache")


def variant(
    kv_format: str | tuple[str, str] = "dense",
    retention: str | None = None,
    budget: int | None = None,
    read: float | None = None,
    *,
    keep: float | None = None,
    length: int = 1024,
    page_size: int | None = None,
) -> Variant:
    """Makes a variant, whose name says what it changes.

    Args:
        kv_format: as in `CacheConfig`.
        retention, budget, keep: as in `CacheConfig`.
        read: how much a decoding query reads: a share of `length` if at most 1, else tokens. Shares
            are rounded to whole pages, at least four.
        length: tokens of the texts.
    """
    k, v = format_pair(kv_format)
    fields: dict[str, Any] = {} if page_size is None else {"page_size": page_size}
    size = page_size or auto_page_size("auto", kv_format, read is not None)
    name = []
    if (k, v) != ("dense", "dense"):
        fields["kv_format"] = (k, v)
        name.append(k if k == v else f"{k},{v}")
    if page_size is not None:
        name.append(f"pages of {page_size}")
    if retention is not None:
        fields["retention"] = retention
        amounts = {"budget": budget, "keep": keep}
        fields |= {field: amount for field, amount in amounts.items() if amount is not None}
        said = [_words(amount) for amount in (keep, budget) if amount is not None]
        name.append(f"{retention} {' and '.join(said)}".rstrip())
    if read is not None:
        fields["read_tokens"] = max(_tokens(read, length, size), FEWEST * size * (read < 1))
        name.append(f"read {_words(read)}")
    return Variant(", ".join(name) or "dense", fields)


def counted(config: CacheConfig) -> CacheConfig:
    """Returns the configuration whose bytes count: bfloat16 for float32, as caches are kept."""
    return replace(config, dtype="bfloat16") if config.dtype == "float32" else config


def bytes_held(config: CacheConfig, tokens: int) -> int:
    """Returns K and V bytes of the pages that one sequence of `tokens` holds at its end."""
    config, total = counted(config), 0
    for number, group in enumerate(config.groups):
        held = -(-tokens // config.page_size)
        if group.window is not None:
            held -= max(0, tokens - group.window) // config.page_size
        elif config.kept is not None:
            whole, begun = divmod(tokens, config.page_size)
            stays = int(config.kept.pages(whole))
            held = min(held, stays + (begun > 0))  # a page goes when the begun one is complete
        exact = min(held, 2) if config.staged else 0
        total += (held - exact) * config.bytes_per_page(number)
        total += exact * config.bytes_per_staging_page(number)
    return total


def pays_from(config: CacheConfig, other: CacheConfig) -> int | None:
    """Returns from how many tokens on a row takes fewer bytes than in another cache, or None.

    Fewer bits may take more bytes in a short row, because staging pages are not coded and pages may
    be larger.
    """
    config, other = counted(config), counted(other)
    size = min(config.page_size, other.page_size)
    # Lengths at which a page is complete or begins: bytes change only there.
    lengths = takewhile(
        lambda n: n <= LONGEST, (size * i + more for i in count() for more in (0, 1))
    )
    first = None
    for length in lengths:
        if bytes_held(config, length) >= bytes_held(other, length):
            first = None
        elif first is None:
            first = length
    return first


def _tokens(amount: float, length: int, size: int) -> int:
    return int(amount * length) // size * size if amount <= 1 else int(amount)


def _words(amount: float) -> str:
    return f"{amount:,}" if amount > 1 else f"{100 * amount:.3g} %"
