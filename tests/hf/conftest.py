"""What the tests of the transformers integration run under."""

import pytest

from tests.threads import one_thread  # noqa: F401

pytest.importorskip("transformers")
