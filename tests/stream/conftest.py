"""Checkpoints that many tests stream from and none changes."""

import pytest

from tests.stream.models import make, save


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """Folder of a llama of three layers."""
    return save(make("llama"), tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="session")
def wide(tmp_path_factory):
    """Folder of a model of 32 experts, of which a token needs 4."""
    fields = {"num_experts": 32, "num_experts_per_tok": 4}
    return save(make("qwen3_moe", **fields), tmp_path_factory.mktemp("wide"))
