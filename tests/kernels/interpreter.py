"""Makes Triton's interpreter a judge of kernels: right numbers, and errors for wrong addresses.

As it comes, the interpreter treats the bits of bfloat16 as integers, rounds conversions to bfloat16
and float8 wrongly, and reads or writes whatever address a kernel computes. `install()` repairs the
numbers and turns three faults that a GPU commits in silence into Python errors at the line of the
kernel that commits them:

- `IndexError`: an active lane of a load, store or atomic lies outside every tensor of the launch.
- `AssertionError`: 32-bit integer arithmetic overflows, or `tl.device_assert` fails.
- Any other error of a kernel is raised as itself, not as the interpreter's summary of it.

What it cannot see: a page that belongs to another row of the same pool (fill those with NaN), races
between programs, overflow in Python's own integers (the variable of `for i in range(...)`), and the
use of lanes that a masked load without `other` leaves undefined: they read as zero.

Triton decides while it is imported whether kernels are interpreted: tests/conftest.py sees to that.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import triton.language as tl
from torch import Tensor
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter as triton_interpreter
from triton.runtime.errors import InterpreterError
from triton.runtime.interpreter import (
    GridExecutor,
    InterpretedFunction,
    InterpreterBuilder,
    ReduceScanOpInterface,
    TensorHandle,
)

# Types that the interpreter keeps as unsigned integers, because NumPy has no such floats.
AS_BITS = {
    tl.bfloat16: (torch.bfloat16, torch.uint16),
    tl.float8e4nv: (torch.float8_e4m3fn, torch.uint8),
    tl.float8e5: (torch.float8_e5m2, torch.uint8),
}

_patches = pytest.MonkeyPatch()
_installed = False


def install() -> None:
    """Patch the interpreter until `uninstall`; a second call changes nothing."""
    global _installed
    # `tl.sum` is itself a kernel function, decorated when Triton was imported.
    if not isinstance(tl.sum, InterpretedFunction):
        raise RuntimeError("triton was imported before TRITON_INTERPRET=1 was set")
    if not _installed:
        _repair_numbers()
        _check_addresses()
        _check_integers()
        _repair_loops()
        _hurry()
        _installed = True


def uninstall() -> None:
    """Leave the interpreter as it was before `install`."""
    global _installed
    _patches.undo()
    _installed = False


def _patch(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """Replace a function by one that receives the original first, then its arguments."""
    original = getattr(owner, name)

    @functools.wraps(original)
    def patched(*args, **kwargs):
        return wrapper(original, *args, **kwargs)

    _patches.setattr(owner, name, patched)


# Numbers: what is stored as bits is computed in float32 and rounded once, as a GPU does.


def _is_bits(handle: Any) -> bool:
    return isinstance(handle, TensorHandle) and handle.dtype.scalar in AS_BITS


def decode(handle: TensorHandle) -> np.ndarray:
    """The numbers of a tile: float32 for what is kept as bits, else its data as they are."""
    if not _is_bits(handle):
        return handle.data
    kind, _ = AS_BITS[handle.dtype.scalar]
    return torch.from_numpy(np.array(handle.data)).view(kind).float().numpy()


def encode(values: np.ndarray, dtype: tl.dtype) -> TensorHandle:
    """A tile of `dtype`, rounded to the nearest, ties to even; float8 saturates."""
    dtype = dtype.scalar
    if dtype not in AS_BITS:
        return TensorHandle(values.astype(triton_interpreter._get_np_dtype(dtype)), dtype)
    kind, bits = AS_BITS[dtype]
    wide = torch.from_numpy(np.array(values, dtype=np.float32))
    if bits == torch.uint8:
        # A card converts with .satfinite; torch would make NaN or infinity of what is too large.
        wide = wide.clamp(-torch.finfo(kind).max, torch.finfo(kind).max)
    return TensorHandle(wide.to(kind).view(bits).numpy(), dtype)


def _in_float32(original, builder, *args):
    types = [arg.dtype.scalar for arg in args if _is_bits(arg)]
    if not types:
        result = original(builder, *args)
        # A comparison is labelled as what it compares, and would be stretched into its type.
        return TensorHandle(result.data, tl.int1) if result.data.dtype == bool else result
    wide = (TensorHandle(decode(arg), tl.float32) if _is_bits(arg) else arg for arg in args)
    result = original(builder, *wide).data
    # A comparison must not be labelled as bits, or the next operation would decode it.
    return encode(result, tl.int1 if result.dtype == bool else types[0])


def _cast(original, builder, source, dtype):
    if _is_bits(source) or dtype.scalar in AS_BITS:
        return encode(decode(source), dtype)
    return original(builder, source, dtype)


def _convert(original, builder, source, dtype, rounding):
    if not _is_bits(source) and dtype.scalar not in AS_BITS:
        return original(builder, source, dtype, rounding)
    if rounding not in (None, triton_interpreter._ir.ROUNDING_MODE.RTNE):
        raise NotImplementedError(f"rounding {rounding} to {dtype}: only to the nearest is checked")
    return encode(decode(source), dtype)


def _dot(original, builder, a, b, accumulator, *args):
    if not a.dtype.scalar.is_floating():
        return original(builder, a, b, accumulator, *args)
    left, right = decode(a), decode(b)
    # Products of 16-bit and 8-bit floats are exact in float32.
    product = np.matmul(left, right, dtype=np.result_type(left, right, np.float32))
    return encode(product + decode(accumulator), accumulator.dtype)


def _reduce(original, operation, tiles):
    if not isinstance(tiles, tuple):
        return _reduce(original, operation, (tiles,))[0]
    cast = triton_interpreter.interpreter_semantic.cast
    wide = tuple(cast(tile, tl.float32) if tile.dtype in AS_BITS else tile for tile in tiles)
    results = original(operation, wide)
    return tuple(
        cast(result, tile.dtype) if tile.dtype in AS_BITS else result
        for result, tile in zip(results, tiles, strict=True)
    )


def _get_bf16(builder: InterpreterBuilder, value: float) -> TensorHandle:
    return encode(np.array([value], np.float32), tl.bfloat16)


def _repair_numbers() -> None:
    _patch(InterpreterBuilder, "cast_impl", _cast)
    _patch(InterpreterBuilder, "create_fp_to_fp", _convert)
    _patch(InterpreterBuilder, "create_dot", _dot)
    # Triton itself computes functions of one number, and the larger of two, in float32 only.
    _patch(InterpreterBuilder, "binary_op", _in_float32)
    _patch(InterpreterBuilder, "unary_op", _in_float32)  # from Triton 3.8 on it negates
    _patch(InterpreterBuilder, "create_fma", _in_float32)
    _patch(ReduceScanOpInterface, "apply", _reduce)
    _patches.setattr(InterpreterBuilder, "get_bf16", _get_bf16, raising=False)


# Addresses: every launch registers the tensors it is given, and no test can forget one.

_more: list[Tensor] = []
_starts = _ends = np.empty(0, np.uint64)


@contextmanager
def reachable(*tensors: Tensor) -> Iterator[None]:
    """Let the launches inside also touch these: what a kernel reaches beyond its arguments."""
    before = len(_more)
    _more.extend(tensors)
    try:
        yield
    finally:
        del _more[before:]


def _tensors_in(argument: Any) -> Iterator[Tensor]:
    if isinstance(argument, Tensor):
        yield argument
    elif isinstance(argument, (tuple, list)):
        for part in argument:
            yield from _tensors_in(part)
    elif hasattr(argument, "base"):  # a tensor descriptor, or a view as another type
        yield from _tensors_in(argument.base)


def _span(tensor: Tensor) -> tuple[int, int]:
    """First address and the one after the last that a view reaches by its sizes and strides."""
    start = tensor.data_ptr()
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return start, start + (last + 1) * tensor.element_size()


def _register(original, launch, args, kwargs):
    global _starts, _ends
    # These are the tensors whose addresses the kernel gets: copies, if the launch named a GPU's.
    on_host = original(launch, args, kwargs)
    tensors = [*_more, *_tensors_in((*on_host[0], *on_host[1].values()))]
    joined: list[list[int]] = []
    for start, end in sorted(_span(tensor) for tensor in tensors if tensor.numel()):
        if joined and start < joined[-1][1]:  # two views of one tensor
            joined[-1][1] = max(joined[-1][1], end)
        else:
            joined.append([start, end])
    _starts, _ends = np.array(joined, np.uint64).reshape(-1, 2).T
    return on_host


def _check(what: str, builder: InterpreterBuilder, pointers: Any, mask: Any, size: int) -> None:
    # A mask comes as a handle, or as a plain array from a block pointer or a descriptor.
    active = pointers.data[np.broadcast_to(mask.data, pointers.data.shape)]
    if not len(_starts):
        outside = active
    else:
        nearest = np.searchsorted(_starts, active, side="right").astype(np.int64) - 1
        # Compared without adding to an address: one near 2**64 must not wrap into a tensor.
        inside = (nearest >= 0) & (active <= _ends[nearest] - np.uint64(size))
        outside = active[~inside]
    if outside.size:
        raise IndexError(
            f"{what} in program {builder.grid_idx}: {outside.size} of {active.size} active "
            f"addresses lie outside every tensor of the launch"
        )


def _load(original, builder, pointers, mask, *args, **kwargs):
    size = triton_interpreter._get_np_dtype(pointers.get_element_ty()).itemsize
    _check("load", builder, pointers, mask, size)
    return original(builder, pointers, mask, *args, **kwargs)


def _store(original, builder, pointers, value, mask, *args, **kwargs):
    _check("store", builder, pointers, mask, value.data.itemsize)
    return original(builder, pointers, value, mask, *args, **kwargs)


def _atomic_rmw(original, builder, operation, pointers, value, mask, *args):
    _check("atomic", builder, pointers, mask, value.data.itemsize)
    return original(builder, operation, pointers, value, mask, *args)


def _atomic_cas(original, builder, pointers, expected, value, *args):
    _check("atomic", builder, pointers, np.True_, value.data.itemsize)
    return original(builder, pointers, expected, value, *args)


def _raise_the_cause(original, launch, *args, **kwargs):
    _patched.clear()
    try:
        return original(launch, *args, **kwargs)
    except InterpreterError as error:
        cause: BaseException = error
        while isinstance(cause, InterpreterError) and cause.__cause__:
            cause = cause.__cause__
        raise cause from None


def _check_addresses() -> None:
    _patch(GridExecutor, "_init_args_hst", _register)
    _patch(GridExecutor, "__call__", _raise_the_cause)
    _patch(InterpreterBuilder, "create_masked_load", _load)
    _patch(InterpreterBuilder, "create_masked_store", _store)
    _patch(InterpreterBuilder, "create_atomic_rmw", _atomic_rmw)
    _patch(InterpreterBuilder, "create_atomic_cas", _atomic_cas)


EXACT = {"add": np.add, "sub": np.subtract, "mul": np.multiply}


def _overflow(original, semantic, left, right, operation):
    """Triton's own check of its debug mode, without an interpreted operation for each part."""
    kind = left.dtype
    if not isinstance(semantic.builder, InterpreterBuilder) or kind.int_bitwidth >= 64:
        return original(semantic, left, right, operation)
    name = operation.__name__
    result = EXACT[name](left.handle.data, right.handle.data, dtype=np.int64)
    least, most = kind.get_int_min_value(), kind.get_int_max_value()
    assert least <= result.min() <= result.max() <= most, (
        f"int{kind.int_bitwidth} overflow detected for operation {name}"
    )
    return None


