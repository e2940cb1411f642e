"""Kernels need torch; what they run under without a GPU is in tests/conftest.py."""
