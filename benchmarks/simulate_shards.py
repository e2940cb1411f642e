"""What ways of splitting a job compute, counted over a made-up job of many kinds of prompts.

python -m benchmarks.simulate_shards --prompts 100000 --shards 2 4 8 100
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from itertools import islice
from zlib import crc32

import numpy as np

from pagedkv.arrays import Ints
from pagedkv.planner.shards import shards_of, shared_before

NEW = 128  # tokens that each prompt may get


def kinds(rng: np.random.Generator) -> Iterator[list[bytes]]:
    """Packed prompts without an end, those together that were made together.

    Two in five are questions behind a system prompt, one in five is behind one of 50 few-shot
    templates, one in five a turn of a chat with a system prompt, one in five asks about a document.
    There are 1,000 system prompts, whose popularity falls as 1 / rank.
    """

    def text(low: int, high: int) -> bytes:
        return rng.integers(0, 49_000, rng.integers(low, high)).astype(">u4").tobytes()

    systems = [text(50, 1000) for _ in range(1000)]
    templates = [text(500, 2000) for _ in range(50)]
    popular = np.cumsum(1 / np.arange(1, len(systems) + 1))
    while True:
        for _ in range(10):
            before = systems[np.searchsorted(popular, rng.random() * popular[-1])]
            yield [before + text(20, 200)]
        for _ in range(5):
            yield [templates[rng.integers(50)] + text(30, 100)]
        chat = [systems[np.searchsorted(popular, rng.random() * popular[-1])] + text(20, 200)]
        for _ in range(rng.integers(0, 9)):
            chat.append(chat[-1] + text(50, 400))
        yield chat
        document = text(1000, 4000)
        yield [document + text(10, 60) for _ in range(rng.integers(1, 10))]


def make(count: int) -> list[bytes]:
    """A job in a mixed order."""
    rng = np.random.default_rng(0)
    prompts = list(islice((each for some in kinds(rng) for each in some), count))
    return [prompts[i] for i in rng.permutation(count)]


def ways(prompts: list[bytes], n: int) -> Iterator[tuple[str, Ints]]:
    """The number of its shard for each prompt, by every way of splitting."""
    rows = np.arange(len(prompts))
    yield "rows `i::n`", rows % n
    yield "blocks of rows", rows * n // len(prompts)
    for first in (32, 256):
        hashed = [crc32(prompt[: 4 * first]) % n for prompt in prompts]
        yield f"hash of {first} tokens", np.array(hashed)
    blocks = np.array(sorted(rows, key=prompts.__getitem__))
    by_rows = np.empty_like(rows)
    by_rows[blocks] = rows * n // len(prompts)
    yield "sorted, blocks of rows", by_rows
    by_work = np.empty_like(rows)
    for shard, members in enumerate(shards_of(prompts, n, NEW)):
        by_work[members] = shard
    yield "`--shard`", by_work


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--prompts", type=int, default=100_000)
    parser.add_argument("--shards", type=int, nargs="+", default=[2, 4, 8, 100])
    options = parser.parse_args()
    prompts = make(options.prompts)
    order = np.array(sorted(range(len(prompts)), key=prompts.__getitem__))
    lengths = np.array([len(prompt) // 4 for prompt in prompts])
    alone = int((lengths[order] - shared_before([prompts[i] for i in order])).sum())
    print(f"{len(prompts):,} prompts of {lengths.mean():,.0f} tokens; {alone:,} computed by one")
    print("| shards | way | computed | largest / mean | slowest |\n|---|---|---|---|---|")
    for n in options.shards:
        for name, shard in ways(prompts, n):
            by_shard = order[np.argsort(shard[order], kind="stable")]
            of = shard[by_shard]
            shared = shared_before([prompts[i] for i in by_shard])
            shared[1:][of[1:] != of[:-1]] = 0
            computed = np.bincount(of, lengths[by_shard] - shared, n)
            work = computed + NEW * np.bincount(of, minlength=n)
            total, ideal = computed.sum() / alone, (alone + NEW * len(prompts)) / n
            balance, longest = work.max() / work.mean(), work.max() / ideal
            print(f"| {n} | {name} | {total:.2f} | {balance:.2f} | {longest:.2f} |", flush=True)


if __name__ == "__main__":
    main()
