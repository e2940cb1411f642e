"""The folder of a prefix store."""

from pathlib import Path

import pytest


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    """A folder that is not there yet, for a store of small pieces."""
    from pagedkv.saving import pieces
    from tests.cache.stored import PIECE

    monkeypatch.setattr(pieces, "TOKENS", PIECE)
    return tmp_path / "store"
