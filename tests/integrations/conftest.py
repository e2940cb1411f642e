"""What the tests of other people's tools run under."""

import pytest

from tests.docs.conftest import tiny_path  # noqa: F401

torch = pytest.importorskip("torch")


@pytest.fixture(scope="package", autouse=True)
def _one_thread():
    # Models this small gain nothing from a second thread, and stall on it on a busy machine.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
