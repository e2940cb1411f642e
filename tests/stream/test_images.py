"""Models that take images: their decoder streams, the tower for images stays on the device."""

import json

import pytest
import transformers

from pagedkv import BudgetExceeded, PagedCache, plan_memory
from pagedkv.errors import CheckpointMismatch, PagedKVError, UnsupportedModelError
from pagedkv.models import types_with
from pagedkv.models.skeleton import find_layers
from pagedkv.planner.model_shape import aligned
from tests.effort import few
from tests.hf.images import looking, seeing
from tests.hf.tiny import assert_same_tokens, generate, prompts
from tests.hf.zoo import IMAGE_TEXT, VOCAB, built
from tests.planner.models import read_model
from tests.stream.models import assert_bits, in_memory, make, placed, ragged, save, stream

# By the form of their pixels: patches of a grid, or whole images.
GRIDS = ["qwen2_5_vl", "qwen3_vl", "qwen2_vl", "glm4v", "qwen3_5", "qwen3_vl_moe", "glm4v_moe"]
GRIDS += ["glm_ocr", "glm46v", "glmga", "qwen3_5_moe", "glm5_next", "qwen4_exp", "cosmos3_omni"]
GRIDS += ["cohere_compass"]
WHOLE = ["internvl", "llava", "gemma3", "mistral3", "smolvlm", "aya_vision", "cohere2_vision"]
WHOLE += ["idefics2", "idefics3", "got_ocr2", "lighton_ocr", "ovis2", "paligemma", "qianfan_ocr"]
WHOLE += ["pp_chart2table", "step3p7"]
PAGED = ["qwen2_5_vl", "llava", "qwen3_5"]


def saved(kind, folder):
    """A folder with a model of this type; and the model as transformers loads it."""
    model = built(kind, sees=True)
    save(model, folder)
    expected = in_memory(folder, type(model)).eval()
    expected.generation_config = model.generation_config
    return expected


def opened(folder, expected, **options):
    """Opens the same folder as a streamed model."""
    streamer = stream(folder, images=True, **options)
    streamer.model.generation_config = expected.generation_config
    return streamer


@pytest.mark.parametrize("kind", few([*GRIDS, *WHOLE], "qwen2_5_vl", "llava", "gemma3"))
def test_texts_and_images_give_the_bits_of_the_model_in_memory(kind, tmp_path):
    expected = saved(kind, tmp_path)
    batch = (seeing if kind in GRIDS else looking)(expected, *prompts(6, 6))
    other = {**batch, "pixel_values": -batch["pixel_values"]}
    seen = [generate(expected, rows).logits[0] for rows in (batch, other)]
    assert (seen[0] - seen[1]).abs().max() > 0.01, "the image is not seen"
    with opened(tmp_path, expected) as streamer:
        assert type(streamer.model) is type(expected)
        assert_bits(streamer.model, expected, batch)
        assert_bits(streamer.model, expected)
        assert streamer.stats().bytes_read > 0
        streamed = {name for name, p in streamer.model.named_parameters() if p.is_meta}
        assert streamed
        assert not any("vision" in name or "visual" in name for name in streamed)


@pytest.mark.parametrize("kind", few([*GRIDS, *WHOLE], "mistral3"))
def test_images_are_seen_beside_an_embedding_and_a_head_that_stream(kind, tmp_path):
    expected = saved(kind, tmp_path)
    batch = (seeing if kind in GRIDS else looking)(expected, *prompts(6, 6))
    options = {"embedding": False, "head": False, "head_rows": VOCAB}
    with placed(tmp_path, images=True, **options) as streamer:
        streamer.model.generation_config = expected.generation_config
        assert_bits(streamer.model, expected, batch)


@pytest.mark.parametrize("kind", few(PAGED, "qwen2_5_vl"))
def test_pages_serve_images_of_a_streamed_model(kind, tmp_path):
    expected = saved(kind, tmp_path)
    batch = (seeing if kind in GRIDS else looking)(expected, *prompts(6, 6))
    with (
        opened(tmp_path, expected) as streamer,
        PagedCache(streamer.model, page_size=4, max_tokens=512) as cache,
    ):
        actual = generate(streamer.model, batch, cache)
    assert_same_tokens(actual, generate(expected, batch))


def test_a_checkpoint_of_both_kinds_is_opened_for_text_unless_images_are_asked_for(tmp_path):
    expected = saved("qwen3_5", tmp_path)
    with stream(tmp_path) as streamer:
        assert type(streamer.model).__name__ == "Qwen3_5ForCausalLM"
        assert_bits(streamer.model, in_memory(tmp_path))
    with opened(tmp_path, expected) as streamer:
        assert type(streamer.model).__name__ == "Qwen3_5ForConditionalGeneration"


