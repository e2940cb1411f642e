"""`Model.of`: one object, however a model is given."""

from types import SimpleNamespace

import pytest
import torch
from transformers import LlamaConfig

from pagedkv import plan_memory
from pagedkv.models import checkpoint
from pagedkv.models.checkpoint import Checkpoint
from pagedkv.models.model import Model
from tests.hf.tiny import tiny
from tests.planner.models import SMOL, save


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_in_memory_is_planned_as_its_configuration_in_the_dtype_that_it_has(dtype):
    """Alone finds a model that was cast, of which its configuration says nothing."""
    model = tiny(dtype="float32").to(getattr(torch, dtype))
    config = {**model.config.to_dict(), "dtype": dtype}
    plans = [plan_memory(each, device_memory="1GiB") for each in (model, config)]
    assert plans[0].to_dict() == plans[1].to_dict()


def test_headers_are_read_once_however_often_an_open_checkpoint_is_asked(tmp_path, monkeypatch):
    """It alone finds a plan that reads a folder anew, as every batch that a job tries would."""
    save(tmp_path, SMOL, "F32")
    opened = Checkpoint.open(tmp_path)
    of_folder = plan_memory(tmp_path, device_memory="2GiB").to_dict()
    monkeypatch.setattr(checkpoint, "read_header", None)
    monkeypatch.setattr(checkpoint, "read_config", None)
    assert Model.of(opened).settings.hidden_size == SMOL["hidden_size"]
    assert plan_memory(opened, device_memory="2GiB").to_dict() == of_folder


@pytest.mark.parametrize(
    ("given", "got"),
    [(7, "int"), (SimpleNamespace(config=7), "int"), (LlamaConfig, "the class LlamaConfig")],
    ids=["a number", "a wrapper", "a class"],
)
def test_what_is_no_model_is_refused_by_name(given, got):
    with pytest.raises(TypeError, match=rf"model: expected a config .* in memory, got {got}"):
        Model.of(given)


def test_a_type_that_is_no_name_is_refused():
    with pytest.raises(ValueError, match="expected model_type in its config to be a str"):
        Model.of({**SMOL, "model_type": ["llama"]})
