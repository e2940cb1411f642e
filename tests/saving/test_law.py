"""A sequence that is loaded equals the one computed, after any work, whichever way it went.

To a file, to the host and to a prefix store; into a cache that is new and one that was used. All
that a sequence shows is compared, then both go on with the same tokens, and attention has the same
bits. What this alone finds: a format, a window, a choice of pages or a state that is whole when it
is looked at, and wrong for what comes next.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from pagedkv import PagedKVCache, paged_attention
from tests.cases import CASES, Case, in_few_bits, one_group, two_groups
from tests.contents import kv_of, write_step
from tests.effort import examples, few
from tests.retention.cases import CASES as EVICTING
from tests.states import CASES as STATEFUL
from tests.states import write_states
from tests.walk import walk
from tests.world import World

WIDE = {"head_dim": 8, "max_tokens": 96, "page_size": 2, "read_tokens": 8}
INT4 = {"max_tokens": 320, "read_tokens": 64, "max_sequences": 4}
CHOOSING = [
    Case("chooses-P2", one_group(**WIDE), True),
    Case("chooses-two-P2", two_groups(6, **WIDE), True),
    Case("chooses-int4", in_few_bits("int4", **INT4), True),
    Case("chooses-fp8", in_few_bits("fp8", **INT4), True),
]
EVERY = [*CASES, *STATEFUL, *EVICTING, *CHOOSING]
FAST = [*CASES[2::10], *STATEFUL[2::4], *EVICTING[::8], *CHOOSING]
NEXT = 1, 2, 0, 1, 2


def new(case: Case, **options) -> PagedKVCache:
    return PagedKVCache(case.config, device="cpu", debug=True, **options)


def used(case: Case, seed: int) -> PagedKVCache:
    """A cache in which others have worked and left what can be found."""
    world = walk(case, f"used {seed}", 40, everything=1000)
    world.free(range(64))
    return world.cache


def assert_bits(ours, theirs) -> None:
    for x, y in zip(ours, theirs, strict=True):
        assert torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8))


def assert_same(cache: PagedKVCache, seq: int, other: PagedKVCache, copy: int) -> None:
    """All that two sequences show; behind a revocable step the first may keep more than it sees."""
    assert other.length(copy) == cache.length(seq)
    assert other.uncached(copy).tolist() == cache.uncached(seq).tolist()
    for layer in range(cache.config.num_layers):
        theirs, ours = other.positions(copy, layer).tolist(), cache.positions(seq, layer).tolist()
        window = cache.config.windows[layer]
        more = 0 if window is None else max(0, len(ours) - len(theirs))
        assert theirs == ours[more:]
        assert not more or len(theirs) >= min(window, cache.length(seq))
        assert_bits((x[more:] for x in cache.gather(seq, layer)), other.gather(copy, layer))
    for layer in range(len(cache.config.states)):
        assert_bits(cache.read_state(seq, layer), other.read_state(copy, layer))
    other.check()


def gone_on(
    cache: PagedKVCache, seq: int, text: list[int], salt: bytes = b""
) -> list[torch.Tensor]:
    """Returns the attention of a sequence in steps of several tokens and of one, which it keeps."""
    found, config, text = [], cache.config, [*text]
    counts = (1,) if config.policy is not None else (min(config.page_size + 1, len(NEXT)), 1, 1)
    for count in counts:
        if cache.length(seq) + count > config.max_sequence_length:
            break
        ids = [*cache.uncached(seq).tolist(), *NEXT][:count]
        text += ids
        drawn = torch.Generator().manual_seed(len(text))
        with cache.step([seq], [ids]) as step:
            for layer in range(config.num_layers):
                k, v = (x[-count:] for x in kv_of(text, layer, config, salt))
                if config.shapes[config.group_of[layer]].v_is_k:
                    v = k[..., : v.shape[2]]
                q = torch.randn(count, 2 * k.shape[1], k.shape[2], generator=drawn).to(k.dtype)
                found.append(paged_attention(q, k, v, step, layer))
            if config.states:
                write_states(step, [text], [salt])
    return found


def chosen(case: Case, seed: int) -> tuple[World, int]:
    """A world and a sequence, the only one that is left, so that there is room for it to go on."""
    for more in range(20):
        world = walk(case, f"law {seed} {more}", 60, everything=1000)
        here = [s for s in sorted(world.texts) if s not in world.away and world.texts[s].tokens]
        if here:
            seq = here[seed % len(here)]
            world.cache.free([s for s in world.texts if s != seq])
            return world, seq
    raise AssertionError("no walk leaves a text")


@pytest.mark.sampled
@pytest.mark.parametrize("case", few(EVERY, *FAST), ids=lambda case: case.name)
def test_a_sequence_from_a_file_or_from_the_host_is_the_one_that_was_computed(case, tmp_path):
    done = 0
    for seed in range(examples(12, taste=1)):
        world, seq = chosen(case, seed)
        text, salt = world.texts[seq].tokens, world.texts[seq].salt
        path = tmp_path / f"{seed}"
        world.cache.save(seq, path)
        roomy = replace(case.config, host_tokens=4 * case.config.max_tokens)
        others = [new(case), used(case, seed), new(replace(case, config=roomy))]
        copies = [other.load(path, salt=salt) for other in others]
        others[2].offload(copies[2])
        others[2].clear_prefixes()
        others[2].restore(copies[2])
        for other, copy in zip(others, copies, strict=True):
            assert_same(world.cache, seq, other, copy)
        if case.config.policy is not None and world.cache.stats().live > 0.8 * len(
            world.cache._tables.pool.refcount
        ):
            continue  # the next step may have to evict, where the others need not
        expected = gone_on(world.cache, seq, text, salt)
        for other, copy in zip(others, copies, strict=True):
            found = gone_on(other, copy, text, salt)
            torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
            if case.config.policy is None:
                assert_same(world.cache, seq, other, copy)
        done += 1
    assert done or "pressed" in case.name


STORED = [case for case in [*CASES, *CHOOSING] if case.config.max_tokens >= 36]
OFTEN = "full-P4-bf16", "window-P4", "shapes-P4", "latent-P4", "int4-P16"
FAST_STORED = [case for case in STORED if case.name in OFTEN] + STORED[::7]


@pytest.mark.sampled
@pytest.mark.parametrize("case", few(STORED, *FAST_STORED), ids=lambda case: case.name)
def test_a_prefix_from_a_store_is_the_one_that_was_computed(case, tmp_path, monkeypatch):
    monkeypatch.setattr("pagedkv.saving.pieces.TOKENS", case.config.page_size)
    case = replace(case, config=replace(case.config, fingerprint=b"law"))
    for seed in range(examples(12, taste=1)):
        source, folder = random.Random(seed), tmp_path / f"{seed}"
        most = min(case.config.max_tokens // 3, case.config.max_step_tokens)
        text = [source.randrange(3) for _ in range(most)]
        first, second = new(case, prefix_store=folder), new(case, prefix_store=folder)
        seqs = []
        for cache in (first, second):
            seqs.append(seq := cache.add(text))
            with cache.step([seq]) as step:
                write_step(cache, step, [text])
        assert second.stats().tokens_from_store
        for layer in range(case.config.num_layers):
            ours, theirs = (c.gather(s, layer) for c, s in zip((first, second), seqs))
            kept = min(len(ours[0]), len(theirs[0]))
            assert_bits((x[len(x) - kept :] for x in ours), (x[len(x) - kept :] for x in theirs))
        expected, found = (gone_on(c, s, text) for c, s in zip((first, second), seqs))
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
        second.check()
