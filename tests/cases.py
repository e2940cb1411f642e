"""Small configurations, and random operations on a cache of any of them."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from pagedkv import CacheConfig, LayerGroup
from tests.effort import slow

# ------------------------------------------------------------------ configurations


def one_group(**fields: Any) -> CacheConfig:
    base = {"num_layers": 2, "num_kv_heads": 2, "head_dim": 4, "dtype": "float32"}
    return CacheConfig(**{**base, "max_tokens": 64, "page_size": 4, "max_sequences": 8, **fields})


def window_only(window: int = 6, **fields: Any) -> CacheConfig:
    return one_group(groups=(LayerGroup((0, 1), window),), **fields)


def two_groups(window: int = 6, **fields: Any) -> CacheConfig:
    """Layers 0 and 2 see everything, layer 1 a window."""
    return one_group(num_layers=3, groups=(LayerGroup((0, 2)), LayerGroup((1,), window)), **fields)


def two_shapes(**fields: Any) -> CacheConfig:
    """Layers 0 and 2 see all and have a V narrower than K, layer 1 has a window and more heads."""
    wide, narrow = LayerGroup((0, 2), v_head_dim=3), LayerGroup((1,), 5, 3, 2)
    return one_group(num_layers=3, groups=(wide, narrow), **fields)


def latent(**fields: Any) -> CacheConfig:
    """Layers whose V is the first part of K."""
    group = LayerGroup((0, 1), num_kv_heads=1, head_dim=6, v_head_dim=4, v_is_k=True)
    return one_group(groups=(group,), **fields)


def in_few_bits(kv_format: str | tuple[str, str], **fields: Any) -> CacheConfig:
    return one_group(**{"head_dim": 32, "page_size": 16, **fields, "kv_format": kv_format})


@dataclass(frozen=True)
class Case:
    name: str
    config: CacheConfig
    debug: bool


CASES = [
    Case("full-P1", one_group(page_size=1, max_tokens=24, max_sequences=6), True),
    Case("full-P3", one_group(page_size=3, max_tokens=30, max_sequences=6), True),
    Case("full-P4", one_group(page_size=4, max_tokens=40, max_sequences=6, rollback=4), False),
    Case("full-P4-bf16", one_group(max_tokens=64, max_step_tokens=20, dtype="bfloat16"), True),
    Case("full-P16", one_group(page_size=16, max_tokens=112, max_sequences=6), False),
    Case("window-P1", window_only(3, page_size=1, max_tokens=24, rollback=4), True),
    Case("window-P3", window_only(5, page_size=3, max_tokens=36, rollback=4), False),
    Case("window-P4", window_only(6, page_size=4, max_tokens=48), True),
    # The pool of this one is sized by windows: it cannot run out.
    Case(
        "window-P4-roomy",
        window_only(6, max_tokens=160, max_sequences=3, max_step_tokens=16, rollback=4),
        True,
    ),
    Case("two-P3-W1", two_groups(1, page_size=3, max_tokens=36), True),
    Case("two-P4", two_groups(6, page_size=4, max_tokens=40), False),
    Case("two-P4-rollback", two_groups(5, page_size=4, max_tokens=40, rollback=4), True),
    Case(
        "two-P4-roomy-window",
        two_groups(4, max_tokens=96, max_sequences=4, max_step_tokens=12),
        True,
    ),
    Case("grow-P1", one_group(page_size=1, max_tokens=24, growth_step=3, max_sequences=6), True),
    # Pages of the size that the system's pages mostly have.
    Case("grow-P4", one_group(max_tokens=64, growth_step=8, head_dim=128, rollback=4), True),
    Case("grow-two-P4", two_groups(5, max_tokens=40, growth_step=6, rollback=4), True),
    Case(
        "grow-two-P4-roomy-window",
        two_groups(4, max_tokens=96, growth_step=16, max_sequences=4, max_step_tokens=12),
        False,
    ),
    Case(
        "grow-int4-P16", in_few_bits("int4", max_tokens=128, growth_step=20, max_sequences=5), True
    ),
    Case("host-P3", one_group(page_size=3, max_tokens=30, host_tokens=15, max_sequences=6), True),
    Case("host-two-P4", two_groups(5, max_tokens=40, host_tokens=24, rollback=4), True),
    Case("two-P16", two_groups(20, page_size=16, max_tokens=112, rollback=4), False),
    Case("shapes-P4", two_shapes(max_tokens=40, rollback=4), True),
    Case("shapes-grow-P4", two_shapes(max_tokens=40, growth_step=6), True),
    Case("shapes-host-P4", two_shapes(max_tokens=40, host_tokens=24, rollback=4), True),
    Case("latent-P4", latent(max_tokens=40, max_sequences=6), True),
    Case("grow-host-latent-P3", latent(page_size=3, growth_step=6, host_tokens=15), True),
    Case("int8-P4", one_group(head_dim=16, max_tokens=64, kv_format="int8"), True),
    Case("fp8-P3-bf16", in_few_bits("fp8", page_size=3, max_tokens=36, dtype="bfloat16"), True),
    Case("int4-P16", in_few_bits("int4", max_tokens=80, max_sequences=5), True),
    Case("int8-int4-P16", in_few_bits(("int8", "int4"), max_tokens=128, rollback=4), False),
    Case(
        "two-int4-P16",
        two_groups(
            20, head_dim=32, page_size=16, max_tokens=112, max_sequences=6, kv_format="int4"
        ),
        True,
    ),
]

# Among them page sizes, windows, growth, a host tier and coded pages occur once or more.
VARIED = {
    "full-P3", "window-P4", "two-P4-rollback", "grow-two-P4", "host-two-P4", "int4-P16",
    "shapes-P4", "grow-host-latent-P3",
}  # fmt: skip


def varied(cases: Iterable[Case]) -> list[Any]:
    """All cases, of which the fast tests run a few: for what takes long walks to happen."""
    return [case if case.name in VARIED else slow(case)[0] for case in cases]


# How far an element of `kv_of`, at most 8 in size, may be from what is stored. 4-bit pages that
# were cut and written on are coded again, and drift by half a step each time.
SLACK = {"dense": 0.0, "int8": 0.04, "fp8": 0.5, "int4": 2.2}


def pages_for(tokens: int, config: CacheConfig) -> int:
    return -(-tokens // config.page_size)


def pages_of(config: CacheConfig, group: int) -> int:
    """Pages of a group, staging pages included."""
    return config.num_pages(group) + config.num_staging_pages(group)


def can_run_out(config: CacheConfig, group: int) -> bool:
    """Whether the design lets a group run out: a pool sized by its windows never does."""
    window = config.groups[group].window
    if window is None:
        return True
    held = pages_for(window + config.rollback, config) + 2
    roomy = config.max_sequences * held + pages_for(config.max_step_tokens, config)
    return roomy > pages_for(config.max_tokens, config)


# ------------------------------------------------------------------ random operations


MODES = ("tokens", "tokens", "uncached", "count", "count_ids")
HOWS = ("",) * 12 + ("revocable", "revocable", "some layers", "refused", "attend")
ENDINGS = (
    "commit", "commit", "with", "with", "with_commit", "abort", "with_abort", "with_raise",
)  # fmt: skip


def random_op(source: random.Random, config: CacheConfig, inside: bool = False) -> tuple[Any, ...]:
    """One operation, its weights such that pools are often, not always, full."""
    P = config.page_size

    def tokens(least: int, most: int) -> list[int]:
        return [source.randrange(3) for _ in range(source.randint(least, most))]

    kinds = {"add": 16, "fork": 8, "truncate": 9, "free": 13, "clear": 1, "step": 53}
    if config.growth_step is not None:
        kinds["shrink"] = 5
    if config.host_tokens:
        kinds |= {"add": 30, "fork": 12, "free": 9, "offload": 8, "restore": 10}
    if config.states:  # found where they were kept alone, so texts come and go more often
        kinds |= {"add": 24, "free": 16, "checkpoint": 20}
    kind = source.choices(list(kinds), list(kinds.values()))[0]
    if kind in ("offload", "restore"):
        return kind, [source.randrange(64) for _ in range(source.choice((1, 1, 2, 4)))]
    if kind == "add":
        prompt = (source.randrange(64), source.randrange(6 * P), tokens(0, 3))
        return (
            "add",
            None if source.random() < 0.08 else prompt,
            int(source.random() < 0.2),
            source.randrange(3 * P) if source.random() < 0.25 else None,
        )
    if kind == "fork":
        return "fork", source.randrange(64), source.choice((1, 1, 1, 2, 3))
    if kind == "checkpoint":
        return kind, source.randrange(64)
    if kind == "truncate":
        return "truncate", source.randrange(64), source.choice((-1, 0, 1, 1, 2, P, 2 * P + 1))
    if kind == "free":
        return "free", [source.randrange(64) for _ in range(source.choice((1, 1, 1, 2, 4)))]
    if kind in ("clear", "shrink"):
        return (kind,)
    entries = [
        (source.randrange(64), tokens(1, source.choice((1, 1, 2, P + 2))), source.randrange(64))
        for _ in range(source.choice((1, 2, 3, 6)))
    ]
    during = None
    if not inside and source.random() < 0.1:
        during = random_op(source, config, inside=True)
    return (
        "step",
        entries,
        source.choice(MODES),
        source.randrange(30),
        source.choice(ENDINGS),
        during,
        source.choice(HOWS),
    )


def long_step(source: random.Random, config: CacheConfig) -> tuple[Any, ...]:
    """An operation by which texts grow out of their budget."""
    tokens = [source.randrange(3) for _ in range(config.page_size + 2)]
    return "step", [(source.randrange(64), tokens, 0)], "tokens", 0, "commit"
