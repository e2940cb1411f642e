"""The digest of a model's folder: which changes of its files it notices, and which not."""

import json
import os
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file

from pagedkv.cli.model_digest import identity_of

WEIGHTS = {"a.weight": torch.randn(64, 64), "b.weight": torch.randn(3), "norm": torch.ones(64)}


@pytest.fixture
def folder(tmp_path):
    return save(tmp_path / "model")


def save(folder, weights=WEIGHTS, files=1):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"model_type": "llama", "transformers_version": "5"}')
    (folder / "generation_config.json").write_text('{"temperature": 0.5}')
    (folder / "tokenizer.json").write_text("{}")
    if files == 1:
        save_file(weights, folder / "model.safetensors")
        return folder
    names, places = list(weights), {}
    for i in range(files):
        part = {name: weights[name] for name in names[i::files]}
        save_file(part, folder / f"model-{i + 1}-of-{files}.safetensors")
        places |= dict.fromkeys(part, f"model-{i + 1}-of-{files}.safetensors")
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return folder


def differs(folder, before) -> set[str]:
    now = identity_of(str(folder))
    return {part for part in before if before[part] != now[part]}


def test_place_age_and_distribution_over_files_do_not_matter(folder, tmp_path, monkeypatch):
    before = identity_of(str(folder))
    assert not differs(save(tmp_path / "sharded", files=2), before)
    copy = shutil.copytree(folder, tmp_path / "far" / "away")
    os.utime(copy / "model.safetensors", (1, 1))
    assert not differs(copy, before)
    monkeypatch.chdir(tmp_path)
    assert not differs("model", before)
    settings = '{"transformers_version": "6", "_name_or_path": "x", "model_type": "llama"}'
    (folder / "config.json").write_text(settings)
    (folder / "trainer_state.json").write_text("{}")
    (folder / "optimizer.pt").write_bytes(b"state")
    save_file({"a.weight": torch.ones(1)}, folder / "consolidated.safetensors")
    (folder / "README.md").write_text("new")
    assert not differs(folder, before)


@pytest.mark.parametrize("name", WEIGHTS)
def test_training_any_tensor_is_noticed(folder, name):
    before = identity_of(str(folder))
    size = (folder / "model.safetensors").stat().st_size
    times = os.stat(folder / "model.safetensors")
    trained = WEIGHTS | {name: WEIGHTS[name] * 1.001}
    save_file(trained, folder / "model.safetensors")
    os.utime(folder / "model.safetensors", ns=(times.st_atime_ns, times.st_mtime_ns))
    assert (folder / "model.safetensors").stat().st_size == size
    assert differs(folder, before) == {"weights"}


def test_a_few_numbers_changed_by_hand_may_go_unnoticed(folder):
    before = identity_of(str(folder))
    changed = WEIGHTS["a.weight"].clone()
    changed[0, 17] += 1  # between the first two places that are looked at
    save_file(WEIGHTS | {"a.weight": changed}, folder / "model.safetensors")
    assert not differs(folder, before)


@pytest.mark.parametrize(
    ("change", "part"),
    [
        ({"a.weight": WEIGHTS["a.weight"].half()}, "weights"),
        ({"a.weight": WEIGHTS["a.weight"].reshape(32, 128)}, "weights"),
        ({"c": torch.ones(1)}, "weights"),
    ],
    ids=["dtype", "shape", "one more"],
)
def test_names_shapes_and_dtypes_count(folder, change, part):
    before = identity_of(str(folder))
    save_file(WEIGHTS | change, folder / "model.safetensors")
    assert differs(folder, before) == {part}


@pytest.mark.parametrize(
    ("file", "part"),
    [
        ("config.json", "config"),
        ("generation_config.json", "generation_config"),
        ("tokenizer.json", "tokenizer"),
        ("tokenizer_config.json", "tokenizer"),
        ("special_tokens_map.json", "tokenizer"),
        ("chat_template.jinja", "tokenizer"),
        ("merges.txt", "tokenizer"),
    ],
)
def test_configurations_and_tokenizers_are_told_apart(folder, file, part):
    before = identity_of(str(folder))
    (folder / file).write_text('{"x": 1}')
    assert differs(folder, before) == {part}
    (folder / file).write_text("{")  # who loads it complains
    assert differs(folder, before) == {part}


def test_pickled_weights_are_known_as_well(folder):
    (folder / "model.safetensors").unlink()
    torch.save(WEIGHTS, folder / "pytorch_model.bin")
    (folder / "training_args.bin").write_bytes(b"1")
    before = identity_of(str(folder))
    (folder / "training_args.bin").write_bytes(b"2")
    assert not differs(folder, before)
    # Far from all places that are looked at in a large file: its archive has a checksum of it.
    large = torch.zeros(4_000_000)
    torch.save({"large": large}, folder / "pytorch_model.bin")
    before = identity_of(str(folder))
    large[1_234_567] = 1
    torch.save({"large": large}, folder / "pytorch_model.bin")
    assert differs(folder, before) == {"weights"}


def test_weights_that_cannot_be_loaded_have_an_identity_too(folder):
    before = identity_of(str(folder))
    (folder / "model.safetensors").write_bytes(b"torn")
    assert differs(folder, before) == {"weights"}
    (folder / "model.safetensors").unlink()
    assert differs(folder, before) == {"weights"}


def test_an_adapter_is_known_with_the_model_below_it(folder, tmp_path):
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    settings = {"base_model_name_or_path": str(folder), "r": 8}
    (adapter / "adapter_config.json").write_text(json.dumps(settings))
    lora = {"lora_A.weight": torch.ones(8, 64)}
    save_file(lora, adapter / "adapter_model.safetensors")
    before = identity_of(str(adapter))
    for base in (WEIGHTS | {"norm": torch.zeros(64)}, WEIGHTS):
        save_file(base, folder / "model.safetensors")
        assert differs(adapter, before) == ({"weights"} if base is not WEIGHTS else set())
    save_file({"lora_A.weight": torch.zeros(8, 64)}, adapter / "adapter_model.safetensors")
    assert differs(adapter, before) == {"weights"}
    before = identity_of(str(folder))
    for file in adapter.iterdir():  # beside a whole model, which it changes
        shutil.copy(file, folder)
    assert differs(folder, before) == {"config", "weights"}


def test_a_model_of_the_hub_is_known_by_its_files(folder, tmp_path):
    """Two commits of the same files, one of others, from a cache without a network."""
    cache = tmp_path / "hub" / "models--me--tiny"

    def commit(name: str, source) -> str:
        shutil.copytree(source, cache / "snapshots" / name)
        (cache / "refs").mkdir(exist_ok=True)
        (cache / "refs" / "main").write_text(name)
        code = "from pagedkv.cli.model_digest import identity_of; print(identity_of('me/tiny'))"
        env = os.environ | {"HF_HUB_CACHE": str(tmp_path / "hub"), "HF_HUB_OFFLINE": "1"}
        return subprocess.run(
            [sys.executable, "-c", code], env=env, check=True, capture_output=True, text=True
        ).stdout.strip()

    first = commit("a" * 40, folder)
    assert first == str(identity_of(str(folder)))
    (folder / "README.md").write_text("new")
    assert commit("b" * 40, folder) == first
    save_file({"a": torch.ones(3)}, folder / "model.safetensors")
    assert commit("c" * 40, folder) != first
