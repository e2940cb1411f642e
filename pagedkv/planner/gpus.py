"""Known cards, from which a plan takes facts of a machine that were not measured.

Figures are dense, without sparsity. A GeForce multiplies 16-bit floats at half its rate if it adds
up in float32, as torch does; the table has this half. `source` names the maker's document to check
a row against; the documents were not at hand, and most rows agree with public lists.
"""

from __future__ import annotations

import re
from difflib import get_close_matches
from typing import NamedTuple

# GB/s that copies of pinned memory reach over 16 lanes; the standard has 15.8, 31.5 and 63.
PCIE_GBPS = {3: 12.5, 4: 25.0, 5: 50.0}
USABLE = 0.9  # of a card's memory; the rest is for its driver, error correction and a desktop


class Gpu(NamedTuple):
    """One card.

    Attributes:
        memory: GiB on it.
        memory_gbps: GB/s of its memory.
        tflops: 10^12 operations a second in bfloat16, or float16 where it has no bfloat16.
        pcie: the generation of its link.
        lanes: lanes of the link.
        source: the document to check these against.
    """

    memory: int
    memory_gbps: float
    tflops: float
    pcie: int
    lanes: int
    source: str

    @property
    def link_gbps(self) -> float:
        """GB/s from pinned host memory."""
        return PCIE_GBPS[self.pcie] * self.lanes / 16

    @property
    def device_memory(self) -> int:
        """Bytes that a plan may use."""
        return int(USABLE * self.memory * 2**30)

    @property
    def link(self) -> str:
        """The link by name."""
        return f"PCIe {self.pcie} x{self.lanes}"


GA102, ADA, BLACKWELL = "Ampere GA102 whitepaper", "Ada whitepaper", "RTX Blackwell whitepaper"
GPUS = {
    "RTX 3060": Gpu(12, 360, 25.5, 4, 16, "product page, 2 x float32"),
    "RTX 3070": Gpu(8, 448, 40.6, 4, 16, GA102),
    "RTX 3080": Gpu(10, 760, 59.5, 4, 16, GA102),
    "RTX 3090": Gpu(24, 936, 71, 4, 16, GA102),
    "RTX 4060": Gpu(8, 272, 30.2, 4, 8, "product page, 2 x float32"),
    "RTX 4060 Ti": Gpu(8, 288, 44.1, 4, 8, "product page, 2 x float32"),
    "RTX 4060 Ti 16GB": Gpu(16, 288, 44.1, 4, 8, "product page, 2 x float32"),
    "RTX 4070": Gpu(12, 504, 58.3, 4, 16, "product page, 2 x float32"),
    "RTX 4070 Ti": Gpu(12, 504, 80.2, 4, 16, ADA),
    "RTX 4080": Gpu(16, 717, 97.5, 4, 16, ADA),
    "RTX 4090": Gpu(24, 1008, 165, 4, 16, ADA),
    "RTX 5070": Gpu(12, 672, 61.7, 5, 16, BLACKWELL),
    "RTX 5070 Ti": Gpu(16, 896, 87.9, 5, 16, BLACKWELL),
    "RTX 5080": Gpu(16, 960, 112.6, 5, 16, BLACKWELL),
    "RTX 5090": Gpu(32, 1792, 209.5, 5, 16, BLACKWELL),
    "RTX A6000": Gpu(48, 768, 154.8, 4, 16, "data sheet, half of sparse"),
    "T4": Gpu(16, 320, 65, 3, 16, "Turing whitepaper, float16"),
    "A10": Gpu(24, 600, 125, 4, 16, "data sheet"),
    "L4": Gpu(24, 300, 121, 4, 16, "data sheet, half of sparse"),
    "L40S": Gpu(48, 864, 362, 4, 16, "data sheet"),
    "A100 40GB": Gpu(40, 1555, 312, 4, 16, "data sheet"),
    "A100 80GB": Gpu(80, 1935, 312, 4, 16, "data sheet, PCIe"),
    "H100": Gpu(80, 3350, 989, 5, 16, "data sheet, SXM, half of sparse"),
    "H200": Gpu(141, 4800, 989, 5, 16, "data sheet, SXM, half of sparse"),
    "B200": Gpu(180, 8000, 2250, 5, 16, "HGX data sheet, half of sparse"),
}
# A mid-range card, assumed if none is named.
ORDINARY = Gpu(16, 400, 100, 4, 16, "assumed")
FILLERS = re.compile(r"nvidia|geforce|tesla|[^a-z0-9]")


def find_gpu(name: object) -> str:
    """Returns the name of a known card, however it is spelt: `rtx4090`, `NVIDIA GeForce RTX 4090`.

    Raises:
        ValueError: the card is not known; near names are suggested.
    """
    known = {_plain(each): each for each in GPUS}
    wanted = _plain(name) if isinstance(name, str) else ""
    found = known.get(wanted) or known.get(f"rtx{wanted}") or known.get(wanted.removesuffix("gb"))
    if found:
        return found
    near = [each for plain, each in known.items() if wanted and wanted in plain]
    near = near or [known[each] for each in get_close_matches(wanted, known, 3, 0.5)]
    names = ", ".join(near or GPUS)
    advice = f"did you mean one of {names}?" if near else f"known are {names}."
    raise ValueError(
        f"gpu: {name!r:.60} is not known; {advice} Another card is given as "
        "device_memory='8GiB' and link_gbps=25"
    )


def _plain(name: str) -> str:
    return FILLERS.sub("", name.lower())


def gpu_table() -> str:
    """Returns the known cards as a table of text."""
    head = f"{'card':<18}{'GiB':>5}{'GB/s':>7}{'TFLOPS':>8}  {'link':<11}check against"
    rows = [
        f"{name:<18}{g.memory:>5}{g.memory_gbps:>7g}{g.tflops:>8g}  {g.link:<11}{g.source}"
        for name, g in GPUS.items()
    ]
    return "\n".join([head, *rows])
