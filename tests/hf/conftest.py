"""Fixtures for tests of the transformers integration."""

import pytest
import torch

from tests.threads import one_thread  # noqa: F401


@pytest.fixture
def without_gradients():
    with torch.no_grad():
        yield
