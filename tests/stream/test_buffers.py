"""Tensors that no checkpoint has are computed as transformers' loader does, or named."""

from unittest import mock

import pytest
import torch
import transformers
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.models.llama.modeling_llama import LlamaPreTrainedModel

from pagedkv.errors import LayersNotFound, UnsupportedModelError
from pagedkv.models.skeleton import find_layers
from pagedkv.stream.skeleton import _make_buffers
from tests.stream.models import in_memory, make, save, stream


def test_a_buffer_that_a_module_further_up_computes_is_that_in_memory(tmp_path):
    folder = save(make("falcon_h1"), tmp_path)
    known = dict(in_memory(folder).named_buffers())
    with stream(folder) as streamer:
        found = dict(streamer.model.named_buffers())
    assert found.keys() == known.keys()
    assert any(name.endswith("mup_vector") for name in found)
    for name, buffer in found.items():
        assert torch.equal(buffer, known[name]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64, torch.bool])
def test_a_buffer_that_nobody_computes_is_refused_by_name(dtype, tmp_path):
    folder = save(make("llama"), tmp_path)
    init = LlamaPreTrainedModel.__init__

    def with_one_more(self, config, *args, **kwargs):
        init(self, config, *args, **kwargs)
        self.register_buffer("forgotten", torch.ones(3, dtype=dtype), persistent=False)

    with (
        mock.patch.object(LlamaPreTrainedModel, "__init__", with_one_more),
        pytest.raises(UnsupportedModelError, match=r"model.forgotten.* is in no checkpoint"),
    ):
        stream(folder)


@pytest.mark.slow
def test_nearly_all_types_of_transformers_show_their_layers_and_none_leaves_a_buffer_to_chance():
    """Tries the types whose default configuration builds on the meta device."""
    found, refused = [], []
    for kind in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        try:
            config = transformers.AutoConfig.for_model(kind)
            cls = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
            with torch.device("meta"):
                model = cls(config)
        except Exception:
            continue
        try:
            find_layers(model)
            found.append(kind)
        except LayersNotFound:
            refused.append(kind)
        for tensor in model.state_dict(keep_vars=True).values():
            tensor._is_hf_initialized = True  # as a checkpoint that has it would
        _make_buffers(model)
        for name, buffer in model.named_non_persistent_buffers():
            assert not buffer.is_meta, f"{kind}: {name}"
            assert not buffer.isnan().any(), f"{kind}: {name}"
    assert len(found) > 100
    assert len(refused) <= 0.06 * len(found), refused
