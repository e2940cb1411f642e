"""Draws what caches take while a text is generated (Linux).

    python -m benchmarks.memory_profile docs/growth.png

Each cache runs in a process of its own, which reads from /proc what it may write (VmData) and what
of it is resident. On a CPU memory comes with the first write; on a card all that may be written is
taken. K and V are those of four layers, 4000 tokens come one at a time. The concatenating cache is
`torch.cat` of K and of V in every layer for every token, as transformers' DynamicCache does it; it
is looked at after every concatenation, while the old tensor is still there, and after every token.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from pagedkv import CacheConfig, PagedKVCache, write_kv

LAYERS, HEADS, DIM = 4, 4, 64
TOKENS = 4000
EVERY = 10  # tokens between two looks
MIB = 1 << 20
WAYS = {
    "fixed": "fixed pool of 4000 tokens",
    "1024": "growth_step=1024",
    "256": "growth_step=256",
    "cat": "torch.cat for every token",
}


def memory() -> tuple[float, float]:
    """MiB that this process may write, and MiB of it that are resident."""
    lines = Path("/proc/self/status").read_text().splitlines()
    found = {line.split(":")[0]: line.split() for line in lines}
    return int(found["VmData"][1]) / 1024, int(found["VmRSS"][1]) / 1024


def pooled(growth_step: int | None) -> Iterator[list[tuple[float, float]]]:
    """What a pool takes at each token."""
    config = CacheConfig(
        LAYERS, HEADS, DIM, "float32", TOKENS, max_sequences=1, growth_step=growth_step
    )
    cache = PagedKVCache(config, device="cpu")
    seq, new = cache.add(), torch.ones(1, HEADS, DIM)
    for _ in range(TOKENS):
        with cache.step([seq], num_new=1) as step:
            for layer in range(LAYERS):
                write_kv(new, new, step, layer)
        yield [memory()]


def concatenated() -> Iterator[list[tuple[float, float]]]:
    """What tensors take that get one token longer each time."""
    kept = [torch.ones(1, HEADS, 0, DIM) for _ in range(2 * LAYERS)]
    new = torch.ones(1, HEADS, 1, DIM)
    for token in range(TOKENS):
        looks = []
        for i, old in enumerate(kept):
            kept[i] = torch.cat([old, new], dim=2)
            if token % EVERY == 0:
                looks.append(memory())
            del old
        looks.append(memory())
        yield looks


def measure(way: str) -> list[list[tuple[float, float]]]:
    """MiB beyond what the process had: at every EVERY-th token, one pair or several."""
    torch.set_num_threads(1)
    for _ in pooled(None) if way != "cat" else concatenated():  # all code is loaded
        break
    before = memory()
    steps = concatenated() if way == "cat" else pooled(None if way == "fixed" else int(way))
    return [
        [(data - before[0], resident - before[1]) for data, resident in looks]
        for token, looks in enumerate(steps)
        if token % EVERY == 0
    ]


def draw(found: dict[str, list[list[tuple[float, float]]]], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")  # no display is needed
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(11, 4), sharey=True, layout="constrained")
    for axis, title in enumerate(("writable (on a card: taken)", "resident, on a CPU")):
        for way, name in WAYS.items():
            tokens = [EVERY * i for i, looks in enumerate(found[way]) for _ in looks]
            mib = [pair[axis] for looks in found[way] for pair in looks]
            axes[axis].plot(tokens, mib, label=name, linewidth=1.2 if way != "cat" else 0.7)
        axes[axis].set(title=title, xlabel="tokens generated")
        axes[axis].grid(alpha=0.3)
    axes[0].set_ylabel("MiB")
    axes[0].legend()
    figure.savefig(path, dpi=110)


def main() -> None:
    if sys.argv[1] == "--measure":
        print(json.dumps(measure(sys.argv[2])))
        return
    found = {}
    for way in WAYS:
        command = [sys.executable, "-m", "benchmarks.memory_profile", "--measure", way]
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=env, check=True, capture_output=True, text=True)
        found[way] = json.loads(done.stdout)
        last = [look for looks in found[way][-10:] for look in looks]
        for axis, what in enumerate(("writable", "resident")):
            least, most = (f(look[axis] for look in last) for f in (min, max))
            print(f"{way:>6} {what}: {least:.1f} to {most:.1f} MiB over the last 100 tokens")
    draw(found, Path(sys.argv[1]))


if __name__ == "__main__":
    main()
