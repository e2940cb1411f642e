"""Coded pages for the checks on a device: made from dense ones by `formats.py`, and the truth.

Rows have a staging page in front and one at their end wherever half of K and V is int4. What no
query sees has scales of NaN, as dense pages have elements of NaN.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from pagedkv.kernels import formats, paged
from pagedkv.kernels.formats import PER_WORD, Pages

from .steps import Rows, Shape, Step, make_step

EACH = (("fp8", "fp8"), ("int8", "int8"), ("int4_channel", "int4_token"))
MIXED = (("dense", "int8"), ("int8", "int4_token"), ("int4_channel", "fp8"), ("fp8", "dense"))
SCALE = 2.0**-6  # of fp8: numbers up to 7


def served(formats_: tuple[str, str], device: str) -> bool:
    """Whether the device has kernels for the pair; what is compiled for it is compiled anyway."""
    if device != "cuda" or "fp8" not in formats_:
        return True
    return torch.cuda.get_device_capability() >= (8, 9)


def make_coded(step: Step, k_format: str, v_format: str) -> tuple[Step, Step]:
    """The step on coded pages, and one on dense pages in float64 that holds what those say."""
    count, size, device = len(step.k_pages), step.shape.page, step.q.device
    table, staged = step.table.clone(), None
    if "int4" in k_format + v_format:
        held = {
            (row, column)
            for row, (_, length) in enumerate(step.rows)
            for column in (0, (length - 1) // size)
            if length and (step.options["window"] is None or column)
        }
        where = [torch.tensor(x, device=device) for x in zip(*sorted(held))]
        staged = step.table[tuple(where)].long().clamp(min=0)
        table[tuple(where)] = count + torch.arange(len(staged), dtype=torch.int32, device=device)
    halves = [
        _code(x, format, staged)
        for x, format in ((step.k_pages, k_format), (step.v_pages, v_format))
    ]
    (k, k_known), (v, v_known) = halves
    known = replace(step, k_pages=k_known, v_pages=v_known)
    return replace(step, k_pages=k, v_pages=v, table=table), known


def _code(dense: Tensor, format: str, staged: Tensor | None) -> tuple[Pages, Tensor]:
    """The pages in a format, and what they then hold, in float64."""
    dense = dense.contiguous()
    staging = None if staged is None else dense[staged]
    if format == "dense":
        return Pages(format, dense, None, staging), dense.double()
    seen = ~dense.isnan().any(-1)  # [N, G, P]
    x, heads = dense.nan_to_num(0), dense.shape[1]
    scale = torch.full((heads, 1, 1), SCALE, device=dense.device) if format == "fp8" else None
    words, scales = formats.encode(x, format, scale)
    known = formats.decode(words, scales, format, torch.float64)
    known = known.where(seen[..., None], math.nan)
    if staged is not None and staging is not None:
        known[staged] = staging.double()
    if format == "fp8":
        return Pages(format, words, scales.flatten(), staging), known
    visible = seen.any(-1, keepdim=True).unsqueeze(-1) if "channel" in format else seen
    visible = visible if format != "int4_token" else visible.unsqueeze(-1)
    return Pages(format, words, scales.where(visible, math.nan).contiguous(), staging), known


def roundings(step: Step, known: Step) -> dict[str, object]:
    """What is rounded besides, for `steps.check`: weights with scales, K of scales by channel."""
    more: dict[str, object] = {}
    if step.q.dtype == torch.float32:
        return more
    if step.v_pages.format in ("int8", "int4_token"):
        more["weights"] = torch.bfloat16
    if step.v_pages.format == "fp8":
        more["weights"] = torch.float16
    if step.k_pages.format == "int4_channel":
        norms = (x.double().nan_to_num(0).norm(dim=-1).amax() for x in (step.q, known.k_pages))
        more["scores"] = 2.0**-12 * math.prod(norms) * abs(step.options["scale"])
    return more


def write(shape: Shape, pair: tuple[str, str], device: str, rows: Rows) -> tuple[Pages, ...]:
    """Coded pages after new K and V were written by kernels, then by the torch functions."""
    step = make_step(shape, rows, device)
    count, size, heads = len(step.k_pages), shape.page, shape.groups
    k, v = (torch.randn(len(step.slots), heads, shape.dim, device=device) for _ in "kv")
    k, v = k.to(shape.dtype), v.to(shape.dtype)
    found = []
    for x, format in zip((k, v), pair):
        words = torch.zeros(
            count, heads, size, shape.dim // PER_WORD[format], dtype=torch.int16, device=device
        )
        scales = {
            "fp8": torch.full((heads,), SCALE, device=device),
            "int8": torch.zeros(count, heads, size, dtype=torch.float16, device=device),
            "int4_channel": torch.zeros(
                count, heads, shape.dim, 2, dtype=torch.float16, device=device
            ),
            "int4_token": torch.zeros(count, heads, size, 2, dtype=torch.float16, device=device),
        }[format]
        staging = None
        if "int4" in "".join(pair):
            staging = torch.zeros(2, heads, size, shape.dim, dtype=shape.dtype, device=device)
        mine = Pages(format, words, scales, staging)
        found += [mine, mine.each(torch.clone), x]
    mine, twins, new = found[::3], found[1::3], found[2::3]
    if "int4" in "".join(pair):
        first, target = (torch.tensor(x, device=device) for x in ([3, 3 + 2 * size], [1, 0]))
        paged.write_pages(*new, *mine, first, target)
        for pages, x in zip(twins, new):
            each = torch.stack([x[at : at + size] for at in (3, 3 + 2 * size)]).transpose(1, 2)
            _put(pages, target, each)
    else:
        paged.write_kv(*new, *mine, step.slots)
        real = step.slots if device == "meta" else step.slots[step.slots >= 0]
        for pages, x in zip(twins, new):
            x = x if device == "meta" else x[step.slots >= 0]
            words, scales = formats.encode(x[:, :, None], pages.format, _static(pages))
            pages.data[real // size, :, real % size] = words[:, :, 0]
            if pages.format != "fp8":
                pages.scales[real // size, :, real % size] = scales[:, :, 0]
    return *mine, *twins


def _static(pages: Pages) -> Tensor | None:
    return pages.scales[:, None, None] if pages.format == "fp8" else None


def _put(pages: Pages, target: Tensor, values: Tensor) -> None:
    words, scales = formats.encode(values, pages.format, _static(pages))
    pages.data[target] = words
    if pages.format != "fp8":
        pages.scales[target] = scales
