"""The tables of `docs/compat.md`: which door serves which type of model, and why others do not.

python -m tests.hf.table docs/compat.md

builds every type of the installed transformers small, takes it through every door, and writes what
was found between the two markers of the file. `tests/hf/test_table.py` holds the file against it.
"""

from __future__ import annotations

import re
import sys
import tempfile
import textwrap
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers

from pagedkv import CacheConfig, LayerStreamer, PagedCache
from pagedkv.config import KV_FORMATS, formats_of
from pagedkv.errors import PagedKVError, UnsupportedModelError
from pagedkv.hf.model import cache_config, text_config
from pagedkv.models import layer_kinds, shared_layers
from pagedkv.models.kinds import index_layers
from tests.batch.generating import assert_same, generator
from tests.hf.doors import OPTIONS, SIZES, is_planned, reasons, rows_of_tokens
from tests.hf.images import GRIDDED, MROPE, PLAIN, pictured, seeing_model
from tests.hf.sounds import AUDIO
from tests.hf.tiny import CLOSE_CALL, generate, padded
from tests.hf.zoo import IMAGE_TEXT, built
from tests.hf.zoo import TYPES as TEXT_AND_IMAGES

DOCUMENT = Path(__file__).resolve().parents[2] / "docs/compat.md"
BEGIN, END = "<!-- made by tests/hf/table.py -->", "<!-- end -->"
WIDTH = 100
WHOLE_NAMES = {"break_on_hyphens": False, "break_long_words": False}
# Gemma 3's processor asks for images that are read both ways.
PICTURED = {*MROPE, *GRIDDED, *PLAIN} - {"gemma3"}
TYPES = sorted({*TEXT_AND_IMAGES, *AUDIO})
SERVED = ("layers keep", "`PagedCache`", "`BatchGenerator`", "`LayerStreamer`", "plan", "format")
REFUSED = ("refused because", "`LayerStreamer`")
OPEN = ("not judged, because",)


class Verdict(NamedTuple):
    """The result of trying a type.

    Attributes:
        header: of the table it belongs to.
        cells: of its row there, which types of the same outcome share.
    """

    header: tuple[str, ...]
    cells: tuple[str, ...]


def judge(kind: str) -> Verdict:
    """Takes a type through every door.

    Raises:
        AssertionError: other tokens than with transformers' own cache, or a plan for what no door
            serves.
    """
    try:
        model = built(kind)
    except Exception:  # of any kind: parts that are not installed, defaults that are no model
        return Verdict(OPEN, ("it could not be built here",))
    try:
        generate(model, padded(rows_of_tokens()), **OPTIONS)
    except Exception:  # the same, or it asks for images
        try:
            PagedCache(model, **SIZES).close()
        except UnsupportedModelError as error:
            return _refused(kind, model, error)
        return Verdict(OPEN, ("transformers itself does not generate from text alone here",))
    why = reasons(model)
    if all(why.values()):
        return _refused(kind, model, why["cache"])
    assert is_planned(model), "it is served, but not planned"
    assert why["cache"] is None, why["cache"]
    batch = _cell(why["batch"], taken(kind) if kind in {*IMAGE_TEXT, *AUDIO} else "yes")
    doors = (_cell(why["padded"]), batch, streams(kind), "yes")
    config = cache_config(model, max_tokens=64)
    return Verdict(SERVED, (kept(model, config), *doors, formats(config)))


def _refused(kind: str, model: Any, error: Any) -> Verdict:
    assert not is_planned(model), f"it is planned, but refused: {error}"
    return Verdict(REFUSED, (_reason(error), streams(kind)))


def _reason(error: Any) -> str:
    """Why a model is refused, without names of its own and without advice."""
    advice = r"\. (Use transformers' own|`PagedCache` and|`unknown=).*"
    reason = re.sub(rf"^\w+ \(.*?\) cannot [\w ]+: |{advice}", "", str(error))
    reason = re.sub(r".*of its K and V \((config: )?(.*)\)", r"\2", reason)
    reason = re.sub(r"^\w+Config has", "its configuration has", reason)
    reason = re.sub(r" is not one of .*", " is none of those served", reason)
    return re.sub(r"(; |, so |: this model ).*", "", reason)


def _cell(refused: str | None, served: str = "yes") -> str:
    return f"no: {_reason(refused)}" if refused else served


def taken(kind: str) -> str:
    """Returns the kinds of prompts that `BatchGenerator` takes of a type with more than text."""
    if kind not in {*PICTURED, *AUDIO}:
        return "text"
    model = seeing_model(kind)
    row = pictured(model, rows_of_tokens()[0])
    with generator(model) as batched:
        (result,) = batched.generate([row], do_sample=False, **OPTIONS)
    assert_same(result, generate(model, row, **OPTIONS))
    return "text, audio" if kind in AUDIO else "text, images"


def streams(kind: str) -> str:
    """Whether a type computes the same layer by layer, from a folder that it is saved to."""
    sees = kind in IMAGE_TEXT
    model = built(kind, sees)
    ids = rows_of_tokens()[0][None]
    try:
        expected = model(ids).logits
    except Exception:  # of any kind: it takes no text alone
        return "not tried"
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        try:
            with LayerStreamer.from_pretrained(folder, device="cpu", images=sees) as streamer:
                actual = streamer.model(ids).logits
        except PagedKVError:
            return "no"
    assert (actual - expected).abs().max() < CLOSE_CALL, "it streams other logits"
    return "yes"


