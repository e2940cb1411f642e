"""Reads what ptxas made of a kernel: registers, stack, main loop, and widths of access in PTX."""

from __future__ import annotations

import re
import subprocess
from collections import Counter, defaultdict
from pathlib import Path
from typing import NamedTuple

from triton import knobs

# Newer disassemblers add scheduling marks behind the operands: &req={3} ?trans1.
INSTRUCTION = re.compile(
    r"^\s+/\*([0-9a-f]{4,})\*/\s+(@!?U?P\w+\s+)?([A-Z][\w.]*)([^;&?/\n]*)", re.M
)
ADDRESS = re.compile(r"\b0x([0-9a-f]+)\s*$")
TENSOR = {"HMMA", "HGMMA", "UTCHMMA", "QMMA", "QGMMA", "IMMA", "IGMMA"}
COPIES = {"LDG", "LDGSTS", "UTMALDG"}
STATEMENT = re.compile(r"(?:^|[;{])\s*(?:@!?%\w+\s+)?([a-z][\w.:]*)\s+([^;]*)(?=;)", re.M)
REGISTER = re.compile(r"%\w+")


class Instruction(NamedTuple):
    at: int
    guard: str
    name: str  # with its modifiers
    operands: str

    @property
    def base(self) -> str:
        return self.name.split(".")[0]

    @property
    def label(self) -> str:
        """The name under which it is counted; copies and shared memory's reads have a width."""
        base, _, modifiers = self.name.partition(".")
        if base in ("LDG", "LDGSTS"):
            return f"{base}.128" if "128" in modifiers.split(".") else base
        if base == "LDS":
            return "LDS.U8" if re.search(r"\b[US]8\b", modifiers) else base
        return "FFMA" if base == "FFMA2" else base


class Machine(NamedTuple):
    """Figures of compiled code.

    Attributes:
        registers: of a thread.
        stack: bytes of a thread's local memory, where spilled registers go.
        loop: instructions of the main loop by kind, see `Instruction.label`.
        length: instructions of the main loop, 0 if there is none.
        code: instructions of the whole kernel by kind.
        tf32: some tensor instruction rounds fp32 to TF32.
        hidden: exponentials of the main loop that are made while products run.
        listing: the instructions.
    """

    registers: int
    stack: int
    loop: dict[str, int]
    length: int
    code: dict[str, int]
    tf32: bool
    hidden: int
    listing: list[Instruction]


def disassemble(cubin: Path, kernel: str) -> Machine:
    command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", "-sass", str(cubin)]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    usage = re.search(rf"Function {kernel}:\s+REG:(\d+) STACK:(\d+) .*?LOCAL:(\d+)", text)
    assert usage, f"cuobjdump says nothing about {kernel}"
    registers, stack, local = map(int, usage.groups())
    _, _, body = text.partition(f"Function : {kernel}\n")
    code = [
        Instruction(int(at, 16), guard, name, operands)
        for at, guard, name, operands in INSTRUCTION.findall(body.partition("Function : ")[0])
    ]
    loop = main_loop(code)
    return Machine(
        registers,
        stack + local,
        dict(Counter(one.label for one in loop)),
        len(loop),
        dict(Counter(one.label for one in code)),
        any(one.base in TENSOR and "TF32" in one.name for one in code),
        under_products(loop),
        code,
    )


def under_products(loop: list[Instruction]) -> int:
    """How many exponentials lie between products and the wait for all of them."""
    running, found = False, 0
    for one in loop:
        if one.base == "HGMMA":
            running = True
        elif one.name.startswith("WARPGROUP.DEPBAR") and one.operands.split()[-1] == "0x0":
            running = False
        found += running and one.name == "MUFU.EX2"
    return found


def main_loop(code: list[Instruction]) -> list[Instruction]:
    """The innermost loop that multiplies most, or else copies most.

    Among equal loops it takes one that copies while it multiplies, and then the shortest.
    """
    tensor = any(one.base in TENSOR for one in code)
    kinds = TENSOR if tensor else {"FFMA", "FFMA2"} | COPIES

    def work(blocks: frozenset[int]) -> int:
        return sum(one.base in kinds for block in blocks for one in parts[block])

    parts, following = blocks(code)
    loops = _loops(following)
    # An outer loop around up to four loops does their work and little more, so it is left out.
    inner = [
        one
        for one in loops
        if not any(other < one and 4 * work(other) >= work(one) for other in loops)
    ]

    def order(blocks: frozenset[int]) -> tuple[int, bool, int]:
        copies = any(one.base == "LDGSTS" for block in blocks for one in parts[block])
        return work(blocks), copies, -_size(blocks, parts)

    best = max(inner, key=order, default=frozenset[int]())
    return [one for block in sorted(best) for one in parts[block]]


def _size(blocks: frozenset[int], parts: dict[int, list[Instruction]]) -> int:
    return sum(len(parts[block]) for block in blocks)


