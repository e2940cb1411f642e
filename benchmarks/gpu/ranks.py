"""One model on several cards: `torchrun --nproc-per-node 2 -m benchmarks.gpu.ranks --out DIR`.

A model of the shape of Llama 3 8B with random weights in bf16 decodes on the first card alone, then
on all of them by tensor parallelism, in one run: milliseconds a step, and the share of a step that
its two agreements take. Written to `DIR/ranks.json`; needs transformers and 16 GB of disk.
`--tiny` tries the script out, on CPUs where there are no cards.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from transformers.distributed import DistributedConfig

from benchmarks.gpu.streaming import LLAMA_8B, TINY, prompts, timed, write_checkpoint
from pagedkv import BatchGenerator
from pagedkv.ranks import ranks_of

FEW, MANY, CALLS = 8, 40, 50
ROWS = (1, 16, 64)


def load(folder: Path, device: torch.device, ranks: int) -> Any:
    place: dict[str, Any] = {"device_map": device}
    if ranks > 1:
        place = {"distributed_config": DistributedConfig(tp_size=ranks)}
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **place)


def milliseconds_a_step(model: Any, rows: int, length: int) -> float:
    """Times steps that decode, by the difference of two numbers of new tokens."""
    texts = prompts(rows, length, model.config.vocab_size)
    with BatchGenerator(model, max_tokens=rows * (length + MANY + 64)) as batched:
        batched.generate(texts, max_new_tokens=FEW, do_sample=False)
        spent = []
        for count in (FEW, MANY):
            start = time.perf_counter()
            batched.generate(texts, max_new_tokens=count, do_sample=False)
            spent.append(time.perf_counter() - start)
    return 1e3 * (spent[1] - spent[0]) / (MANY - FEW)


def agreements(model: Any, device: torch.device, rows: int) -> float:
    """Measures milliseconds of the two agreements that the ranks make in a step."""
    ranks, ids = ranks_of(model), torch.zeros(rows, dtype=torch.long, device=device)

    def both() -> None:
        ranks.most(0, 0)
        ranks.follow(ids)

    return 1e3 * timed(device, both, CALLS)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--tiny", action="store_true")
    asked = parser.parse_args()
    cards = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cards else torch.device("cpu")
    dist.init_process_group("nccl" if cards else "gloo", device_id=device if cards else None)
    size, is_first = dist.get_world_size(), dist.get_rank() == 0
    length, shape = (16, TINY) if asked.tiny else (2048, LLAMA_8B)
    found: dict[str, Any] = {"machine": torch.cuda.get_device_name() if cards else "a CPU"}
    found |= {"ranks": size, "commit": asked.commit, "date": time.strftime("%Y-%m-%d")}
    found |= {"torch": torch.__version__, "transformers": transformers.__version__}
    place = [tempfile.mkdtemp() if is_first else ""]
    dist.broadcast_object_list(place)
    folder = Path(place[0])
    if is_first:
        write_checkpoint(shape, folder)
        alone = load(folder, device, 1)
        for rows in ROWS:
            found[f"batch {rows}: alone, ms a step"] = milliseconds_a_step(alone, rows, length)
        del alone
        gc.collect()
        torch.cuda.empty_cache()
    dist.barrier()
    model = load(folder, device, size)
    for rows in ROWS:
        step = milliseconds_a_step(model, rows, length)
        found[f"batch {rows}: shared out, ms a step"] = step
        found[f"batch {rows}: share of agreements"] = agreements(model, device, rows) / step
    if is_first:
        asked.out.mkdir(parents=True, exist_ok=True)
        (asked.out / "ranks.json").write_text(json.dumps(found, indent=1))
        print(json.dumps(found, indent=1))
    del model  # its weights hold the group, which would abort the process if it outlived Python
    gc.collect()
    dist.barrier()  # a process that left early would take the others' store along
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
