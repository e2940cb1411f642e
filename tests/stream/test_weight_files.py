"""Folders with several sets of weights: every reader takes those that `from_pretrained` takes."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from pagedkv import LayerStreamer
from pagedkv.cli.model_digest import identity_of
from pagedkv.errors import CheckpointError, UnsupportedModelError
from pagedkv.hf.fingerprint import fingerprint_of
from pagedkv.models.checkpoint import Checkpoint
from pagedkv.stream.skeleton import find_folder
from tests.hf.tiny import padded, prompts, tiny
from tests.planner.models import read_model

SHARDS, SINGLE, INDEX = "20KB", "model.safetensors", "model.safetensors.index.json"


@pytest.fixture(scope="module")
def sets(tmp_path_factory):
    """Two models of one configuration: each in shards, in one file, and pickled."""
    folder = tmp_path_factory.mktemp("sets")
    for name, seed in (("a", 0), ("b", 1)):
        torch.manual_seed(seed)
        model = tiny()
        model.save_pretrained(folder / name)
        model.save_pretrained(folder / f"{name}-shards", max_shard_size=SHARDS)
        (folder / f"{name}-pickled").mkdir()
        model.config.save_pretrained(folder / f"{name}-pickled")
        torch.save(model.state_dict(), folder / f"{name}-pickled" / "pytorch_model.bin")
    return folder


def explicit(folder, name):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"transformers_weights": name}))


def single_beside_shards(folder, sets):
    shutil.copy(sets / "b" / SINGLE, folder)


def pickles_beside(folder, sets):
    shutil.copy(sets / "b-pickled" / "pytorch_model.bin", folder)


def variant_beside(folder, sets):
    shutil.copy(sets / "b" / SINGLE, folder / "model.fp16.safetensors")


def others_of_any_name(folder, sets):
    shutil.copy(sets / "b" / SINGLE, folder / "consolidated.safetensors")
    for shard in (sets / "b-shards").glob("*.safetensors"):
        shutil.copy(shard, folder / shard.name.replace("-of-", "-of-9"))


def named_file(folder, sets):
    shutil.copy(sets / "b" / SINGLE, folder / "other.safetensors")
    explicit(folder, "other.safetensors")


def named_index(folder, sets):
    shutil.copy(sets / "b" / SINGLE, folder)
    shutil.copy(folder / INDEX, folder / "other.safetensors.index.json")
    explicit(folder, "other.safetensors.index.json")


def a_tensor_in_two_shards(folder, sets):
    """The index names the first, transformers takes the last."""
    first, *_, last = sorted(folder.glob("model-*.safetensors"))
    name = next(iter(load_file(first)))
    again = {name: load_file(first)[name] + 1}
    save_file(load_file(last) | again, last, metadata={"format": "pt"})


def a_tensor_the_index_forgot(folder, sets):
    said = json.loads((folder / INDEX).read_text())
    places = said["weight_map"]
    places.pop(next(t for t, file in places.items() if [*places.values()].count(file) > 1))
    (folder / INDEX).write_text(json.dumps(said))


def shards_of_an_index_in_another_order(folder, sets):
    """The index says the wrong one of its files of each tensor."""
    said = json.loads((folder / INDEX).read_text())
    files = list(said["weight_map"].values())
    said["weight_map"] = dict(zip(said["weight_map"], files[1:] + files[:1]))
    (folder / INDEX).write_text(json.dumps(said))


BESIDE = [single_beside_shards, pickles_beside, variant_beside, others_of_any_name, named_file]
OF_SHARDS = [
    named_index, a_tensor_in_two_shards, a_tensor_the_index_forgot,
    shards_of_an_index_in_another_order,
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "change"),
    [("a", change) for change in BESIDE] + [("a-shards", change) for change in BESIDE + OF_SHARDS],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_every_reader_takes_what_from_pretrained_takes(kind, change, sets, tmp_path):
    folder = shutil.copytree(sets / kind, tmp_path / "model")
    change(folder, sets)
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    batch = padded(prompts(6))
    with torch.no_grad(), LayerStreamer.from_pretrained(folder, device="cpu") as streamer:
        assert fingerprint_of(streamer.model) == fingerprint_of(loaded)
        assert torch.equal(streamer.model(**batch).logits, loaded(**batch).logits)
    loaded.save_pretrained(tmp_path / "again")
    assert identity_of(str(folder))["weights"] == identity_of(str(tmp_path / "again"))["weights"]
    assert read_model(folder).exact
    read = [tensor.nbytes for tensor in Checkpoint.open(folder).tensors.values()]
    assert sum(read) == sum(tensor.nbytes for tensor in loaded.state_dict().values())


@pytest.mark.parametrize("named", [False, True], ids=["by the index", "by both"])
def test_a_dtype_that_an_index_names_counts_where_the_configuration_names_none(
    named, sets, tmp_path
):
    folder = shutil.copytree(sets / "a-shards", tmp_path / "model")
    index, config = (folder / name for name in (INDEX, "config.json"))
    said, fields = json.loads(index.read_text()), json.loads(config.read_text())
    said["metadata"]["dtype"] = "bfloat16"
    index.write_text(json.dumps(said))
    if not named:
        del fields["dtype"]
        config.write_text(json.dumps(fields))
    loaded = AutoModelForCausalLM.from_pretrained(folder, dtype="auto").eval()
    assert loaded.dtype == (torch.float32 if named else torch.bfloat16)
    batch = padded(prompts(6))
    with torch.no_grad(), LayerStreamer.from_pretrained(folder, device="cpu") as streamer:
        assert torch.equal(streamer.model(**batch).logits, loaded(**batch).logits)
    assert read_model(folder).dtype == str(loaded.dtype).removeprefix("torch.")


def test_pickles_are_the_weights_where_there_are_no_others(sets, tmp_path):
    """They are known by their bytes, planned by the configuration, and not streamed."""
    folder = shutil.copytree(sets / "a-pickled", tmp_path / "model")
    before = identity_of(str(folder))["weights"]
    shutil.copy(sets / "b" / SINGLE, folder / "consolidated.safetensors")
    assert identity_of(str(folder))["weights"] == before
    assert not read_model(folder).exact
    with pytest.raises(CheckpointError, match="pickle weights are not read in place"):
        LayerStreamer.from_pretrained(folder)
    shutil.copy(sets / "b-pickled" / "pytorch_model.bin", folder)
    assert identity_of(str(folder))["weights"] != before


def test_an_index_of_pickles_that_are_elsewhere_leaves_a_plan_the_configuration(sets, tmp_path):
    shutil.copy(sets / "a" / "config.json", tmp_path)
    index = {"metadata": {}, "weight_map": {"lm_head.weight": "pytorch_model-00001-of-1.bin"}}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps(index))
    assert not read_model(tmp_path).exact


def test_a_name_that_is_not_there_is_refused_by_every_reader(sets, tmp_path):
    folder = shutil.copytree(sets / "a", tmp_path / "model")
    for name, words in (
        ("gone.safetensors", "which is not there"),
        ("../a", "file of this folder"),
    ):
        explicit(folder, name)
        for read in (LayerStreamer.from_pretrained, read_model, lambda f: identity_of(str(f))):
            with pytest.raises(CheckpointError, match=f"transformers_weights.*{words}"):
                read(folder)


@pytest.mark.parametrize(
    "choice", [{"variant": "fp16"}, {"subfolder": "b"}, {"use_safetensors": False}], ids=str
)
def test_what_would_have_transformers_load_other_files_is_refused(choice, sets):
    with pytest.raises(ValueError, match=f"{next(iter(choice))}: expected none, the streamer"):
        LayerStreamer.from_pretrained(sets / "a", **choice)


def test_an_adapter_beside_the_weights_is_refused(sets, tmp_path):
    folder = shutil.copytree(sets / "a", tmp_path / "model")
    (folder / "adapter_config.json").write_text("{}")
    with pytest.raises(UnsupportedModelError, match="the adapter beside the weights"):
        LayerStreamer.from_pretrained(folder)


def test_a_revision_of_the_hub_is_the_one_that_was_asked_for(sets, tmp_path):
    """Config and weights of another revision would be streamed else."""
    hub = tmp_path / "hub"
    for commit, name in (("a" * 40, "a"), ("b" * 40, "b")):
        shutil.copytree(sets / name, hub / "models--me--tiny" / "snapshots" / commit)
    (hub / "models--me--tiny" / "refs").mkdir()
    for ref, commit in (("main", "a" * 40), ("v2", "b" * 40)):
        (hub / "models--me--tiny" / "refs" / ref).write_text(commit)
    here = {"cache_dir": str(hub), "local_files_only": True}
    assert find_folder("me/tiny", **here).name == "a" * 40
    with LayerStreamer.from_pretrained("me/tiny", device="cpu", revision="v2", **here) as streamer:
        loaded = AutoModelForCausalLM.from_pretrained(sets / "b", dtype="auto")
        assert fingerprint_of(streamer.model) == fingerprint_of(loaded)
