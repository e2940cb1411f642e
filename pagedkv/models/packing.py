"""Counts the bits that a weight takes in a quantised checkpoint, by transformers' own methods."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .names import attributes
from .weights import Weight

# Fields in which methods list modules that stay as they are.
LEFT = (
    "modules_to_not_convert", "ignore", "llm_int8_skip_modules", "skip_modules",
    "linear_weights_not_to_quantize", "exclude",
)  # fmt: skip
# Methods whose weights transformers unpacks as it loads them for a CPU.
UNPACKED_ON_CPU = {"fp8", "mxfp4", "mxfp8"}
MOST_BITS = 64  # bits of an element, with its part of the scales
SCALE = 16  # bits of a scale, and of a zero beside it, if a method says nothing else
Fields = Mapping[str, Any]


@dataclass(frozen=True)
class Group:
    """Modules whose weights take equally many bits.

    Attributes:
        targets: patterns of the modules' names, or names of their classes; empty for all.
    """

    bits: float
    targets: tuple[str, ...] = ()


@dataclass(frozen=True)
class Packing:
    """The weights that a quantised checkpoint packs: of linear maps and of experts in its layers.

    Attributes:
        groups: the first group that has a module counts for it.
        left: patterns of modules that stay as they are.
    """

    groups: tuple[Group, ...]
    left: tuple[str, ...]

    def bits(self, weight: Weight) -> float | None:
        """Returns the bits of an element; None for a weight that stays as it is."""
        names = _names(weight)
        packs = weight.packable and weight.layers and not _any(self.left, names)
        found = (group.bits for group in self.groups if _targets(group.targets, names))
        return next(found, None) if packs else None


def method_of(config: Any) -> str:
    """Returns the method by which a checkpoint is quantised, by its configuration; or empty."""
    method = _quantisation(config).get("quant_method")
    return str(getattr(method, "value", method) or "")


def is_unpacked(config: Any, on_cpu: bool) -> bool:
    """Whether transformers unpacks the weights of a checkpoint as it loads them."""
    said = bool(_quantisation(config).get("dequantize"))
    return (on_cpu or said) and method_of(config) in UNPACKED_ON_CPU


def _quantisation(config: Any) -> Fields:
    """Returns the quantisation that a configuration names; it may be a dict or an object."""
    name = "quantization_config"
    found = config.get(name) if isinstance(config, Mapping) else getattr(config, name, None)
    if isinstance(found, Mapping):
        return found
    try:
        return attributes(found) if found else {}
    except TypeError:
        raise ValueError(f"{name}: expected an object of fields, got {found!r:.80}") from None


def packing_of(config: Fields) -> Packing | None:
    """Returns how a checkpoint is packed, by its configuration; None if it is not packed.

    Raises:
        ValueError: the configuration does not tell how.
    """
    method, fields = method_of(config), _quantisation(config)
    if not fields:
        return None
    try:
        groups = _groups(fields) if method in WITH_GROUPS else (Group(METHODS[method](fields)),)
        left = tuple(pattern for name in LEFT for pattern in _patterns(fields.get(name)))
        if not all(0 < group.bits <= MOST_BITS for group in groups):
            raise ValueError("bits of no number")
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, re.error):
        raise ValueError(
            f"weight_dtype: cannot tell how many bits a weight takes in a checkpoint quantised by "
            f"{method!r}; say which it comes nearest to: int4, int8 or float8"
        ) from None
    return Packing(groups, left)


def _with_scales(bits: int, group: int | None, beside: float = SCALE) -> float:
    """Returns bits of an element, if each group has `beside` bits more."""
    return bits + (beside / group if group and group > 0 else 0.0)


def _integers(c: Fields) -> float:
    """Counts groups with a scale, and with a zero that takes as many bits as an element."""
    width = int(c["bits"])
    return _with_scales(width, c.get("group_size", 128), SCALE + width)


def _bitsandbytes(c: Fields) -> float:
    if not (c.get("load_in_4bit") or c.get("_load_in_4bit")):
        return 8.0
    # A scale of 32 bits for 64 elements; or one of 8 bits, and 32 bits more for 256 such scales.
    return 4 + (8 / 64 + 32 / (64 * 256) if c.get("bnb_4bit_use_double_quant") else 32 / 64)


def _hqq(c: Fields) -> float:
    inner = (c.get("quant_config") or {}).get("weight_quant_params") or c
    return _with_scales(int(inner["nbits"]), inner.get("group_size", 64), 2 * SCALE)


def _by_name(name: object) -> int:
    """Reads bits from the name of a dtype or of a method, weights' before activations'."""
    text = str(name).lower()
    found = re.search(r"(?:int|float)(\d+)_?w", text) or re.search(r"(?:int|float)(\d+)", text)
    return int(found[1])  # type: ignore[index]


def _torchao(c: Fields) -> float:
    kind: Any = c["quant_type"]
    options = c.get("quant_type_kwargs") or {}
    if isinstance(kind, Mapping):
        kind = kind.get("default", kind)
        options = kind.get("_data") or {}
        kind = kind["_type"]
    named = options.get("weight_dtype")
    bits = _by_name(kind if named is None else named)
    group = options.get("group_size") or (128 if bits < 8 else None)
    return _with_scales(bits, group, 2 * SCALE)


def _quanto(c: Fields) -> float:
    bits = _by_name(c["weights"])
    return _with_scales(bits, 128 if bits < 8 else None, 2 * SCALE)


def _aqlm(c: Fields) -> float:
    return c["num_codebooks"] * c["nbits_per_codebook"] / (c["in_group_size"] * c["out_group_size"])


METHODS: dict[str, Callable[[Fields], float]] = {
    "aqlm": _aqlm,
    "auto-round": _integers,
    "awq": lambda c: _integers({"group_size": c.get("q_group_size", 128), **c}),
    "bitnet": lambda c: 2.0,
    "bitsandbytes": _bitsandbytes,
    "eetq": lambda c: float(_by_name(c.get("weights") or "int8")),
    "fbgemm_fp8": lambda c: 8.0,
    "fouroversix": lambda c: 4 + 8 / 16,
    "fp8": lambda c: 8 + 32 / 128**2 if c.get("expert_dtype", "fp8") == "fp8" else c["mixed"],
    "fp_quant": lambda c: 4 + (8 / 16 if "nv" in str(c.get("forward_dtype")) else 8 / 32),
    "gptq": _integers,
    "higgs": lambda c: _with_scales(int(c["bits"]), c.get("group_size", 256)),
    "hqq": _hqq,
    "metal": lambda c: _with_scales(int(c["bits"]), c.get("group_size", 64), 2 * SCALE),
    "modelopt": lambda c: 4 + 8 / 16 if "4" in str(c["quant_algo"]) else 8.0,
    "mxfp4": lambda c: 4 + 8 / 32,
    "mxfp8": lambda c: 8 + 8 / 32,
    "nvfp4": lambda c: 4 + 8 / 16,
    "quanto": _quanto,
    "sinq": lambda c: _with_scales(int(c["nbits"]), c.get("group_size", 64), 2 * SCALE),
    "torchao": _torchao,
}
WITH_GROUPS = {"compressed-tensors"}


def _groups(c: Fields) -> tuple[Group, ...]:
    """Returns the groups of a method that has several."""
    found = []
    for group in c["config_groups"].values():
        weights, targets = group["weights"], _patterns(group.get("targets"))
        beside = SCALE if weights.get("symmetric", True) else SCALE + weights["num_bits"]
        if weights.get("type") == "float" and weights["num_bits"] == 4:
            beside = 8  # a scale in float8
        bits = _with_scales(int(weights["num_bits"]), weights.get("group_size"), beside)
        found.append(Group(bits, targets))
    if not found:
        raise ValueError("no groups")
    return tuple(found)


def _patterns(said: Any) -> tuple[str, ...]:
    """Returns the patterns of a field, of one or of several; raises if one cannot be searched."""
    patterns = (said,) if isinstance(said, str) else tuple(map(str, said or ()))
    for pattern in patterns:
        re.compile(pattern.removeprefix("re:") if pattern.startswith("re:") else "")
    return patterns


def _names(weight: Weight) -> list[str]:
    """Returns names of the module that has a weight, as checkpoints name it: experts one by one."""
    module, _, key = weight.name.rpartition(".")
    if not weight.is_expert:
        return [module]
    kinds = ("gate_proj", "up_proj") if "gate_up" in key else (key.removesuffix("_proj") + "_proj",)
    return [f"{module}.{key}", *(f"{module}.0.{kind}" for kind in kinds)]


def _any(patterns: tuple[str, ...], names: list[str]) -> bool:
    return any(_matches(pattern, name) for pattern in patterns for name in names)


def _targets(targets: tuple[str, ...], names: list[str]) -> bool:
    return not targets or "Linear" in targets or _any(targets, names)


def _matches(pattern: str, name: str) -> bool:
    """Whether a name has a part that a pattern describes."""
    if pattern.startswith("re:"):
        return re.match(pattern[3:], name) is not None
    part = re.escape(pattern).replace(r"\*", "[^.]*")
    return re.search(rf"(^|\.){part}(\.|$)", name) is not None