def test_images_of_a_model_that_takes_none_are_refused(tmp_path):
    save(make("llama"), tmp_path)
    with pytest.raises(UnsupportedModelError, match="llama is no model that takes images"):
        stream(tmp_path, images=True)


def test_a_tower_that_the_class_for_text_does_not_take_is_refused_with_the_way_out(tmp_path):
    saved("mllama", tmp_path)
    words = r"tensors without a parameter: .*images=True opens it as MllamaForConditional"
    with pytest.raises(CheckpointMismatch, match=words):
        stream(tmp_path)


def test_a_tower_with_tensors_missing_is_refused_by_their_names(tmp_path):
    expected = saved("llava", tmp_path)
    state = expected.state_dict()
    gone = next(name for name in state if "vision_tower" in name)
    del state[gone]
    expected.save_pretrained(tmp_path / "cut", state_dict=state)
    with pytest.raises(CheckpointMismatch) as refused:
        stream(tmp_path / "cut")
    assert refused.value.missing == (gone,)


def test_a_configuration_without_its_tower_is_refused_by_the_names_of_its_tensors(tmp_path):
    saved("llava", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    del config["vision_config"]  # transformers takes its default for one
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointMismatch, match=r"vision_tower.* has shape \[.*expected \["):
        stream(tmp_path)


PLANNED = sorted({*GRIDS, *WHOLE, "ernie4_5_vl_moe"} - {"glm5_next", "paligemma"})  # are refused


@pytest.mark.parametrize("kind", few(PLANNED, "qwen3_5"))
def test_a_plan_counts_what_is_loaded_byte_for_byte(kind, tmp_path):
    saved(kind, tmp_path)
    for images in (True, False):
        shape = read_model(tmp_path, images=images)
        with stream(tmp_path, images=images) as streamer:
            origins = streamer._store.origins
            read = {piece.source for copies in origins.copies.values() for piece in copies}
            read |= {tensor for made in origins.conversions.values() for _, tensor in made.sources}
            layers = find_layers(streamer.model)[1]
        assert shape.exact
        assert shape.weights == sum(aligned(tensor.nbytes) for tensor in read)
        assert len(shape.layers) == len(layers)
        assert bool(shape.tower) == (images or kind not in types_with("text_alone"))


def test_a_plan_with_the_tower_is_kept_to_and_one_without_it_refused(tmp_path):
    expected = saved("qwen3_5", tmp_path)
    batch = seeing(expected, *prompts(6, 6))
    options = {"batch": 2, "length": 64, "device": "cpu"}
    with pytest.raises(BudgetExceeded) as refused:
        plan_memory(tmp_path, device_memory="4KiB", images=True, **options)
    memory = refused.value.needed
    with opened(tmp_path, expected, device_memory=memory, batch=2, length=64) as streamer:
        plan = streamer.plan
        assert plan.streams
        assert plan.device_bytes["glue"] > plan.shape.tower > 0
        assert "tower for images" in str(plan)
        assert_same_tokens(generate(streamer.model, batch), generate(expected, batch))
    with_text = plan_memory(tmp_path, device_memory=memory, **options)
    with pytest.raises(ValueError, match="plan: expected one made with images=True"):
        opened(tmp_path, expected, plan=with_text)


# Types of which one is not served, by what is said.
REFUSED = {
    "florence2": "expected one list", "git": "expected one list", "idefics": "expected one list",
    "shieldgemma2": "parameters without a tensor",
}  # fmt: skip


@pytest.mark.slow
def test_every_image_text_type_streams_or_is_refused_by_name(tmp_path, capsys):
    served, opened_only, refused, not_built = [], [], {}, []
    for kind in sorted(IMAGE_TEXT):
        try:
            expected = saved(kind, tmp_path / kind)
        except Exception:  # of any kind: parts that are missing, defaults that are no model
            not_built.append(kind)
            continue
        try:
            generate(expected, ragged())
            text = True
        except Exception:  # it asks for images
            text = False
        try:
            with opened(tmp_path / kind, expected) as streamer:
                assert type(streamer.model) is type(expected)
                if text:
                    assert_bits(streamer.model, expected)
                (served if text else opened_only).append(kind)
        except PagedKVError as error:
            refused[kind] = str(error)
    with capsys.disabled():
        print(f"\ntransformers {transformers.__version__}: {len(served)} image-text types stream")
        print(f"  served: {' '.join(served)}")
        print(f"  opened, but take no text alone: {' '.join(opened_only)}")
        print(f"  refused: {' '.join(refused)}\n  not built: {' '.join(not_built)}")
    assert refused.keys() <= REFUSED.keys()
    assert all(REFUSED[kind] in why for kind, why in refused.items())
    assert len(served) >= 60
