"""A fixture for tests of small models; a folder that imports it has it for all of its tests."""

import pytest
import torch


@pytest.fixture(scope="package", autouse=True)
def one_thread():
    # Models this small gain nothing from a second thread, and stall on it on a busy machine.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
