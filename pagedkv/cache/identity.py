"""What K and V are computed with beside tokens: files and prefixes belong to that alone."""

from __future__ import annotations

from collections.abc import Callable


class Identity:
    """Of weights that stay as they are, under the fingerprint that a configuration gives.

    Whoever knows a cache's model gives the cache an identity that follows it.
    """

    def __init__(self, fingerprint: bytes) -> None:
        self._fingerprint = fingerprint

    def fingerprint(self) -> bytes:
        """What tells apart the files of what is computed now."""
        return self._fingerprint

    def salted(self, salt: bytes) -> bytes:
        """What tells apart the prefixes of what is computed now, under a caller's salt."""
        return salt

    def forget_stale(self, forget: Callable[[], None]) -> None:
        """Calls `forget` if prefixes were computed with weights that have changed since."""