def _check_integers() -> None:
    # Lanes that a mask will switch off count too.
    builder = triton_interpreter.interpreter_builder
    _patches.setattr(builder, "options", replace(builder.options, debug=True))
    _patch(TritonSemantic, "binary_op_sanitize_overflow_impl", _overflow)


def _repair_loops() -> None:
    def with_index(original, tensor, *scope):  # a scope since Triton 3.6
        original(tensor, *scope)
        set_attr = scope[0].set_attr if scope else setattr
        set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    # Before Triton 3.7 a loop's bounds are made integers in a way that NumPy 2.4 refuses.
    _patch(triton_interpreter, "_patch_lang_tensor", with_index)


# Time: what the interpreter does again for every call and every operation, is done once.

_patched: set[int] = set()  # the globals of functions for which this launch patched the language
_numpy_dtypes: dict[str, np.dtype] = {}
_block_types: dict[tuple[Any, ...], dict[str, Any]] = {}  # their attributes, by their arguments
_builtins: dict[Any, list[tuple[str, Any, Any]]] = {}  # with what is called instead
# Of two operands, by their types or numbers: a type, or the number as a tile that nobody writes.
_operands: dict[tuple[Any, ...], tuple[Any, Any]] = {}


def _patch_lang(original, function):
    names = id(function.__globals__)
    if names in _patched:  # a function that the kernel calls
        return None
    _patched.add(names)
    return original(function)


