"""Finds two faults of compilers around asynchronous products of Hopper, which no test sees.

A product of a group of four warps (HGMMA) goes on reading its operands until a wait for it. ptxas
before 13.3 may give registers that it still reads to something else; Triton up to 3.7.1 may refill
shared memory behind the wait of one group while the other group's product still reads it.
"""

from __future__ import annotations

import re

from benchmarks.compiled.sass import Instruction, blocks

GROUP = 4  # warps
PRODUCTS = {"HGMMA", "QGMMA", "IGMMA"}
READ_BY_LEFT = 4  # registers that hold the left operand of one product
# Their first operand is a register that they read.
NO_RESULT = {"BAR", "BRX", "RET", "WARPSYNC", "CALL", "JMX", "NANOSLEEP"}
MANY = 8  # later products are counted up to this number


def found(code: list[Instruction], warps: int, releases: set[str]) -> tuple[str, ...]:
    """Finds both faults in a kernel of so many warps, a few words each.

    Args:
        releases: beginnings of the names of instructions that refill what products read, or that
            allow it.
    """
    given = given_away(code, tuple(releases)) if warps > GROUP else []
    return (*overwritten(code), *given)


def overwritten(code: list[Instruction]) -> list[str]:
    """Finds instructions that write registers of a product that may still run, with the product.

    Nothing may write the left operand, and only other products may write the sums.
    """
    parts, following = blocks(code)
    found: dict[str, None] = {}  # in order
    for block, lines in parts.items():
        for index, product in enumerate(lines):
            if product.base not in PRODUCTS:
                continue
            left = re.match(r"\s*R\d+, R(\d+)", product.operands)
            held = range(int(left[1]), int(left[1]) + READ_BY_LEFT) if left else range(0)
            kept = {True: set(held), False: results(product).union(held)}
            # For each way on: whether the product is committed, and how many are after it.
            todo = [(block, index + 1, "gsb0" in product.operands, 0)]
            seen = set(todo)
            while todo:
                block_, at, committed, behind = todo.pop()
                for one in parts[block_][at:]:
                    multiplies = one.base in PRODUCTS
                    if results(one) & kept[multiplies]:
                        found[f"{one.at:#x} {one.name} under {product.at:#x}"] = None
                        break
                    if multiplies and "gsb0" in one.operands:
                        behind, committed = min(behind + committed, MANY), True
                    elif is_wait(one) and committed and _left_running(one) <= behind:
                        break
                else:
                    ways = {(after, 0, committed, behind) for after in following[block_]} - seen
                    seen |= ways
                    todo += ways
    return list(found)


def given_away(code: list[Instruction], releases: tuple[str, ...]) -> list[str]:
    """Finds releases of shared memory that another group's product may still read.

    A wait is for one group; only a barrier behind it shows that other groups have waited, too.
    """
    parts, following = blocks(code)
    found: dict[str, None] = {}
    todo = [
        (block, index + 1)
        for block, lines in parts.items()
        for index, one in enumerate(lines)
        if is_wait(one)
    ]
    seen = set(todo)
    while todo:
        block, at = todo.pop()
        for one in parts[block][at:]:
            if one.name.startswith(releases):
                found[f"{one.at:#x} {one.name}"] = None
            if one.name.startswith((*releases, "BAR")) or is_wait(one):
                break
        else:
            ways = {(after, 0) for after in following[block]} - seen
            seen |= ways
            todo += ways
    return list(found)


def is_wait(one: Instruction) -> bool:
    """Whether it waits for products."""
    return one.name.startswith("WARPGROUP.DEPBAR")


def _left_running(wait: Instruction) -> int:
    """How many of the last groups of products a wait leaves running."""
    return int(wait.operands.split(",")[-1], 16)


def results(one: Instruction) -> set[int]:
    """The registers that an instruction writes."""
    match = re.match(r"\s*(?:!?U?P(?:\d|T), )?R(\d+)", one.operands)
    if not match or one.base in NO_RESULT:
        return set()
    first, modifiers = int(match[1]), one.name.split(".")[1:]
    if one.base in PRODUCTS:
        size = re.search(r"64x(\d+)x", one.name)
        assert size, one.name
        count = int(size[1]) // (2 if {"F32", "S32"} & set(modifiers) else 4)
    elif one.base in ("HMMA", "IMMA", "QMMA"):
        count = 4 if {"F32", "S32"} & set(modifiers) else 2
    elif "128" in modifiers:
        count = 4
    elif one.base in ("LDSM", "MOVM"):
        count = max(int(part) for part in modifiers if part in "124") if one.base == "LDSM" else 1
    elif {"64", "WIDE", "F64"} & set(modifiers) or (one.base == "CS2R" and "32" not in modifiers):
        count = 2
    else:
        count = 1
    return set(range(first, first + count))
