"""The library that the C files become: compiled at its first use, and kept for the next process.

It is compiled for the processor at hand, by `CC`, `cc`, `gcc` or `clang`, and lies in a folder of
the user's caches under a name that the source, the flags and what the compiler says of the
processor make. A new library takes its name when it is whole, so that processes may compile at
once. What others could have written is not loaded.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import shlex
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).parent
SOURCES = [HERE / name for name in ("attend.c", "tiles.h", "tasks.h", "write.h", "products.c")]
FLAGS = ("-std=gnu11", "-O3", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC")
# Not -ffast-math: compilers link with it what turns subnormal numbers into zeros, in all of torch.
PROCESSORS = ("-march=native", "-mcpu=native", "")
TIMEOUT = 60  # seconds for a compiler that hangs


class NoLibraryError(Exception):
    """Why there is no library."""


@functools.cache
def library() -> ctypes.CDLL:
    """The library, compiled if it was not.

    Raises:
        NoLibraryError: it cannot be compiled, kept or loaded here.
    """
    try:
        compiler = _compiler()
        processor = next((x for x in PROCESSORS if _macros(compiler, x)), "")
        path = _folder() / f"attend-{_key(compiler, processor)}.so"
        return ctypes.CDLL(str(path)) if _is_whole(path) else _compiled(compiler, processor, path)
    except (OSError, ValueError) as error:  # a folder, a file, CC, what a compiler prints
        raise NoLibraryError(f"no library of attention: {error}") from error


@functools.cache
def missing() -> str:
    """Why there is no library; empty where there is one."""
    try:
        library()
    except NoLibraryError as error:
        return str(error)
    return ""


def _compiler() -> list[str]:
    chosen = shlex.split(os.environ.get("CC", ""))
    for command in [chosen] if chosen else [["cc"], ["gcc"], ["clang"]]:
        if shutil.which(command[0]):
            return command
    raise NoLibraryError("there is no C compiler (CC, cc, gcc, clang)")


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=TIMEOUT,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NoLibraryError(f"{command[0]}: {error}") from error


@functools.cache
def _said(*command: str) -> str:
    found = _run(command)
    return "" if found.returncode else found.stdout


def _macros(compiler: Sequence[str], processor: str) -> str:
    """What the compiler knows of this processor and of itself; empty if it takes no such flag."""
    flags = [processor] if processor else []
    return _said(*compiler, *flags, "-dM", "-E", "-x", "c", os.devnull)


def _key(compiler: Sequence[str], processor: str) -> str:
    digest = hashlib.sha256(repr((FLAGS, compiler)).encode())
    digest.update(_macros(compiler, processor).encode())
    for source in SOURCES:
        digest.update(source.read_bytes())
    return digest.hexdigest()[:20]


def _folder() -> Path:
    """A folder of this user's, made if there is none."""
    base = os.environ.get("PAGEDKV_CACHE")
    try:
        folder = (Path(base) if base else Path.home() / ".cache/pagedkv") / "kernels"
    except RuntimeError as error:  # nobody's home
        raise NoLibraryError(str(error)) from error
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _require_mine(folder)
    return folder


def _require_mine(path: Path) -> None:
    """Raises where others own a file or folder, or may write to it."""
    found = path.stat()
    if hasattr(os, "getuid") and found.st_uid != os.getuid():
        raise NoLibraryError(f"{path} belongs to another user")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise NoLibraryError(f"{path} can be written by others (chmod go-w)")


def _is_whole(path: Path) -> bool:
    """Whether there is such a library, as it was compiled."""
    try:
        _require_mine(path)
        content = path.read_bytes()
    except OSError:
        return False
    return content[-32:] == hashlib.sha256(content[:-32]).digest()


def _compiled(compiler: Sequence[str], processor: str, path: Path) -> ctypes.CDLL:
    """Compiles, loads and keeps the library."""
    files = [str(source) for source in SOURCES if source.suffix == ".c"]
    flags = [*FLAGS, *([processor] if processor else []), *files]
    handle, name = tempfile.mkstemp(".so", "attend-", path.parent)
    os.close(handle)
    reason = ""
    try:
        for threads in (["-fopenmp"], []):  # without OpenMP one thread does all
            done = _run([*compiler, *flags, *threads, "-o", name, "-lm"])
            if done.returncode:
                reason = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[0]
                continue
            content = Path(name).read_bytes()
            Path(name).write_bytes(content + hashlib.sha256(content).digest())
            os.chmod(name, 0o700)
            try:
                found = ctypes.CDLL(name)
            except OSError as error:  # OpenMP may be there for the compiler alone
                reason = str(error)
                continue
            os.replace(name, path)
            return found
        raise NoLibraryError(f"{compiler[0]} cannot make a library: {reason}")
    finally:
        Path(name).unlink(missing_ok=True)
