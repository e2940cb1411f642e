"""Models that no list knows: right through every door after a look, or refused with the layer."""

from copy import deepcopy

import pytest
import torch

from pagedkv import BatchGenerator
from pagedkv.batch.packed_cache import PackedCache
from pagedkv.errors import UnsupportedModelError
from pagedkv.hf import PagedCache
from pagedkv.models.facts import FACTS
from pagedkv.models.seen import seen_of
from tests.effort import few
from tests.hf.doors import through_batch, through_padded_cache
from tests.hf.modes import made
from tests.hf.own import own_model, truth
from tests.hf.tiny import prompts

SIZES = {"page_size": 4, "max_tokens": 512}
DOORS = {"cache": PagedCache, "batch": BatchGenerator}
doors = pytest.mark.parametrize("door", DOORS.values(), ids=DOORS)
# What they are made of: convolutions, delta rules, Mamba-2, latents, sinks; and some of it at once.
PARTS = ["lfm2", "qwen3_next", "nemotron_h", "deepseek_v3", "gpt_oss"]
MIXED = ["kimi_linear", "falcon_h1", "zamba2", "zaya", "longcat_flash", "mimo_v2_flash"]


@pytest.fixture
def unlisted(monkeypatch):
    """Makes a model whose type no list has."""

    def make(family):
        model = deepcopy(made(family))
        monkeypatch.delitem(FACTS, model.config.model_type)
        return model

    return make


def look(door, model):
    door(model, **SIZES, unknown="check").close()


@pytest.mark.parametrize("family", few([*PARTS, *MIXED], "qwen3_next", "deepseek_v3"))
def test_a_type_of_known_parts_is_refused_without_a_look_and_right_behind_one(family, unlisted):
    model = unlisted(family)
    for door in DOORS.values():
        with pytest.raises(UnsupportedModelError, match='unknown="check"'):
            door(model, **SIZES)
    with pytest.warns(UserWarning, match=r"no list knows .*served: .* layers? with"):
        look(BatchGenerator, model)
    rows = prompts(14, 9, 12)
    through_padded_cache(model, rows)
    through_batch(model, rows)


RIGHT = ["", "slides", "moves K and V", "counts by the layer's length"]


@pytest.mark.parametrize("habit", RIGHT)
def test_a_class_of_ones_own_is_held_once(habit, recwarn):
    model, (prompt,) = own_model(habit), prompts(24)
    look(PagedCache, model)
    look(BatchGenerator, model)
    said = [str(each.message) for each in recwarn]
    assert sum("differs by" in one for one in said) == 1
    with BatchGenerator(model, **SIZES) as generator:
        (result,) = generator.generate([prompt.tolist()], max_new_tokens=8, do_sample=False)
    assert result.tokens == truth(model, prompt, 8)
    assert seen_of(deepcopy(model).config) is None


DISTANCE = r"is another by [0-9.]+e[-+]\d+ of it for"
WRONG = {
    "biases its scores": rf"layer 0 .*{DISTANCE} rows alone",
    "counts by the cache's length": rf"layer 1 .*{DISTANCE} rows alone",  # of a layer before it
    "remembers by itself": r"layer 1 .* for the same text again: .*beside its cache",
    "draws at random": r"layer 0 .* for the same text again: it draws at random",
    "wants long texts": r"it fails by itself \(ZeroDivisionError",
    "shares K and V": "layer 1 keeps 0 of 8 tokens",
    "changes V": r"rows alone in pages fail in layer 0 .*tanh",
    "biases its mask": "rows alone in pages fail in layer 0 .*attention_mask",
    "slides in turn": "rows alone in pages fail in layer 1 .*window of 8",
}


@pytest.mark.parametrize(
    ("habit", "door"), [(habit, [*DOORS.values()][i % 2]) for i, habit in enumerate(WRONG)]
)
def test_a_model_that_gives_something_else_is_refused_with_the_layer(door, habit):
    model = own_model(habit)
    before = model.config._attn_implementation
    for _ in range(2):  # what failed is not remembered
        with pytest.raises(UnsupportedModelError, match=WRONG[habit]):
            look(door, model)
    assert model.config._attn_implementation == before


@pytest.mark.filterwarnings("ignore:model. no list knows")
def test_packed_rows_are_tried_apart():
    model = own_model("counts by the shape of K")
    look(PagedCache, model)
    for _ in range(2):
        with pytest.raises(UnsupportedModelError, match=r"packed rows fail in .*one length"):
            BatchGenerator(model, **SIZES)


WAYS = {"rows alone": (PagedCache, 1), "forks": (PagedCache, 2), "padded rows": (PagedCache, 3)}
WAYS |= {"packed rows": (PackedCache, 1)}


@pytest.mark.filterwarnings("ignore:model. no list knows")
@pytest.mark.parametrize("way", WAYS)
def test_each_way_is_held(way, monkeypatch):
    """Finds a way that is computed and not compared, or compared with itself."""
    kind, rows = WAYS[way]
    right = kind.unpacked

    def wrong(cache, out, query):
        return right(cache, out, query) * (1.01 if len(query) == rows else 1)

    monkeypatch.setattr(kind, "unpacked", wrong)
    with pytest.raises(UnsupportedModelError, match=f"layer 0 .*{DISTANCE} {way}"):
        look(BatchGenerator, own_model())


def test_what_a_door_may_be_told_is_checked():
    with pytest.raises(ValueError, match="unknown: expected None or 'check', got True"):
        PagedCache(own_model(), unknown=True)


@pytest.mark.filterwarnings("ignore:model. no list knows")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rounding_in_16_bits_is_not_taken_for_another_model(dtype, unlisted):
    """Finds a limit that is below what the roundings of right ways add up to."""
    look(BatchGenerator, unlisted("deepseek_v3").to(dtype))
