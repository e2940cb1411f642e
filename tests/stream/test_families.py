import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from pagedkv.hf.fingerprint import fingerprint_of
from tests.effort import each_value, few
from tests.stream.models import THIRTY, VARIED, assert_bits, in_memory, make, save, stream


@pytest.mark.parametrize("family", few([*THIRTY, "falcon_h1"], *VARIED))
def test_logits_and_tokens_are_those_in_memory_to_the_last_bit(family, tmp_path):
    folder = save(make(family), tmp_path)
    before = sorted((f.name, f.stat().st_mtime_ns) for f in tmp_path.iterdir())
    expected = in_memory(folder)
    for resident in (0, 2):
        with stream(folder, resident_layers=resident) as streamer:
            assert_bits(streamer.model, expected)
            assert fingerprint_of(streamer.model) == fingerprint_of(expected) != b""
            meta = {name for name, p in streamer.model.named_parameters() if p.is_meta}
            assert meta, "nothing was streamed"
            assert not any("embed" in name or name == "norm.weight" for name in meta)
            assert streamer.stats().bytes_read > 0
    assert sorted((f.name, f.stat().st_mtime_ns) for f in tmp_path.iterdir()) == before


@pytest.mark.parametrize(
    ("dtype", "family"),
    each_value([torch.bfloat16, torch.float16], ["llama", "mixtral", "gpt2", "gpt_neox"]),
)
def test_another_dtype_is_cast_as_in_memory(family, dtype, tmp_path):
    folder = save(make(family), tmp_path)
    expected = in_memory(folder, dtype=dtype)
    with stream(folder, dtype=dtype) as streamer:
        assert streamer.model.dtype == dtype
        assert_bits(streamer.model, expected)
        assert fingerprint_of(streamer.model) == fingerprint_of(expected)


def test_auto_is_the_dtype_of_the_checkpoint(tmp_path):
    folder = save(make("llama").to(torch.bfloat16), tmp_path)
    with stream(folder) as streamer:
        assert streamer.model.dtype == torch.bfloat16
        assert_bits(streamer.model, in_memory(folder))


@pytest.mark.parametrize("wide", ["model.embed_tokens.weight", "model.norm.weight"])
def test_without_a_dtype_in_the_configuration_auto_is_the_one_that_the_loader_finds(wide, tmp_path):
    """It takes the first by name; files have wide tensors first."""
    make("llama").to(torch.bfloat16).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "dtype": None}))
    weights = load_file(tmp_path / "model.safetensors")
    save_file(
        {**weights, wide: weights[wide].float()},
        tmp_path / "model.safetensors",
        metadata={"format": "pt"},
    )
    expected = in_memory(tmp_path, dtype="auto")
    with stream(tmp_path) as streamer:
        assert_bits(streamer.model, expected)
    with stream(tmp_path, device_memory="10MB", length=32) as streamer:
        assert streamer.plan.cache.dtype == str(expected.dtype).removeprefix("torch.")
