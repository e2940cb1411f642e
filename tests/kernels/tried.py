"""Cases that kernels have to pass on a card before they are turned on there.

Nothing here needs pytest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch

from pagedkv.kernels.triton import launch
from tests.kernels.correctness import (
    Case,
    agree,
    agree_across,
    alone,
    prefix,
    replay,
)
from tests.kernels.shapes import FULL, Shape
from tests.kernels.steps import LAYOUTS, Rows

LATENTS = partial(Shape, dim=576, v_dim=512, latent=True)
# Heads, pages and terms of kernels in Gluon; those of every other kind are in `shapes`.
HOPPER = {
    "gluon_prefill": [
        Shape(4, 2, 128, 16, torch.bfloat16),
        Shape(4, 2, 128, 64, torch.bfloat16, layout=LAYOUTS[1]),
        Shape(8, 1, 64, 16, torch.bfloat16, layout=LAYOUTS[2]),
        Shape(7, 1, 128, 48, torch.bfloat16),
        Shape(1, 2, 64, 256, torch.float16),
        Shape(3, 2, 128, 128, torch.float16, {"window": 100}),
        Shape(16, 1, 64, 32, torch.bfloat16, {"window": 1}),
        Shape(2, 2, 128, 16, torch.bfloat16, {"window": 700}),
    ],
    "gluon_rest": [
        Shape(8, 1, 64, 16, torch.bfloat16, {"window": 128, "sinks": True}),
        Shape(4, 2, 128, 16, torch.bfloat16, {"softcap": 20.0}),
        Shape(3, 2, 128, 64, torch.float16, {"window": 100, "softcap": 5.0, "sinks": True}),
        Shape(8, 1, 256, 16, torch.bfloat16),
        Shape(4, 2, 256, 64, torch.bfloat16, {"window": 700}, LAYOUTS[2]),
        Shape(2, 2, 256, 48, torch.float16, {"softcap": 30.0, "sinks": True}),
    ],
    "gluon_decode": [
        Shape(4, 2, 128, 16, torch.bfloat16),
        Shape(4, 8, 128, 16, torch.bfloat16, layout=LAYOUTS[1]),
        Shape(8, 1, 64, 16, torch.bfloat16, layout=LAYOUTS[2]),
        Shape(7, 2, 128, 48, torch.bfloat16),
        Shape(1, 4, 64, 64, torch.float16),
        Shape(16, 1, 128, 128, torch.float16, {"window": 100}),
        Shape(4, 2, 64, 32, torch.bfloat16, {"window": 1}),
    ],
    "gluon_decode_rest": [
        Shape(8, 1, 64, 16, torch.bfloat16, {"window": 128, "sinks": True}),
        Shape(3, 2, 128, 64, torch.bfloat16, {"window": 700, "softcap": 5.0, "sinks": True}),
        Shape(16, 1, 256, 16, torch.bfloat16),
        Shape(4, 2, 256, 48, torch.float16, {"softcap": 30.0, "sinks": True}),
    ],
    "gluon_latents": [
        LATENTS(128, 1, page=64, dtype=torch.bfloat16),
        LATENTS(64, 1, page=16, dtype=torch.bfloat16, layout=LAYOUTS[1]),
        LATENTS(67, 1, page=48, dtype=torch.bfloat16),
        LATENTS(40, 2, page=128, dtype=torch.float16, layout=LAYOUTS[1], terms={"window": 100}),
    ],
}
LONG: Rows = [(2048, 2048), (700, 9000), (17, 5000), (1000, 1001)]
# Splits that grow, many splits, several queries of long rows, and more items than programs.
LONG_DECODE: dict[str, Rows] = {
    "long": [(1, 20000), (1, 1), (1, 4097), (1, 70000), *[(1, 2000 + 37 * n) for n in range(40)]],
    "long verify": [(8, 5000), (1, 9000), (16, 3000), (2, 2)],
}
MIX: Rows = [(2, 70), (1, 0), (7, 1500), (0, 12), (16, 16), (40, 700), (3, 3), (1, 6000)]


def on_hopper(
    kernel: str, law: Callable[[Shape, str, Rows], None], shape: Shape, device: str, rows: Rows
) -> None:
    """A law that holds, and the kernel that is tried is the one that attends."""
    with launch.noted() as launches:
        law(shape, device, rows)
    names = {launcher.kernel.fn.__name__ for launcher, _, _ in launches}
    assert kernel in names, f"another kernel attended: {sorted(names)}"


def prefix_of(shape: Shape, device: str, rows: Rows) -> None:
    prefix(shape, device)


def decode_cases(name: str, device: str) -> Iterator[Case]:
    """Cases of kernels that decode."""
    for shape in HOPPER[name]:
        kernel = "_latents_hopper" if shape.latent else "_decode_hopper"
        laws: list[tuple[str, Callable[[Shape, str, Rows], None], Rows]] = [
            *((what, agree, FULL[what]) for what in ("decode", "verify", "mixed", "empty")),
            *((what, agree, rows) for what, rows in LONG_DECODE.items()),
            ("alone", alone, MIX),
        ]
        if not shape.by_distance:
            laws += [("prefix", prefix_of, ())]
            laws += [] if shape.latent else [("across", agree_across, FULL["verify"])]
        for what, law, rows in laws:
            run = partial(on_hopper, kernel, law, shape, device, rows)
            yield Case("hopper", f"{shape}, {what}", run)
        yield Case("replay", str(shape), partial(replay, shape, device))


def tried_cases(name: str, device: str) -> Iterator[Case]:
    """Cases for what is off until a card has shown it right, see `proved.py`."""
    if name not in ("gluon_prefill", "gluon_rest"):
        yield from decode_cases(name, device)
        return
    on_prefill = partial(on_hopper, "_prefill_hopper", agree)
    for shape in HOPPER[name]:
        for rows in ("prefill", "mixed", "empty"):
            yield Case("hopper", f"{shape}, {rows}", partial(on_prefill, shape, device, FULL[rows]))
        yield Case("hopper", f"{shape}, long", partial(on_prefill, shape, device, LONG))
        yield Case("replay", str(shape), partial(replay, shape, device))
