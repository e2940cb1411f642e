"""Fixtures for tests of batches, and the model that most of them generate with."""

import pytest

from tests.threads import one_thread  # noqa: F401


@pytest.fixture
def model():
    from tests.hf.tiny import tiny

    return tiny()


@pytest.fixture
def batched(model):
    from tests.batch.generating import assert_nothing_held, generator

    with generator(model) as batched:
        yield batched
        assert_nothing_held(batched)
