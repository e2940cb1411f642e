"""Looks for two faults of compilers in the binaries that ran on a card: those in Triton's cache.

    python -m benchmarks.gpu.cached FILE

`benchmarks.kernel_report` compiles on another machine, perhaps with another ptxas. FILE gets a
sentence for each kernel that has a fault (`compiled/hazards.py`) or could not be looked at. It is
written last, so its presence also says that this is over.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import triton
from triton import knobs
from triton.backends.compiler import GPUTarget

from benchmarks.compiled import hazards
from benchmarks.compiled.flow import Flow, operands_by
from benchmarks.compiled.sass import disassemble

OURS = b"pagedkv/kernels/triton/"  # in names of source files, which PTX keeps
PRODUCTS = b"wgmma.mma_async"  # asynchronous ones


def kernels(folder: Path) -> list[Path]:
    """Lists our binaries with asynchronous products that this version of Triton compiled."""
    found = []
    for cubin in sorted(folder.glob("*/*.cubin")):
        facts = json.loads(cubin.with_suffix(".json").read_text())
        ptx = cubin.with_suffix(".ptx").read_bytes()
        if facts["triton_version"] == triton.__version__ and OURS in ptx and PRODUCTS in ptx:
            found.append(cubin)
    return found


def look(cubin: Path) -> str | None:
    """Says what is wrong with a binary; its intermediate code lies beside it."""
    facts, ttgir = json.loads(cubin.with_suffix(".json").read_text()), cubin.with_suffix(".ttgir")
    name = f"{facts['name']} of {cubin.parent.name}"
    try:
        code, by = disassemble(cubin, facts["name"]).listing, {"SYNCS.ARRIVE"}
        if cubin.with_suffix(".ttir").exists():  # else it is Gluon, as in `kernel_report.analyse`
            by = operands_by(Flow(str(ttgir), GPUTarget(**facts["target"])))
    except Exception as error:  # one that cannot be read hides no other
        return f"{name}: not looked at: {type(error).__name__}: {error}"
    found = hazards.found(code, facts["num_warps"], by)
    return f"{name}: operands may change while products run ({', '.join(found)})" if found else None


def main(folder: Path, workers: int) -> list[str]:
    """Says what is wrong with the binaries of a folder, or why nothing can be said."""
    every = kernels(folder)
    try:
        knobs.nvidia.cuobjdump  # noqa: B018
        if not every:
            raise RuntimeError(f"no kernel with asynchronous products in {folder}")
    except RuntimeError as error:
        return [f"binaries were not looked at: {error}"]
    with ProcessPoolExecutor(workers, multiprocessing.get_context("spawn")) as pool:
        told = [each for each in pool.map(look, every) if each]
    print(f"{len(every)} binaries looked at, {len(told)} are wrong", flush=True)
    return told


if __name__ == "__main__":
    # Imported by its module's name, under which workers find it.
    from benchmarks.gpu.cached import main as run

    told = ["binaries were not looked at: this did not end"]
    try:
        told = run(Path(knobs.cache.dir), os.cpu_count() or 1)
    finally:
        part = Path(sys.argv[1]).with_suffix(".part")
        part.write_text(json.dumps(told))
        part.replace(sys.argv[1])
