"""Cases that kernels have to pass on a card before they are turned on there.

Nothing here needs pytest.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from pagedkv.kernels.triton import launch
from tests.kernels.correctness import Case, agree, cases, replay
from tests.kernels.shapes import FULL, Shape
from tests.kernels.steps import LAYOUTS, Rows

# Heads, pages and terms of the Gluon prefill; those of every other kind are in `shapes`.
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
}
LONG: Rows = [(2048, 2048), (700, 9000), (17, 5000), (1000, 1001)]


def on_hopper(shape: Shape, device: str, rows: Rows) -> None:
    """As `agree`, and the kernel that is tried is the one that attends."""
    with launch.noted() as launches:
        agree(shape, device, rows)
    names = {launcher.kernel.fn.__name__ for launcher, _, _ in launches}
    assert "_prefill_hopper" in names, f"another kernel attended: {sorted(names)}"


def tried_cases(name: str, device: str) -> Iterator[Case]:
    """Cases for what is off until a card has shown it right, see `proved.py`."""
    if name in HOPPER:
        for shape in HOPPER[name]:
            for rows in ("prefill", "mixed", "empty"):
                case = partial(on_hopper, shape, device, FULL[rows])
                yield Case("hopper", f"{shape}, {rows}", case)
            yield Case("hopper", f"{shape}, long", partial(on_hopper, shape, device, LONG))
            yield Case("replay", str(shape), partial(replay, shape, device))
    else:
        wanted = {"decode", "verify", "mixed", "alone", "write", "replay", "prefix"}
        for case in cases(device):
            if case.group in wanted and case.name.startswith("bfloat16"):
                yield case
