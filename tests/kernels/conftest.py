"""What kernels run under where there is no GPU: an interpreter that is right, and that checks."""

import sys

import pytest

torch = pytest.importorskip("torch")


@pytest.fixture(scope="package", autouse=True)
def _interpreter():
    # Kernels are imported as their tests are collected; tests of plain torch wait for no Triton.
    if "triton" not in sys.modules or torch.cuda.is_available():
        yield
        return
    from tests.kernels import interpreter

    interpreter.install()
    yield
    interpreter.uninstall()
