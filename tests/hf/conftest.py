"""Fixtures for tests of the transformers integration."""

import pytest

from tests.threads import one_thread  # noqa: F401

pytest.importorskip("transformers")
