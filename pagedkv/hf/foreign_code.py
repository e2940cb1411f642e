"""Code in a model that others have written, of which nobody knows whether rows can share a step.

A look at names and signatures would miss what such code does: a mean over the tokens of a forward,
the longest position, a state between forwards. So it is found here, and tried (`batch/tried.py`).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

# Packages whose modules and hooks are right for packed rows, or do the same to every token.
KNOWN = {"pagedkv", "torch", "transformers", "accelerate", "peft", "bitsandbytes", "deepspeed"}
KNOWN |= {"compressed_tensors", "fla"}  # transformers takes modules of the last where it finds it
# These make what a forward of `generate` is given; packed rows do not call them.
FEED = (
    "_prefill",
    "prepare_inputs_for_generation",
    "_prepare_position_ids_for_generation",
    "_update_model_kwargs_for_generation",
)
SMALL = 1 << 16  # elements of a buffer that is kept while a model is tried: no packed weights

Code = frozenset[Any]


def foreign_code(model: PreTrainedModel) -> dict[Any, str]:
    """Finds classes and functions of others in the modules that see packed rows.

    Returns:
        What runs where, by class or function: equal keys mean that the same code runs.
    """
    found: dict[Any, str] = {}
    known: dict[int, Any] = {}  # most modules run what another one does

    def note(path: str, code: Any) -> None:
        code = _bare(code)
        if id(code) in known:
            return
        if _is_known(code):
            known[id(code)] = code
        else:
            name = f"{code.__module__}.{code.__qualname__}"
            key = code
            with suppress(TypeError):  # functions of numpy take no weak reference
                key = weakref.ref(code)
            found.setdefault(key, f"{path or 'it'} runs {name}")

    for path, module in on_packed_rows(model):
        note(path, type(module))
        note(path, getattr(type(module), "forward", None))
        for own in [*vars(module).values()]:
            if callable(own):
                note(path, own)
    for name in FEED:
        note("", getattr(model, name, None))
    return found


def on_packed_rows(model: PreTrainedModel) -> Iterator[tuple[str, nn.Module]]:
    """Yields a model's modules that see packed rows: not its towers, which see images."""
    decoder, head = model.get_decoder(), model.get_output_embeddings()
    inside = {*decoder.modules()}
    for path, module in model.named_modules():
        if module in inside or module is head or any(one is decoder for one in module.modules()):
            yield path, module


def origin_of(code: Any) -> tuple[str, str]:
    """Returns the Python module in which a function was written, and its name there."""
    code = _bare(code)
    return str(code.__module__), code.__qualname__


def _bare(code: Any) -> Any:
    """A function without its arguments and object; of another object its class."""
    while isinstance(code, partial):
        code = code.func
    code = getattr(code, "__func__", code)
    return code if hasattr(code, "__qualname__") else type(code)


def _is_known(code: Any) -> bool:
    """Whether a class or function is of a known package."""
    return {home.partition(".")[0] for home in homes_of(code)} <= {*KNOWN, "builtins"}


def homes_of(code: Any) -> set[str]:
    """Returns the Python modules of a class or function; a wrapper may bear the name of another."""
    code = _bare(code)
    homes = getattr(code, "__module__", None), getattr(code, "__globals__", {}).get("__name__")
    return {home for home in homes if home is not None}


@contextmanager
def unmarked(model: PreTrainedModel) -> Iterator[None]:
    """Takes back, at its end, what forwards change in attributes, small buffers and random numbers.

    Else code that keeps something between forwards would be another once it was tried. Dropout
    rests within it: a model in training draws at random, whatever code runs in it.
    """
    before = [
        (module, dict(vars(module)), dict(module._buffers)) for _, module in on_packed_rows(model)
    ]
    # A module may keep a scale as an attribute of its weight, and move it in the first forward.
    parameters = [(part, dict(vars(part))) for part in model.parameters()]
    small = [
        (buffer, buffer._version, buffer.clone())
        for _, _, buffers in before
        for buffer in buffers.values()
        if buffer is not None
        and buffer.numel() <= SMALL
        and not buffer.is_inference()
        and not hasattr(buffer, "elements")  # one that a streamer brings comes anew in every pass
    ]
    cards = {part.device for part in model.parameters() if part.is_cuda}
    with torch.random.fork_rng([*cards]):
        for module, *_ in before:
            vars(module)["training"] = False
        try:
            yield
        finally:
            changed = [(vars(part), kept) for part, kept in parameters]
            for module, kept, buffers in before:
                changed += [(vars(module), kept), (module._buffers, buffers)]
            for present, former in changed:
                for name in present.keys() - former.keys():
                    del present[name]
                present.update(former)
            for buffer, version, content in small:
                if buffer._version != version:  # a graph under way may need those that are the same
                    buffer.copy_(content)
