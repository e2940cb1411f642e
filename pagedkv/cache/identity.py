"""Identifies the model that computes K and V: files and cached prefixes are valid only for it."""

from __future__ import annotations

from collections.abc import Callable

from pagedkv.pages.salts import Salt


class Identity:
    """The identity of weights that never change: the fingerprint of a configuration.

    `PagedCache` and `BatchGenerator` give a cache an identity that follows their model.
    """

    def __init__(self, fingerprint: bytes) -> None:
        self._fingerprint = fingerprint

    def fingerprint(self) -> bytes:
        """The identity of the model as it is now, which saved files carry."""
        return self._fingerprint

    def weights(self) -> bytes:
        """The fingerprint of weights, for prefixes that outlast the process; empty if unknown."""
        return self._fingerprint

    def salted(self, salt: Salt) -> Salt:
        """The salt of prefixes that are computed with the model as it is now.

        Args:
            salt: the caller's.
        """
        return salt

    def forget_stale(self, forget: Callable[[], None]) -> bool:
        """Calls `forget` if the weights have changed since prefixes were computed.

        Returns:
            Whether they have changed.
        """
        return False