def _called(member):
    """A builtin without the two functions around it, which look for what is always the same."""
    semantic = triton_interpreter.interpreter_semantic
    function = getattr(member, "__wrapped__", member)  # a method of tiles has but one around it

    def call(*args, **kwargs):
        kwargs["_semantic"] = semantic
        return function(*args, **kwargs)

    return call


def _patch_builtin(original, package, builder, *scope):
    known = _builtins.setdefault(package, [])
    if not known:
        members = inspect.getmembers(package)
        builtins = ((name, member) for name, member in members if tl.core.is_builtin(member))
        known += [(name, member, _called(member)) for name, member in builtins]
    set_attr = scope[0].set_attr if scope else setattr  # a scope since Triton 3.6
    for name, member, call in known:
        if getattr(package, name) is member:  # not patched yet by this launch
            set_attr(package, name, call)


def _known(operand):
    if isinstance(operand, tl.tensor):
        return operand.type.name
    return type(operand), operand


def _as(semantic, operand, wanted):
    """An operand in the type that an operation computes in; NumPy itself stretches its data."""
    if isinstance(wanted, tl.tensor):
        return wanted
    if operand.type.name == wanted.name:
        return operand
    return tl.tensor(semantic.cast(operand, wanted.scalar).handle, wanted)


def _match(original, semantic, left, right, *rules, **named):
    if named or not isinstance(semantic.builder, InterpreterBuilder):
        return original(semantic, left, right, *rules, **named)
    key = _known(left), _known(right), rules
    if key not in _operands:
        made = original(semantic, left, right, *rules)
        pairs = list(zip((left, right), made, strict=True))
        for operand, tile in pairs:
            if not isinstance(operand, tl.tensor):
                tile.handle.data.flags.writeable = False
        _operands[key] = tuple(x.type if isinstance(y, tl.tensor) else x for y, x in pairs)
        return made
    wanted = _operands[key]
    return _as(semantic, left, wanted[0]), _as(semantic, right, wanted[1])


def _get_np_dtype(original, dtype):
    name = dtype.scalar.name
    if name not in _numpy_dtypes:
        _numpy_dtypes[name] = original(dtype)
    return _numpy_dtypes[name]


def _make_block_type(original, made, element_ty, shape):
    key = (element_ty.name, *(getattr(x, "value", x) for x in shape))
    if key not in _block_types:
        original(made, element_ty, shape)
        _block_types[key] = made.__dict__
    made.__dict__ = _block_types[key]


def _make_tensor(original, made, handle, kind):
    known = kind.__dict__.get("_of_tensors")
    if known is None:
        original(made, handle, kind)
        kind._of_tensors = made.shape, made.numel, made.dtype
    else:
        made.handle, made.type = handle, kind
        made.shape, made.numel, made.dtype = known


def _hurry() -> None:
    _patch(triton_interpreter, "_patch_lang", _patch_lang)
    _patch(triton_interpreter, "_patch_builtin", _patch_builtin)
    _patch(triton_interpreter, "_get_np_dtype", _get_np_dtype)
    _patch(tl.block_type, "__init__", _make_block_type)
    _patch(tl.tensor, "__init__", _make_tensor)
    _patch(TritonSemantic, "binary_op_type_checking_impl", _match)
