"""A model with recurrent states: a prefix computed once, samples by fork, a place to go back to.

    python docs/examples/hybrid.py [--model FOLDER_OR_HUB_ID]

Layers with a state keep no token that could be found again, so a prefix is of use only where its
state was kept as well. `BatchGenerator` knows its prompts and keeps it where they part; in a chat,
`checkpoint` keeps it where you say. Without --model a tiny Qwen3-Next is made on the spot: it talks
nonsense, and every token is compared with transformers' own cache all the same.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
import transformers

from pagedkv import BatchGenerator, PagedCache

sys.path.insert(0, str(Path(__file__).parent))
from common import load, same

RULES = "You keep the log of a lighthouse. Write down in one line what happened, and nothing else. "
ENTRIES = ("A ship passed at noon.", "The lamp was cleaned.", "Fog came up from the south.")


def tiny() -> Any:
    """Three layers of the gated delta rule and one of attention, with random weights."""
    config = transformers.Qwen3NextConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=16,
        linear_value_head_dim=16,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
        initializer_range=0.3,
        eos_token_id=None,
    )
    return transformers.Qwen3NextForCausalLM(config).eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="a folder or a hub id (default: a tiny one, made here)")
    parser.add_argument("--new-tokens", type=int, default=16, help="of every answer")
    args = parser.parse_args()
    torch.manual_seed(0)
    transformers.logging.set_verbosity_error()
    model, tok = load(args.model) if args.model else (tiny(), None)
    options = {"max_new_tokens": args.new_tokens, "do_sample": False, "pad_token_id": 0}
    sampled = {**options, "do_sample": True, "num_return_sequences": 4, "seed": 1}

    def ids_of(text: str) -> list[int]:
        return list(text.encode()) if tok is None else tok(text)["input_ids"]

    def alone(prompt: list[int]) -> list[int]:
        ids = torch.tensor([prompt], device=model.device)
        out = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
        return out[0, len(prompt) :].tolist()

    rules = ids_of(RULES)
    prompts = [rules + ids_of(entry) for entry in ENTRIES]

    # A batch: the rules are computed once, and their state is kept where the entries begin.
    with BatchGenerator(model, tok) as generator:
        results = generator.generate(prompts, **options)
        for entry, result in zip(ENTRIES, results):
            print(f"{result.cached_tokens:>4} of {len(rules)} tokens of the rules found: {entry}")
        ours = [result.tokens for result in results]

        # Samples of one prompt share its state, and each takes a slot when it writes its own.
        several = generator.generate(prompts[:1], **sampled)
        different = len({tuple(result.tokens) for result in several})
        print(f"{different} different samples in {generator.stats.computed:,} computed tokens")

    # By hand: a prefix, forks of it, and a checkpoint that a fork goes back to.
    shared = PagedCache.prefill(model, torch.tensor([rules], device=model.device))
    slots = shared.stats().states
    with shared, shared.fork() as chat:
        print(f"{chat.stats().states - slots} more states for a fork of the rules")
        chat.checkpoint()
        for prompt in prompts:
            ids = torch.tensor([prompt], device=model.device)
            out = model.generate(ids, attention_mask=torch.ones_like(ids), cache=chat, **options)
            ours.append(out[0, len(prompt) :].tolist())
            chat.crop(len(rules))  # to the checkpoint; no other length has a state
        config = chat.kv.config
        kept, token = config.bytes_per_state, config.bytes_per_token
        print(f"A state is {kept / 2**10:,.0f} KiB, as K and V of {kept // token:,} tokens.")

    sys.exit(not same(model, prompts * 2, ours, [alone(prompt) for prompt in prompts] * 2))


if __name__ == "__main__":
    main()
