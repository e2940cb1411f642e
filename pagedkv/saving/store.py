"""A folder of files that are found by keys, within limits, for any number of processes.

There is no index, no lock and no server. A file is written once, under a temporary name, and
renamed to its key; its time of modification is the time of its last use. It is not flushed to the
disk: after a loss of power its checksum does not fit. If a file is damaged or missing, or the
folder is full, answers stay right: a warning tells it, and K and V are computed again.
"""

from __future__ import annotations

import math
import os
import re
import secrets
import stat
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from pagedkv.errors import HostMemoryError, PagedKVError
from pagedkv.storage.memory import host_memory

from . import format as files

SUFFIX = ".safetensors"
# Names that a store makes; it leaves all other files in its folder alone.
OURS = re.compile(r"[0-9a-f]{64}" + re.escape(SUFFIX))
BEGUN = re.compile(r"\.([0-9a-f]{16}|trial)\.[0-9a-f]{16}\.tmp")

TRUSTED_S = 60.0  # seconds for which a file is believed to exist after it was seen
RETRY_S = 60.0  # seconds after which a folder that could not be written is tried again
LEFT_OVER_S = 3600.0  # seconds after which a temporary file must be a killed process's
SHARE_OF_FIRST = 4  # a quarter of the limit is for prefixes that only one prompt has had

Found = TypeVar("Found")


