"""What the examples share: finding a model, and comparing two runs token by token."""

import argparse
import runpy
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

TIE = 1e-4  # logits this close may change places with the order of additions
SMOLLM2 = Path(__file__).resolve().parents[2] / "benchmarks" / "smollm2.py"


def add_model_argument(parser: argparse.ArgumentParser) -> None:
    where = "SmolLM2-135M-Instruct, converted on first use"
    parser.add_argument("--model", help=f"a folder or a hub id (default: {where})")


def load(name: str | None) -> tuple[Any, Any]:
    """A chat model in float32, on CUDA where there is a card, and its tokenizer."""
    if name is None and not SMOLLM2.exists():
        sys.exit("--model: outside the repository, name a folder or a hub id")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    name = name or runpy.run_path(str(SMOLLM2))["smollm2"]()
    model = transformers.AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return model.eval().to(device), transformers.AutoTokenizer.from_pretrained(name)


@torch.no_grad()
def same(
    model: Any, prompts: list[list[int]], ours: list[list[int]], theirs: list[list[int]]
) -> bool:
    """Compares row by row and says so; a tie of two logits at the first difference is excused."""
    print(f"{sum(a == b for a, b in zip(ours, theirs))} of {len(prompts)} equal, token by token")
    excused = True
    for i, (prompt, a, b) in enumerate(zip(prompts, ours, theirs)):
        at = next((n for n, pair in enumerate(zip(a, b)) if pair[0] != pair[1]), None)
        if at is not None:
            ids = torch.tensor([prompt + b[:at]], device=model.device)
            logits = model(ids).logits[0, -1]
            gap = abs(float(logits[a[at]] - logits[b[at]]))
            print(f"row {i} parts at token {at}, where the two logits lie {gap:.1e} apart")
            excused &= gap < TIE
        elif a != b:
            print(f"row {i} has {len(a)} tokens against {len(b)}")
            excused = False
    return excused


def chat_ids(tok: Any, messages: list[dict[str, str]]) -> list[int]:
    """Tokens of a conversation, up to where the model's answer begins."""
    return tok.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)


def end_tokens(model: Any) -> set[int]:
    """Tokens that end an answer."""
    ends = model.generation_config.eos_token_id
    return {ends} if isinstance(ends, int) else set(ends or ())