def blocks(code: list[Instruction]) -> tuple[dict[int, list[Instruction]], dict[int, list[int]]]:
    """Basic blocks by address, and where control goes after each.

    A branch back is not enough to see a loop: rare paths are laid out behind the kernel's end and
    jump back as well, and ptxas leaves some loops by a guarded CALL that never returns.
    """
    places = {one.at for one in code}
    meeting = defaultdict(list)  # BSYNC goes to the nearest place that a BSSY of its register names
    for one in code:
        if one.base == "BSSY" and (found := ADDRESS.search(one.operands)):
            meeting[one.operands.split(",")[0].strip()].append(int(found[1], 16))

    def jumps(one: Instruction) -> tuple[list[int], bool]:
        """Targets, and whether control may also go on to the next instruction."""
        found = ADDRESS.search(one.operands)
        target = [int(found[1], 16)] if found and int(found[1], 16) in places else []
        if one.base in ("BRA", "JMP"):
            # BRA.U and BRA.DIV name their condition among the operands.
            return target, bool(one.guard) or not re.fullmatch(r"\s*0x\w+\s*", one.operands)
        if one.base == "CALL":
            return target, True
        if one.base == "BSYNC" and one.operands.strip() in meeting:
            nearest = min(meeting[one.operands.strip()], key=lambda place: abs(place - one.at))
            return [nearest], bool(one.guard)
        return [], one.base not in ("EXIT", "RET", "BRX") or bool(one.guard)

    flow = [jumps(one) for one in code]
    leaders = {code[0].at} if code else set()
    for (targets, on), after in zip(flow, code[1:]):
        leaders.update(targets)
        if targets or not on:
            leaders.add(after.at)
    parts: dict[int, list[Instruction]] = {}
    following: dict[int, list[int]] = {}
    here = 0
    for number, (one, (targets, on)) in enumerate(zip(code, flow)):
        if one.at in leaders:
            here = one.at
        parts.setdefault(here, []).append(one)
        ahead = code[number + 1 : number + 2] if on else []
        following[here] = [*targets, *(other.at for other in ahead)]
    return parts, following


def _loops(following: dict[int, list[int]]) -> list[frozenset[int]]:
    """Natural loops: a back edge goes to a block through which every way to it leads."""
    entry = next(iter(following), None)
    if entry is None:
        return []
    reached, todo = {entry}, [entry]
    while todo:
        for block in following[todo.pop()]:
            if block not in reached:
                reached.add(block)
                todo.append(block)
    before: dict[int, list[int]] = defaultdict(list)
    for block in reached:
        for after in following[block]:
            before[after].append(block)
    above = {block: set(reached) for block in reached} | {entry: {entry}}
    changed = True
    while changed:
        changed = False
        for block in sorted(reached - {entry}):
            found = set.intersection(*(above[one] for one in before[block])) | {block}
            changed |= found != above[block]
            above[block] = found
    loops: dict[int, set[int]] = {}
    for block in reached:
        for head in following[block]:
            if head in above[block] and (head != block or len(following[block]) > 1):
                body = loops.setdefault(head, {head})
                todo = [block]
                while todo:
                    if (one := todo.pop()) not in body:
                        body.add(one)
                        todo += before[one]
    return [frozenset(body) for body in loops.values()]


class Access(NamedTuple):
    """One instruction of PTX that reads or writes global memory.

    Attributes:
        parameters: numbers of the kernel's parameters that its address is computed from.
        width: bytes for each thread.
    """

    parameters: frozenset[int]
    width: int


def accesses(ptx: str) -> list[Access]:
    """Reads and writes of global memory, each traced back to the parameters it goes through.

    Page ids, lengths and scales are read next to K and V, in the same loop and with the same
    instructions, so a width alone does not tell what is read. Addresses do: a trace ends at a
    loaded value, so a page's address leads to the pool's parameter and not to the table's.
    """
    made_of: dict[str, set[str]] = defaultdict(set)
    found: list[tuple[str, int]] = []
    text = re.sub(r"//.*|^\s*\..*$|^\s*\$.*:", "", ptx, flags=re.M)
    for name, operands in STATEMENT.findall(text):
        space = name.split(".")
        if match := re.match(r"cp\.async\.c[ag]\.shared", name):
            _, source, width = re.split(r",(?![^\[{]*[\]}])", operands)[:3]
            found.append((source, int(width.strip(), 0)))
        elif space[0] in ("ld", "st") and "global" in space:
            match = re.search(r"(?:\.v(\d))?\.[a-z](\d+)$", name)
            assert match, name
            place = re.search(r"\[[^\]]*\]", operands)
            assert place, operands
            found.append((place[0], int(match[1] or 1) * int(match[2]) // 8))
        elif name.startswith("ld.param"):
            made_of[operands.split(",")[0].strip()].add(operands.rsplit("[", 1)[-1].strip("] "))
        elif space[0] not in ("ld", "st", "atom", "red"):
            group = re.match(r"\s*(\{[^}]*\}|[^,]*),(.*)", operands, re.S)
            if group:
                for register in REGISTER.findall(group[1]):
                    made_of[register].update(REGISTER.findall(group[2]))
    return [Access(_parameters(source, made_of), width) for source, width in found]


def _parameters(source: str, made_of: dict[str, set[str]]) -> frozenset[int]:
    todo, seen = REGISTER.findall(source), set[str]()
    while todo:
        if (one := todo.pop()) not in seen:
            seen.add(one)
            todo += made_of.get(one, ())
    return frozenset(
        int(match[1]) for one in seen if (match := re.search(r"_param_(\d+)(?:\+\d+)?$", one))
    )
