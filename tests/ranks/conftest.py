"""Fixtures for tests of several ranks, and the models they share out."""

import pytest

from tests.threads import one_thread  # noqa: F401

# All of it can be shared out among two and among three.
EVEN = {"vocab_size": 102, "hidden_size": 48, "num_attention_heads": 12, "num_key_value_heads": 6}
EXPERTS = {"num_local_experts": 6, "n_routed_experts": 6, "moe_intermediate_size": 24}


@pytest.fixture(scope="session")
def saved(tmp_path_factory):
    """Folders of tiny random models by family and fields, each saved once."""
    from tests.conftest import seed
    from tests.hf.tiny import FAMILIES, tiny
    from tests.hybrids import tiny_hybrid

    folders = {}

    def folder(family: str = "llama", **fields) -> str:
        key = family, *sorted(fields.items())
        if key not in folders:
            seed()
            folders[key] = str(tmp_path_factory.mktemp(family))
            make = tiny if family in FAMILIES else tiny_hybrid
            own = EVEN if make is tiny and family != "gpt2" else {"vocab_size": EVEN["vocab_size"]}
            asks = FAMILIES.get(family, ("", ()))[1]
            own = own | {name: value for name, value in EXPERTS.items() if name in asks}
            make(family, **{**own, **fields}).save_pretrained(folders[key])
        return folders[key]

    return folder