class PrefixStore:
    """A folder that keeps prefixes; caches take it as `prefix_store=`.

    If the folder does not exist, it is made for its owner alone. Caches and processes may share it.

    Args:
        folder: where the files are.
        max_bytes: the limit for all files together; the least recently used are removed first. What
            other processes write is counted once a minute, so it may be passed for as long.
        max_age: for how many seconds after its last use a file is kept; None for ever.

    Raises:
        ValueError: it is no folder, or cannot be written.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        max_bytes: int = 10 * 2**30,
        max_age: float | None = None,
    ) -> None:
        if not isinstance(folder, (str, os.PathLike)) or not os.fspath(folder):
            raise ValueError(f"prefix_store: expected a folder, got {folder!r}")
        if isinstance(max_bytes, bool) or not isinstance(max_bytes, int) or max_bytes < 1:
            raise ValueError(f"max_bytes: expected a positive int, got {max_bytes!r}")
        if max_age is not None and not (_is_number(max_age) and max_age > 0):
            raise ValueError(f"max_age: expected seconds above 0, or None, got {max_age!r}")
        self.folder, self.max_bytes = Path(folder).expanduser().absolute(), max_bytes
        self.max_age = math.inf if max_age is None else float(max_age)
        if self.folder.exists() and not self.folder.is_dir():
            raise ValueError(f"prefix_store: expected a folder, got the file {self.folder}")
        try:
            self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.close(self._begin(trial := self._beside("trial")))
            trial.unlink()
        except OSError as error:
            raise ValueError(
                f"prefix_store: expected a folder that can be written, got {self.folder}: {error}"
            ) from error
        self._seen: dict[bytes, float] = {}  # when a file was last seen and marked as used
        self._bad: set[bytes] = set()  # files that are passed over until they are replaced
        self._room, self._counted = 0, -math.inf  # bytes that fit, and when they were counted
        self._closed_until, self._told = -math.inf, False
        self._first = max_bytes // SHARE_OF_FIRST

    def __fspath__(self) -> str:
        return str(self.folder)

    def path(self, key: bytes) -> Path:
        """Returns the path of a key's file."""
        return self.folder / f"{key.hex()}{SUFFIX}"

    def has(self, key: bytes) -> bool:
        """Whether a key has a usable file."""
        now = time.monotonic()
        if now - self._seen.get(key, -math.inf) < TRUSTED_S:
            return True
        if key in self._bad:
            return False
        try:
            found = os.lstat(self.path(key))
        except OSError:
            return False
        return stat.S_ISREG(found.st_mode) and time.time() - found.st_mtime < self.max_age

    def use(self, keys: Sequence[bytes]) -> None:
        """Marks files as used now; the first is removed last, because the others need it."""
        now, latest = time.monotonic(), time.time_ns()
        if all(now - self._seen.get(key, -math.inf) < TRUSTED_S for key in keys):
            return
        for i, key in enumerate(keys):
            with suppress(OSError):
                os.utime(self.path(key), ns=(latest - 1000 * i,) * 2)
                self._seen[key] = now

    def read(self, key: bytes, use: Callable[..., Found]) -> Found | None:
        """Gives `use` a file's header, tensors and name; returns its result, None for a bad file.

        A damaged file causes a warning, once, and may be replaced.
        """
        path = self.path(key)
        try:
            with suppress(HostMemoryError), host_memory("add"):  # if short, it is computed
                return use(*files.read(path), str(path))
        except FileNotFoundError:  # another process made room and may have removed more
            self._seen.clear()
        except (OSError, PagedKVError) as error:
            self.pass_over(key, error)
        return None

    def pass_over(self, key: bytes, error: Exception) -> None:
        """Ignores a file until it is replaced."""
        self._seen.pop(key, None)
        self._bad.add(key)
        self._warn(f"{self.path(key)} is passed over, what it held is computed again: {error}")

    def may_write_first(self) -> bool:
        """Whether there is room left for prefixes that only one prompt has had."""
        return self._first > 0 and self.may_write()

    def may_write(self) -> bool:
        """Whether the last write to the folder succeeded, or was long ago."""
        return time.monotonic() >= self._closed_until

    def write(
        self, key: bytes, header: dict[str, Any], tensors: dict[str, Tensor], first: bool
    ) -> bool:
        """Writes the file of a key; whether it exists now.

        Args:
            first: whether no second prompt has had the prefix yet.
        """
        name = self._beside(key.hex())
        try:
            try:
                with os.fdopen(self._begin(name), "wb") as file:
                    files.fill(file, header, tensors)
                size = name.stat().st_size
                if size > self.max_bytes:
                    name.unlink()
                    return False
                self._make_room(size)
                os.replace(name, self.path(key))
            except BaseException:
                with suppress(OSError):
                    name.unlink()
                raise
        except OSError as error:
            self._closed_until = time.monotonic() + RETRY_S
            if not self._told:
                self._told = True
                self._warn(f"{self.folder} cannot be written, nothing new is kept: {error}")
            return False
        self._bad.discard(key)
        self._room -= size
        self._first -= size if first else 0
        return True

    # ------------------------------------------------------------------ limits

    def _make_room(self, size: int) -> None:
        """Removes files that are too old, and the least recently used if there are too many bytes.

        Other processes write as well, so bytes are recounted once a minute.
        """
        now = time.monotonic()
        if size <= self._room and now - self._counted < TRUSTED_S:
            return
        kept, total, clock = [], 0, time.time()
        with os.scandir(self.folder) as entries:
            for entry in entries:
                ours = OURS.fullmatch(entry.name) is not None
                if not (ours or BEGUN.fullmatch(entry.name)):
                    continue
                with suppress(OSError):  # another process was faster
                    found = entry.stat(follow_symlinks=False)
                    if not stat.S_ISREG(found.st_mode):
                        continue
                    age = clock - found.st_mtime
                    if age > (self.max_age if ours else LEFT_OVER_S):
                        os.unlink(entry.path)
                    elif ours:
                        kept.append((found.st_mtime_ns, found.st_size, entry.path))
                        total += found.st_size
        kept.sort(reverse=True)
        while kept and total + size > self.max_bytes:
            _, bytes_of, path = kept.pop()
            try:
                Path(path).unlink(missing_ok=True)  # another process may have been faster
            except OSError:
                continue
            total -= bytes_of
            self._seen.pop(bytes.fromhex(Path(path).name.removesuffix(SUFFIX)), None)
        self._room, self._counted = self.max_bytes - total, now

    def _beside(self, name: str) -> Path:
        return self.folder / f".{name[:16]}.{secrets.token_hex(8)}.tmp"

    def _begin(self, path: Path) -> int:
        return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)  # and the umask

    def _warn(self, what: str) -> None:
        warnings.warn(f"prefix_store: {what}", stacklevel=2)

    def __repr__(self) -> str:
        return f"PrefixStore({str(self.folder)!r}, max_bytes={self.max_bytes})"


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
