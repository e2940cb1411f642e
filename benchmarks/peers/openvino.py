"""Runs a job of ours in OpenVINO GenAI, on the same weights, in float16 and float32 arithmetic.

`pip install --no-deps openvino openvino-tokenizers openvino-genai` brings it. Its scheduler finds
shared prefixes of requests that ended, not of those that start together. So there are two ways to
run the job: all prompts at once, or the prefix first, by itself.
"""

from pathlib import Path
from typing import Any

import numpy as np

PAGE = 32  # tokens of a block on its CPU


class OpenVinoJob:
    """A loaded model with its scheduler.

    Args:
        file: the weights, from `write_gguf` in float16.
        tokens: the tokens that a call needs room for.
        precision: "f32" or "bf16", of its arithmetic.
    """

    def __init__(self, file: Path, rows: int, tokens: int, threads: int, precision: str) -> None:
        import openvino_genai as lib

        self.lib, self.calls = lib, 0
        scheduler = lib.SchedulerConfig()
        # Each call's prompts are new to it, so it needs room for what it keeps of earlier ones.
        scheduler.num_kv_blocks = 16 * -(-tokens // PAGE)
        scheduler.max_num_seqs = rows
        scheduler.max_num_batched_tokens = 512
        scheduler.enable_prefix_caching = True
        options = {"INFERENCE_PRECISION_HINT": precision, "INFERENCE_NUM_THREADS": threads}
        options |= {"KV_CACHE_PRECISION": precision}
        self.pipeline = lib.ContinuousBatchingPipeline(str(file), scheduler, "CPU", options)

    def generate(self, prompts: list[list[int]], new: int, prefix: int = 0) -> np.ndarray:
        """Greedy tokens `[rows, new]`.

        Each call adds one more to every id, so that nothing of earlier calls is found.

        Args:
            prefix: tokens that all prompts share, computed by a call before; 0 for none.
        """
        moved = [[token + self.calls for token in prompt] for prompt in prompts]
        self.calls += 1
        if prefix:
            self._run([moved[0][:prefix]], 1)
        return self._run(moved, new)

    def _run(self, prompts: list[list[int]], new: int) -> np.ndarray:
        import openvino

        config = self.lib.GenerationConfig()
        config.max_new_tokens, config.do_sample, config.ignore_eos = new, False, True
        inputs = [openvino.Tensor(np.array([prompt], dtype=np.int64)) for prompt in prompts]
        found: list[Any] = self.pipeline.generate(inputs, [config] * len(prompts))
        return np.array([one.m_generation_ids[0] for one in found])
