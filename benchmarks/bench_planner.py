"""How long a plan takes: from a configuration, from a checkpoint's headers, and when it is refused.

A planner that takes milliseconds can be asked in a loop, or at every admission.
"""

from functools import partial
from pathlib import Path
from statistics import median

import pytest

from benchmarks.conftest import Alternate, Figure
from pagedkv import BudgetExceeded, plan_memory

CONFIG = {
    "model_type": "llama",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}


@pytest.mark.parametrize("source", ["config", "folder"])
def bench_plan(alternate: Alternate, figure: Figure, smollm2_path: Path, source: str) -> None:
    model = smollm2_path if source == "folder" else CONFIG
    assert plan_memory(model, device_memory="8GiB").shape.exact == (source == "folder")
    plan_it = partial(plan_memory, model, device_memory="8GiB", host_memory="64GiB", batch=1)
    times = alternate({source: plan_it}, rounds=100, warmup=3)[source]
    what = "its files" if source == "folder" else "a configuration of 70B"
    figure(f"plan of a model from {what}", 1e3 * median(times), "ms", 10)


def bench_refusal(alternate: Alternate, figure: Figure) -> None:
    """Advice is tried before it is given, so a refusal takes several plans."""

    def refused_plan() -> None:
        with pytest.raises(BudgetExceeded) as refused:
            plan_memory(CONFIG, device_memory="16GiB", batch=64)
        assert refused.value.advice

    times = alternate({"refused": refused_plan}, rounds=30, warmup=1)["refused"]
    figure("refusal with advice", 1e3 * median(times), "ms", 100)
