"""The gate on asynchronous products finds faults that are planted in what the compiler made."""

import pytest

pytest.importorskip("triton")

from benchmarks.compiled import hazards
from benchmarks.compiled.sass import Instruction

# A loop of two groups of warps: refill, barrier, a product of keys, its wait; a product of values
# whose left operand is R8 to R11, which may run until the next round's wait.
LOOP = """
    - MOV R1
    - BAR.SYNC.DEFER_BLOCKING 0x0
    - LDGSTS.E.BYPASS.128 [R1], R2
    - HGMMA.64x64x16.F32.BF16 R24, gdesc[UR4], RZ, !UPT, gsb0
    - WARPGROUP.DEPBAR.LE gsb0, 0x0
    - MUFU.EX2 R9, R24
    - HGMMA.64x32x16.F32.BF16 R64, R8, gdesc[UR8], R64, gsb0
    - FADD R12, R13, R14
    @P0 BRA 0x10
    - WARPGROUP.DEPBAR.LE gsb0, 0x0
    - STG.E R64
    - EXIT
"""


def read(text):
    """`guard name operands` a line."""
    lines = (line.strip().split(" ", 2) for line in text.strip().splitlines())
    return [
        Instruction(16 * at, guard.strip("-"), name, "".join(rest))
        for at, (guard, name, *rest) in enumerate(lines)
    ]


def test_a_loop_that_waits_has_no_hazard():
    assert hazards.found(read(LOOP), 8, {"LDGSTS", "STS"}) == ()


@pytest.mark.parametrize(
    ("old", "new", "told"),
    [
        ("FADD R12,", "FADD R11,", "0x70 FADD under 0x60"),  # behind it
        ("FADD R12,", "LDS.128 R4,", None),  # just below
        ("FADD R12,", "LDSM.16.M88.4 R5,", "0x70 LDSM.16.M88.4 under 0x60"),
        ("BAR.SYNC.DEFER_BLOCKING 0x0", "IMAD R10, R1", "0x10 IMAD under 0x60"),  # a round later
        ("FADD R12,", "FADD R65,", "0x70 FADD under 0x60"),  # its sums
        ("FADD R12,", "SHFL.BFLY PT, R8,", "0x70 SHFL.BFLY under 0x60"),
        ("0x0\n    - MUFU", "0x1\n    - MUFU", None),  # the product before is then over as well
    ],
)
def test_registers_that_are_written_under_a_product_are_found(old, new, told):
    assert LOOP.count(old) == 1
    found = hazards.overwritten(read(LOOP.replace(old, new)))
    assert found == ([told] if told else [])


def test_a_refill_without_a_barrier_behind_the_wait_is_found():
    without = LOOP.replace("- BAR.SYNC.DEFER_BLOCKING 0x0", "- MOV R2")
    assert hazards.found(read(without), 8, {"LDGSTS"}) == ("0x20 LDGSTS.E.BYPASS.128",)
    assert hazards.found(read(without), 4, {"LDGSTS"}) == ()  # one group waits for itself
    assert hazards.found(read(without), 8, {"STS"}) == ()  # what is copied is not what is read
