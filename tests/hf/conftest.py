"""Fixtures for tests of the transformers integration."""

from tests.threads import one_thread  # noqa: F401
