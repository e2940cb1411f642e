"""Brings FlashInfer to a machine that has a GPU but no network.

Here: `python -m benchmarks.peers.build` downloads wheels into `.gpu/wheels` and compiles
FlashInfer's modules for Hopper into `.gpu/aot`. It needs nvcc 13, a C++ compiler and torch (a CPU
build will do), no GPU. There: `python3 -m benchmarks.peers.build --install SITE` unpacks wheels and
modules into a folder for PYTHONPATH. FlashInfer does not compile a module that it finds beside its
package, so no minute of the GPU goes into nvcc. All of this is other people's code: carried, never
committed.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

WORK = Path(__file__).resolve().parents[2] / ".gpu"
FLASHINFER = "flashinfer-python==0.5.3"
# The modules are compiled against its headers, so both machines get this very version.
TVM_FFI = "apache-tvm-ffi==0.1.15.post2"
# Tiny packages that FlashInfer imports and torch may not bring; carrying all spares asking.
SMALL = ("nvidia-ml-py", "tabulate", "tqdm", "click", "einops", "packaging")
# Only this machine's compile step needs them.
HOST_ONLY = ("filelock", "ninja", "requests", "urllib3", "idna", "certifi", "charset-normalizer")
CURAND = "nvidia-curand>=10,<11"  # FlashInfer's Hopper templates include its headers
PLATFORMS = ("2_28", "2_27", "2_24", "2_17")


def module(name: str, head_dim: int = 0, pages: str = "bfloat16") -> Any:
    """Returns the module's entry in FlashInfer's build system."""
    import torch
    from flashinfer import jit
    from flashinfer.jit.cascade import gen_cascade_module
    from flashinfer.jit.page import gen_page_module

    types = (torch.bfloat16, getattr(torch, pages), torch.bfloat16, torch.int32)
    if name == "decode":  # on CUDA cores: what FlashInfer recommends for small groups
        return jit.gen_batch_decode_module(*types, head_dim, head_dim, 0, False, False)
    if name in ("fa2", "fa3"):  # prefill; fa2 is also decode on tensor cores
        return jit.gen_batch_prefill_module(
            name, *types, head_dim, head_dim, 0, False, False, False
        )
    if name == "mla":
        return jit.gen_batch_mla_module("fa3", *types, 512, 64, False)
    return {"page": gen_page_module, "cascade": gen_cascade_module}[name]()


# In the order in which a run would miss them.
MODULES: dict[str, tuple[Any, ...]] = {
    "page": ("page",),
    "cascade": ("cascade",),
    "fa2-d128": ("fa2", 128),
    "decode-d128": ("decode", 128),
    "fa3-d128": ("fa3", 128),
    "fa2-d64": ("fa2", 64),
    "fa2-d256": ("fa2", 256),
    "decode-d64": ("decode", 64),
    "decode-d256": ("decode", 256),
    "fa2-d128-fp8": ("fa2", 128, "float8_e4m3fn"),
    "mla": ("mla",),
}


def pip(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", *arguments, "-q"], check=True)


def download(wheels: Path, python: str) -> None:
    """Wheels for the machine with the GPU."""
    wheels.mkdir(parents=True, exist_ok=True)
    target = ["--no-deps", "--only-binary=:all:", "--implementation=cp"]
    target += [f"--python-version={python}"]
    target += [f"--platform=manylinux_{glibc}_x86_64" for glibc in PLATFORMS]
    pip("download", *target, f"--dest={wheels}", FLASHINFER, TVM_FFI, *SMALL)


def make_host(host: Path) -> None:
    """Installs the same packages for this interpreter, and those that compiling needs."""
    if not (host / "flashinfer").is_dir():
        names = (FLASHINFER, TVM_FFI, *SMALL, *HOST_ONLY, CURAND)
        pip("install", "--no-deps", f"--target={host}", *names)


def prepare_compiler(host: Path, work: Path) -> None:
    """Points nvcc and the linker at what a machine without a driver lacks."""
    stub = work / "stub" / "libcuda.so"
    if not stub.exists():
        stub.parent.mkdir(parents=True, exist_ok=True)
        # Symbols are looked up in the driver when the module is loaded; here it only needs a name.
        command = ["gcc", "-shared", "-x", "c", "/dev/null", "-Wl,-soname,libcuda.so.1", "-o"]
        subprocess.run([*command, str(stub)], check=True)
    headers = next(host.rglob("curand_kernel.h")).parent
    os.environ["LIBRARY_PATH"] = f"{stub.parent}:{os.environ.get('LIBRARY_PATH', '')}"
    os.environ["CPATH"] = f"{headers}:{os.environ.get('CPATH', '')}"
    os.environ.setdefault("CUDA_HOME", "/usr/local/cuda")
    os.environ.setdefault("MAX_JOBS", "1")
    os.environ["PATH"] = f"{host / 'bin'}:{os.environ['PATH']}"
    os.environ["FLASHINFER_WORKSPACE_BASE"] = str(work)
    os.environ["FLASHINFER_CUDA_ARCH_LIST"] = "9.0a"
    os.environ["FLASHINFER_DISABLE_VERSION_CHECK"] = "1"
    sys.path.insert(0, str(host))


def compile_modules(aot: Path, names: list[str]) -> None:
    for name in names:
        spec = module(*MODULES[name])
        target = aot / spec.name / f"{spec.name}.so"
        if not target.exists():
            start = time.perf_counter()
            spec.build(verbose=False)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(spec.jit_library_path, target)
            subprocess.run(["strip", "--strip-unneeded", str(target)], check=True)
            print(f"{name}: compiled in {time.perf_counter() - start:.0f} s", flush=True)
        print(f"{name}: {target.stat().st_size / 2**20:.2f} MiB", flush=True)


def install(site: Path, wheels: Path, aot: Path) -> None:
    """Unpacks wheels and modules into a folder for PYTHONPATH, without a network."""
    found = [str(path) for path in sorted(wheels.glob("*.whl"))]
    pip("install", "--no-index", "--no-deps", "--no-compile", f"--target={site}", *found)
    shutil.copytree(aot, site / "flashinfer" / "data" / "aot", dirs_exist_ok=True)


def built(aot: Path) -> list[str]:
    """Names of the modules that lie ready."""
    return sorted(path.stem for path in aot.glob("*/*.so"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--work", type=Path, default=WORK, help="folder of the build products")
    parser.add_argument("--python", default="3.12", help="version on the machine with the GPU")
    parser.add_argument("--only", nargs="*", choices=MODULES, help="modules to compile")
    parser.add_argument("--install", type=Path, metavar="SITE", help="unpack there instead")
    options = parser.parse_args()
    wheels, aot = options.work / "wheels", options.work / "aot"
    if options.install:
        install(options.install, wheels, aot)
        return
    os.nice(10)
    download(wheels, options.python)
    make_host(options.work / "host")
    prepare_compiler(options.work / "host", options.work / "build")
    compile_modules(aot, list(MODULES) if options.only is None else options.only)
    print(f"to carry: {wheels} and {aot}")


if __name__ == "__main__":
    main()
