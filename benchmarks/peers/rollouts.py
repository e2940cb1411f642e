"""Rollouts of TRL's GRPO trainer as it makes them itself, and over pages: one batch of each.

`python -m benchmarks.peers.rollouts` needs `pip install 'pagedkv[trl]'`. Each way has a process of
its own and one thread; seconds are the processor's, memory is what the peak grew by in the batch.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time

from benchmarks.conftest import job
from benchmarks.measuring import held
from benchmarks.smollm2 import smollm2

WAYS = {
    "generate, left padded": ("GRPOTrainer", {}),
    "generate_batch": ("GRPOTrainer", {"use_transformers_continuous_batching": True}),
    "pagedkv": ("PagedGRPOTrainer", {}),
}
BLOCKS = {"num_blocks": 600, "max_batch_tokens": 1024, "block_size": 16}
TEXT = "The tide was out, and the boats lay on the sand as if somebody had forgotten them there. "
PROMPTS = [f"Story {i}. {TEXT * n}Tell how it goes on." for i, n in enumerate((8, 10))]
COPIES, NEW = 8, 24


def measure(way: str) -> dict[str, float]:
    """Seconds, memory and tokens of the rollouts of one batch."""
    import torch
    import trl
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from pagedkv.integrations import trl as paged

    torch.set_num_threads(1)
    name, options = WAYS[way]
    path = smollm2()
    if options:
        options = {**options, "transformers_continuous_batching_config": BLOCKS}
    args = trl.GRPOConfig(
        tempfile.mkdtemp(),
        use_cpu=True,
        bf16=False,
        report_to=[],
        max_completion_length=NEW,
        **options,
    )
    trainer = getattr(trl, name, None) or getattr(paged, name)
    made = trainer(
        model=AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32),
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=args,
        train_dataset=Dataset.from_list([{"prompt": text} for text in PROMPTS]),
        processing_class=AutoTokenizer.from_pretrained(path),
    )
    made.model.train()
    torch.manual_seed(0)
    before, since = held("VmHWM"), time.process_time()
    ids, completions, *_ = made._generate([text for text in PROMPTS for _ in range(COPIES)])
    seconds = time.process_time() - since
    stats = getattr(made, "rollout_stats", None)
    new = sum(map(len, completions))
    padded = len(ids) * max(map(len, ids))
    prompt = padded if stats is None else stats.computed - (new - len(ids))
    return {"seconds": seconds, "MiB": held("VmHWM") - before, "new": new, "prompt": prompt}


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(measure(sys.argv[1])))
        sys.exit()
    for way in WAYS:
        got = job("benchmarks.peers.rollouts", way)
        print(f"{way:24}", " ".join(f"{name} {value:,.1f}" for name, value in got.items()))
