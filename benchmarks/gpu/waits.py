"""Where a card is waited for: `python3 -m benchmarks.gpu.waits --out DIR`.

A model of a few layers with random weights generates in every way that has steps of its own:
greedy, sampled, several samples of a prompt, coded pages, eviction. For each it says how often
torch waited for the card, by line, and how much longer a step takes than a greedy one. Written to
`DIR/waits.json`; needs transformers. On a CPU nothing waits, so there it shows only that it runs.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

from benchmarks.measuring import shortest
from pagedkv import BatchGenerator

ROOT = Path(__file__).resolve().parents[2]
SHAPE = {"vocab_size": 32_000, "hidden_size": 1024, "intermediate_size": 2048}
SHAPE |= {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2}
SHAPE |= {"max_position_embeddings": 8192, "eos_token_id": None, "bos_token_id": None}
ROWS, PROMPT, NEW = 64, 64, 32
PAGES: dict[str, dict[str, Any]] = {
    "bfloat16": {},
    "int4": {"kv_format": "int4"},
    "evicted": {"retention": "sinks", "budget": 64},
}
CHOICES: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampled": {"do_sample": True, "temperature": 0.8, "top_p": 0.9, "top_k": 50},
    "repetition": {"do_sample": False, "repetition_penalty": 1.1},
    "samples": {"do_sample": True, "num_return_sequences": 4},
}


def waits(run: Callable[[], object], device: torch.device) -> dict[str, int]:
    """Counts how often a call waited for the card, by line, most first."""
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        if device.type == "cuda":
            torch.cuda.set_sync_debug_mode("warn")
        try:
            run()
        finally:
            if device.type == "cuda":
                torch.cuda.set_sync_debug_mode("default")
    lines = Counter(_line(one) for one in said if "synchronizing" in str(one.message))
    return dict(lines.most_common())


def _line(said: warnings.WarningMessage) -> str:
    file = Path(said.filename)
    name = file.relative_to(ROOT) if file.is_relative_to(ROOT) else file.name
    return f"{name}:{said.lineno}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--commit", default="unknown")
    parser.add_argument("--tiny", action="store_true", help="tiny steps, to try it out")
    asked = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    rows, new = (4, 4) if asked.tiny else (ROWS, NEW)
    shape = SHAPE | ({"hidden_size": 256, "intermediate_size": 64} if asked.tiny else {})
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape))
    model = model.to(device, torch.bfloat16 if device.type == "cuda" else torch.float32).eval()
    prompts = torch.randint(1, 1000, (rows, PROMPT)).tolist()
    found: dict[str, Any] = {"commit": asked.commit, "date": time.strftime("%Y-%m-%d")}
    found |= {"machine": torch.cuda.get_device_name() if device.type == "cuda" else "a CPU"}
    found |= {"torch": torch.__version__, "transformers": transformers.__version__}
    asked.out.mkdir(parents=True, exist_ok=True)

    def told(name: str, value: Any) -> None:
        found[name] = value
        (asked.out / "waits.json").write_text(json.dumps(found, indent=1))
        print(f"{name}: {value}", flush=True)

    for pages, fields in PAGES.items():
        spent: dict[str, float] = {}
        with BatchGenerator(model, max_tokens=rows * 4 * (PROMPT + new + 64), **fields) as batched:
            for way, options in CHOICES.items():

                def run(options: dict[str, Any] = options) -> None:
                    batched.generate(prompts, max_new_tokens=new, seed=0, **options)

                run()  # compiles, captures
                spent[way], steps = shortest(run, 3), batched.stats.steps
                told(f"{pages}, {way}: waits in {steps} steps", waits(run, device))
                more = 1e3 * (spent[way] - spent["greedy"]) / steps
                told(f"{pages}, {way}: ms a step behind greedy", round(more, 3))


if __name__ == "__main__":
    main()
