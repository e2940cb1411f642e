import pytest
import torch
import transformers
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from pagedkv.errors import LayersNotFound
from pagedkv.models.skeleton import find_layers


@pytest.mark.slow
def test_layers_are_found_in_nearly_every_type_of_transformers(capsys):
    """Tries the types whose default configuration builds on the meta device."""
    found, refused, not_built = {}, {}, []
    for kind in sorted(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES):
        try:
            config = transformers.AutoConfig.for_model(kind)
            cls = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
            with torch.device("meta"):
                model = cls(config)
        except Exception:
            not_built.append(kind)
            continue
        try:
            found[kind] = find_layers(model)[0]
        except LayersNotFound as error:
            refused[kind] = str(error)
    with capsys.disabled():
        print(
            f"\ntransformers {transformers.__version__}: layers found in {len(found)} types of "
            f"{len(found) + len(refused)}"
        )
        for path in sorted(set(found.values())):
            kinds = [kind for kind, where in found.items() if where == path]
            print(f"  {path} ({len(kinds)}): {' '.join(kinds)}")
        for kind, why in refused.items():
            print(f"  refused {kind}: {why}")
        print(f"  not built from their default configuration: {' '.join(not_built)}")
    assert len(found) >= 0.94 * (len(found) + len(refused))