def kept(model: Any, config: CacheConfig) -> str:
    """Describes what the layers of a model keep of a text."""
    chosen = {config.group_of[layer] for layer in index_layers(layer_kinds(text_config(model)))}
    shapes = {shape for group, shape in enumerate(config.shapes) if group not in chosen}
    if any(shape.v_is_k for shape in shapes):
        text = "latents"
    elif shared_layers(text_config(model)):
        text = "K and V that layers share"
    elif len(shapes) > 1:
        text = "K and V of several shapes"
    else:
        text = "K and V"
    text += ", index keys" if chosen else ""
    return f"{text}, recurrent states" if config.states else text


def formats(config: CacheConfig) -> str:
    """The formats that pages may have, given head dims that are multiples of what those ask for."""
    wide = {"head_dim": 64, "v_head_dim": 64}
    groups = tuple(g if g.v_is_k else replace(g, **wide) for g in config.groups)
    found = []
    for name in KV_FORMATS:
        try:
            replace(config, head_dim=64, groups=groups, page_size="auto", kv_format=name)
            found.append(name)
        except ValueError:
            continue
    return "all" if found == [*KV_FORMATS] else " ".join(found)


def rendered(found: dict[str, Verdict], release: str = transformers.__version__) -> str:
    """The text between the markers."""
    served = {kind for kind, verdict in found.items() if verdict.header == SERVED}
    missing = sum(verdict.header == OPEN for verdict in found.values())
    units = {name: formats_of(name)[0].dim_unit for name in KV_FORMATS if name != "dense"}
    asked = ", ".join(f"`{name}` for multiples of {unit}" for name, unit in units.items())
    listed, audio = len({*found} - {*AUDIO}), len(served & {*AUDIO})
    parts = [
        f"**Served: {len(served) - audio} of the {listed} causal and image-text types of "
        f"transformers {release}**,\nand {audio} audio-text types; {missing} could not be judged.",
        textwrap.fill(f"Formats ask for head dims that fit them: {asked}.", WIDTH),
    ]
    for header in (SERVED, REFUSED, OPEN):
        of_table = {
            kind: found[kind].cells for kind in sorted(found) if found[kind].header == header
        }
        if of_table:
            parts += _table(header, of_table)
    return "\n\n".join(parts)


def _table(header: tuple[str, ...], found: dict[str, tuple[str, ...]]) -> list[str]:
    """A table with a row for each outcome, and the types of each row."""
    lines = [_line("#", *header, "types"), _line(*["---"] * (len(header) + 2))]
    lists = []
    counts, together = Counter(found.values()), Counter(cells[0] for cells in found.values())
    rows = sorted(counts, key=lambda cells: (-together[cells[0]], cells[0], -counts[cells], cells))
    for i, cells in enumerate(rows, 1):
        lines.append(_line(str(i), *cells, str(counts[cells])))
        kinds = ", ".join(kind for kind, own in found.items() if own == cells)
        lists.append(textwrap.fill(f"{i}. {kinds}", WIDTH, subsequent_indent="   ", **WHOLE_NAMES))
    return ["\n".join(lines), "\n".join(lists)]


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def parsed(text: str) -> dict[str, Verdict]:
    """Reads the verdict on each type from the text between the markers."""
    found = {}
    for header in (SERVED, REFUSED, OPEN):
        head = _line("#", *header, "types")
        if head not in text:
            continue
        table, lists = text[text.index(head) :].split("\n\n")[:2]
        rows = [line.strip("| ").split(" | ") for line in table.splitlines()[2:]]
        lists = re.split(r"(?:^|\n)\d+\. ", lists)[1:]
        for (_, *cells, count), kinds in zip(rows, lists, strict=True):
            names = re.split(r",\s+", kinds.strip())
            assert len(names) == int(count), f"{cells}: {count} types, listed are {len(names)}"
            found |= dict.fromkeys(names, Verdict(header, tuple(cells)))
    return found


def part(document: str) -> str:
    """Returns the part of a document between the markers."""
    return document.partition(BEGIN)[2].partition(END)[0].strip()


def judged(kinds: Iterable[str] = TYPES) -> tuple[dict[str, Verdict], dict[str, str]]:
    """By type, what was found; and of those that are wrong, what is."""
    found, wrong = {}, {}
    for kind in kinds:
        try:
            found[kind] = judge(kind)
        except Exception as error:
            wrong[kind] = f"{type(error).__name__}: {error}"
    return found, wrong


if __name__ == "__main__":
    torch.set_num_threads(1)
    file = Path(sys.argv[1])
    found, wrong = judged()
    if wrong:
        sys.exit("\n".join(f"{kind}: {what}" for kind, what in wrong.items()))
    before, _, rest = file.read_text(encoding="utf-8").partition(BEGIN)
    text = f"{before}{BEGIN}\n\n{rendered(found)}\n\n{END}{rest.partition(END)[2]}"
    file.write_text(text, encoding="utf-8")
