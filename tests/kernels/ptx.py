"""Runs the inline assembly of kernels in the interpreter: the few instructions they use.

All of it works on pairs: a register of 32 bits holds two neighbours of 16 bits, or one of 32.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

FLOATS = {"f16x2": torch.float16, "bf16x2": torch.bfloat16}


def _floats(register: np.ndarray, kind: torch.dtype) -> np.ndarray:
    """Both halves of registers, in float64, which holds sums of their products."""
    bits = register.astype(np.uint32).view(np.uint16).view(np.int16)
    return torch.from_numpy(bits.copy()).view(kind).double().numpy()


def _register(values: np.ndarray, kind: torch.dtype) -> np.ndarray:
    return torch.from_numpy(values).to(kind).view(torch.int16).numpy().view(np.uint32)


def _lop3(a: Any, b: Any, c: Any, table: Any) -> Any:
    """Bit by bit, the bit of `table` that those of a, b and c number."""
    result = np.zeros_like(a)
    for number in range(8):
        if int(table[0]) >> number & 1:
            chosen = [x if number >> (2 - i) & 1 else ~x for i, x in enumerate((a, b, c))]
            result |= chosen[0] & chosen[1] & chosen[2]
    return result


def _prmt(a: Any, b: Any, selector: Any) -> Any:
    both = a.astype(np.uint64) | b.astype(np.uint64) << np.uint64(32)
    result = np.zeros_like(a)
    for i in range(4):
        byte = both >> np.uint64(8 * (int(selector[0]) >> (4 * i) & 0xF)) & np.uint64(0xFF)
        result |= byte.astype(np.uint32) << np.uint32(8 * i)
    return result


def run(name: str, *args: Any) -> Any:
    """One instruction on registers, uint32 arrays or numbers."""
    base, *modifiers = name.split(".")
    if base in ("fma", "sub"):
        kind = FLOATS[modifiers[-1]]
        wide = [_floats(np.broadcast_to(x, args[0].shape), kind) for x in args]
        return _register(wide[0] * wide[1] + wide[2] if base == "fma" else wide[0] - wide[1], kind)
    plain = {
        "mov": lambda a: a,
        "shl": lambda a, n: a << n,
        "shr": lambda a, n: a >> n,
        "and": lambda a, b: a & b,
        "lop3": _lop3,
        "prmt": _prmt,
    }
    return plain[base](*args).astype(np.uint32)


def execute(asm: str, inputs: list[np.ndarray], outputs: int) -> list[np.ndarray]:
    """Executes statements, and returns their output registers."""
    registers: dict[str, Any] = {f"${outputs + i}": x for i, x in enumerate(inputs)}

    def value(operand: str) -> Any:
        if operand in registers:
            return registers[operand]
        return np.full_like(inputs[0], int(operand, 0))

    for statement in re.sub(r"[{}]", "", asm).split(";"):
        if statement.strip() and not statement.strip().startswith(".reg"):
            name, operands = statement.strip().split(None, 1)
            to, *rest = (x.strip() for x in operands.split(","))
            # An output may lie where an input did, unless it says that it may not.
            assert to not in [f"${outputs + i}" for i in range(len(inputs))]
            registers[to] = run(name, *map(value, rest))
    return [registers[f"${i}"] for i in range(outputs)]


def _inline_asm(builder: Any, asm: str, constraints: str, values: Any, types: Any, _, pack: int):
    assert pack == 2
    shape = values[0].data.shape
    inputs: list[np.ndarray] = []
    for handle in values:
        data = np.ascontiguousarray(np.broadcast_to(handle.data, shape))
        if data.itemsize == 2:
            inputs.append(data.reshape(-1).view(np.uint32))
        else:
            inputs += [x.copy() for x in data.reshape(-1, 2).view(np.uint32).T]
    wanted = constraints.split(",")
    assert len(wanted) == len(types) + len(inputs)
    assert all(x.startswith("=") for x in wanted[: len(types)])
    # All but the last are written before the inputs were read for the last time.
    assert all("&" in x for x in wanted[: len(types) - 1])
    found = execute(asm, inputs, len(types))
    results = []
    for register, kind in zip(found, types):
        bits = register.view(np.uint16).reshape(shape)
        stored = bits if kind.scalar == tl.bfloat16 else bits.view(np.float16)
        results.append(TensorHandle(stored, kind.scalar))
    return SimpleNamespace(get_result=lambda i: results[i])


@contextmanager
def inline_assembly() -> Iterator[None]:
    """Lets the interpreter run it."""
    with pytest.MonkeyPatch.context() as patches:
        patches.setattr(InterpreterBuilder, "create_inline_asm", _inline_asm)
        yield
