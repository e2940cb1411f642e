"""The names of formats for K and V: one for both, or a pair."""

from __future__ import annotations

from typing import Any

from pagedkv.kernels.formats import KV_FORMATS, Format
from pagedkv.names import FORMATS, meant


def format_pair(kv_format: Any) -> tuple[str, str]:
    """Returns the names of the formats of K and V, from one name for both or a pair."""
    pair = (kv_format, kv_format) if isinstance(kv_format, str) else kv_format
    known = isinstance(pair, (tuple, list)) and all(name in [*KV_FORMATS] for name in pair)
    if not known or len(pair) != 2:
        given = pair if isinstance(pair, (tuple, list)) else [kv_format]
        wrong = next((name for name in given if name not in [*KV_FORMATS]), "")
        raise ValueError(
            f"kv_format: expected one of {', '.join(KV_FORMATS)}, or a pair of them for K and V, "
            f"got {kv_format!r}{meant(wrong, KV_FORMATS, FORMATS)}"
        )
    return pair[0], pair[1]


def formats_of(kv_format: Any) -> tuple[Format, Format]:
    """Returns the formats of K and V, from one name for both or a pair."""
    k, v = format_pair(kv_format)
    return KV_FORMATS[k][0], KV_FORMATS[v][1]


def needs_staging(kv_format: Any) -> bool:
    """Whether incomplete pages are staging pages, see `CacheConfig.staged`."""
    return any(format.staged for format in formats_of(kv_format))
