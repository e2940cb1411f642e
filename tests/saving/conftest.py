"""A file that most tests of saving begin with."""

from pathlib import Path

import pytest


@pytest.fixture
def saved(tmp_path) -> Path:
    from tests.saving.saved import save_text

    return save_text(tmp_path / "a.safetensors", fingerprint=b"some model")
