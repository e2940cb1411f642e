"""The library of the C files: compiled at its first use, and kept for the next process.

`CC`, `cc`, `gcc` or `clang` compiles it for this processor. It is kept in a folder of the user's
caches, under a name that is a hash of the source, the flags and the compiler's macros for the
processor. A new library gets its name when it is complete, so that processes may compile at the
same time. If it cannot be compiled, the wheel's library is loaded, if there is one (`make wheel`).
Files that other users could have written are not loaded.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import shlex
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

HERE = Path(__file__).parent
SOURCES = sorted(HERE.glob("*.[ch]"))
FLAGS = (
    *("-std=gnu11", "-O3", "-shared", "-fPIC"),
    *("-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off"),  # see `fused` in vectors.h
)
# Not -ffast-math: with it compilers link code that makes subnormal numbers zeros in all of torch.
PROCESSORS = ("-march=native", "-mcpu=native", "")
# Levels of a wheel's libraries, by torch's name of the processor's capability; the last is for any.
LEVELS = {
    "x86_64": {"AVX512": "x86-64-v4", "AVX2": "x86-64-v3", "": "x86-64"},
    "aarch64": {"": "armv8-a"},
}
TIMEOUT = 60  # seconds after which a hanging compiler is stopped


class NoLibraryError(Exception):
    """Why there is no library."""


@functools.cache
def library() -> ctypes.CDLL:
    """Returns the library, and compiles it if needed.

    Raises:
        NoLibraryError: it cannot be compiled, kept or loaded here.
    """
    try:
        return _of_this_processor()
    except NoLibraryError:
        found = _of_the_wheel()
        if found is None:
            raise
        return found


@functools.cache
def missing() -> str:
    """Says why there is no library; empty if there is one."""
    try:
        library()
    except NoLibraryError as error:
        return str(error)
    return ""


def _of_this_processor() -> ctypes.CDLL:
    try:
        compiler = _compiler()
        processor = next((x for x in PROCESSORS if _macros(compiler, x)), "")
        path = _folder() / f"attend-{_key(compiler, processor)}.so"
        return ctypes.CDLL(str(path)) if _is_whole(path) else _compiled(compiler, processor, path)
    except (OSError, ValueError) as error:  # from folder, file, CC or compiler output
        raise NoLibraryError(f"no library of attention: {error}") from error


def _of_the_wheel() -> ctypes.CDLL | None:
    """Returns the package's own library; None if there is none that can be loaded and trusted."""
    import torch

    levels = LEVELS.get(platform.machine(), {})
    level = levels.get(torch.backends.cpu.get_cpu_capability(), levels.get(""))
    path = HERE / f"attend-{level}.so"
    try:
        _require_mine(HERE, HERE.stat().st_uid)
        return ctypes.CDLL(str(path)) if _is_whole(path, HERE.stat().st_uid) else None
    except (OSError, NoLibraryError):
        return None


def prebuild(folder: Path) -> None:
    """Makes the libraries of a wheel for processors of this machine's kind."""
    for level in LEVELS[platform.machine()].values():
        _compiled(_compiler(), f"-march={level}", folder / f"attend-{level}.so")


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
    """Returns the compiler's macros for this processor; empty if it takes no such flag."""
    flags = [processor] if processor else []
    return _said(*compiler, *flags, "-dM", "-E", "-x", "c", os.devnull)


def _key(compiler: Sequence[str], processor: str) -> str:
    digest = hashlib.sha256(repr((FLAGS, compiler)).encode())
    digest.update(_macros(compiler, processor).encode())
    for source in SOURCES:
        digest.update(source.read_bytes())
    return digest.hexdigest()[:20]


def _folder() -> Path:
    """Returns a folder of this user, and makes it if needed."""
    base = os.environ.get("PAGEDKV_CACHE")
    try:
        folder = (Path(base) if base else Path.home() / ".cache/pagedkv") / "kernels"
    except RuntimeError as error:  # this user has no home folder
        raise NoLibraryError(str(error)) from error
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    _require_mine(folder)
    return folder


def _require_mine(path: Path, owner: int | None = None) -> None:
    """Raises if other users own a file or folder, or may write to it.

    Args:
        owner: another user who may own it: for a wheel's files, the user who installed it.
    """
    found = path.stat()
    if hasattr(os, "getuid") and found.st_uid not in (os.getuid(), owner):
        raise NoLibraryError(f"{path} belongs to another user")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise NoLibraryError(f"{path} can be written by others (chmod go-w)")


def _is_whole(path: Path, owner: int | None = None) -> bool:
    """Whether the library exists and is as it was compiled."""
    try:
        _require_mine(path, owner)
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
        for threads in (["-fopenmp"], []):  # without OpenMP it uses one thread
            done = _run([*compiler, *flags, *threads, "-o", name, "-lm"])
            if done.returncode:
                reason = (done.stderr.strip().splitlines() or [f"status {done.returncode}"])[0]
                continue
            content = Path(name).read_bytes()
            Path(name).write_bytes(content + hashlib.sha256(content).digest())
            os.chmod(name, 0o700)
            try:
                found = ctypes.CDLL(name)
                found.paged_attention  # noqa: B018 - a wrapper around a compiler may leave it out
            except (OSError, AttributeError) as error:  # the loader may lack OpenMP
                reason = str(error)
                continue
            os.replace(name, path)
            return found
        raise NoLibraryError(f"{compiler[0]} cannot make a library: {reason}")
    finally:
        Path(name).unlink(missing_ok=True)


if __name__ == "__main__":
    prebuild(HERE)
