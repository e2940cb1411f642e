"""What the tests of batches run under, and the model most of them generate with."""

import pytest

torch = pytest.importorskip("torch")


@pytest.fixture(scope="package", autouse=True)
def _one_thread():
    # Models this small gain nothing from a second thread, and stall on it on a busy machine.
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


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
